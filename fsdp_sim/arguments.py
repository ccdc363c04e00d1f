"""What arguments of public calls must hold, said once."""

from collections.abc import Iterable
from typing import Any

from fsdp_sim.errors import ConfigError


def check_integer(name: str, value: Any) -> None:
    """Raise unless ``value`` is a whole number; True and False are none.

    Raises:
        ConfigError: it is not; names the argument.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} must be an integer, got {value!r}")


def check_positive(name: str, value: Any) -> None:
    """Raise unless ``value`` is a whole number of at least 1.

    Raises:
        ConfigError: it is not; names the argument.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be a positive integer, got {value!r}")


def check_seconds(name: str, value: Any) -> None:
    """Raise unless ``value`` is a finite time above 0.

    Raises:
        ConfigError: it is not; names the argument.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be a finite number of seconds above 0, got {value!r}")


def several(name: str, values: Iterable[Any], kinds: tuple[type, ...] = (str,)) -> tuple[Any, ...]:
    """Return what a list of things holds; a single one is no list.

    Raises:
        ConfigError: it is no list, or something in it is of none of ``kinds``.
    """
    if isinstance(values, kinds):
        raise ConfigError(f"{name} must be a list, got {values!r}; pass [{values!r}]")
    if not isinstance(values, Iterable):
        raise ConfigError(f"{name} must be a list, got {values!r}")
    found = tuple(values)
    for each in found:
        if not isinstance(each, kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise ConfigError(f"{name} must be a list of {wanted}, got {each!r} in it")
    return found
