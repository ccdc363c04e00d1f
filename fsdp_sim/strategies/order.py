"""execution_orders: which units run in which phase, in what order, on each rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hypothesis import strategies as st

from fsdp_sim.errors import ConfigError
from fsdp_sim.program.check import RANKS_MAX
from fsdp_sim.strategies.arguments import check_range

Event = tuple[str, Literal["forward", "backward"]]
_LENGTH_MAX = 1000


@dataclass(frozen=True)
class Orders:
    """What each rank runs in one pass, and what a runtime that records it must say.

    Attributes:
        ranks: per rank, its events in order.
        first_difference: position of the first event that not all ranks share; None where they agree.
        error: name of the error that every rank must raise; None where they agree.
        match: what its message must contain.
    """

    ranks: tuple[tuple[Event, ...], ...]
    first_difference: int | None = None
    error: str | None = None
    match: str = ""


def execution_orders(
    units: Sequence[str], world_size: int = 2, *, length_max: int = 8, divergent: bool = False
) -> st.SearchStrategy[Orders]:
    """Draw a pass over ``units``: forwards with repetitions, then backwards; shrinks to one call.

    Args:
        units: names of the units.
        world_size: number of ranks.
        length_max: most forward calls.
        divergent: whether one rank runs something else than the others.

    Example:
        >>> execution_orders(("a", "b"), divergent=True)  # rank 1 runs b where rank 0 runs a

    Raises:
        ConfigError: no units, a number out of range, or divergence asked of one rank.
    """
    if not units or len(set(units)) != len(units):
        raise ConfigError(f"units must be one or more distinct names, got {list(units)}")
    check_range("world_size", world_size, 2 if divergent else 1, RANKS_MAX)
    check_range("length_max", length_max, 1, _LENGTH_MAX)
    return _orders(tuple(units), world_size, length_max, divergent=divergent)


@st.composite
def _orders(
    draw: Any, units: tuple[str, ...], world_size: int, length_max: int, *, divergent: bool
) -> Orders:
    calls = draw(st.lists(st.sampled_from(units), min_size=1, max_size=length_max))
    forward: list[Event] = [(name, "forward") for name in calls]
    events = (*forward, *((name, "backward") for name in reversed(calls)))
    if not divergent:
        return Orders((events,) * world_size)
    rank = draw(st.integers(0, world_size - 1))
    other = _changed(draw, events, units)
    ranks = tuple(other if number == rank else events for number in range(world_size))
    place = _first_difference(events, other)
    return Orders(ranks, place, "StateError", f"a difference at position {place}: ")


def _changed(draw: Any, events: tuple[Event, ...], units: tuple[str, ...]) -> tuple[Event, ...]:
    """Return ``events`` with one of them left out, doubled, or replaced by another unit's."""
    place = draw(st.integers(0, len(events) - 1))
    name, phase = events[place]
    others = [unit for unit in units if unit != name]
    here: list[Event]
    if others and draw(st.booleans()):
        here = [(draw(st.sampled_from(others)), phase)]
    else:
        here = [events[place]] * draw(st.sampled_from((0, 2)))
    return (*events[:place], *here, *events[place + 1 :])


def _first_difference(left: tuple[Event, ...], right: tuple[Event, ...]) -> int:
    """Return the first position at which two different orders differ."""
    shared = min(len(left), len(right))
    return next((n for n in range(shared) if left[n] != right[n]), shared)
