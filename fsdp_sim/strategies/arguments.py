"""What the arguments of strategies must hold, said once; and the draws that all strategies are made of."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st

from fsdp_sim.errors import ConfigError

T = TypeVar("T")


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


Draw = Callable[[st.SearchStrategy[Any]], Any]


def number(draw: Draw, low: int, high: int) -> int:
    """Draw a whole number in ``low..high``; shrinks to ``low``."""
    value: int = draw(_numbers(low, high))
    return value


def pick(draw: Draw, options: Sequence[T]) -> T:
    """Draw one of ``options``; shrinks to the first."""
    return options[number(draw, 0, len(options) - 1)]


def maybe(draw: Draw, percent: int) -> bool:
    """Draw True about ``percent`` times in 100; shrinks to False."""
    return number(draw, 0, 99) >= 100 - percent


@functools.cache
def _numbers(low: int, high: int) -> st.SearchStrategy[int]:
    """Return one strategy object per range: making and validating one costs more than drawing from it."""
    return st.integers(low, high)
