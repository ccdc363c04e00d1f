"""What the arguments of strategies must hold, said once; and odds that shrink to "no"."""

from collections.abc import Sequence

from hypothesis import strategies as st

from fsdp_sim.errors import ConfigError


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Raise unless ``value`` is a whole number in ``low..high``.

    Raises:
        ConfigError: it is not; names the argument.
    """
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(f"{name} must be a whole number from {low} to {high}, got {value!r}")


def check_bounds(what: str, low: int, high: int) -> None:
    """Raise unless a minimum is at most its maximum.

    Raises:
        ConfigError: it is not.
    """
    if low > high:
        raise ConfigError(f"{what}: the minimum must be at most the maximum, got {low} over {high}")


def check_kinds(name: str, kinds: Sequence[str], known: Sequence[str]) -> None:
    """Raise unless ``kinds`` is a non-empty selection of ``known``.

    Raises:
        ConfigError: it is not; lists what is known.
    """
    unknown = [kind for kind in kinds if kind not in known]
    if isinstance(kinds, str) or unknown or not kinds:
        raise ConfigError(f"{name} must be some of {', '.join(known)}; got {kinds!r}")


def chance(percent: int) -> st.SearchStrategy[bool]:
    """Return a strategy that is True in about ``percent`` of 100 draws and shrinks to False."""
    return st.integers(0, 99).map(lambda number: number >= 100 - percent)
