"""schedules: lines of sparse deviations from program order."""

from typing import Any

from hypothesis import strategies as st

from fsdp_sim.schedule import RANKS_MAX, STEP_MAX, Deviation, Schedule
from fsdp_sim.strategies.arguments import check_range

_DEVIATIONS_MAX = 64


def schedules(
    world_size: int, *, deviations_max: int = 3, step_max: int = 200
) -> st.SearchStrategy[str]:
    """Draw a schedule line such as ``v1;w4;17>2``; shrinks to program order.

    A deviation that does not fit the run is skipped by ``simulate``, so any line goes with any program.

    Args:
        world_size: number of ranks.
        deviations_max: most deviations, so most preemptions.
        step_max: last decision that may deviate.

    Example:
        >>> schedules(4, deviations_max=1)

    Raises:
        ConfigError: a number is out of range.
    """
    check_range("world_size", world_size, 1, RANKS_MAX)
    check_range("deviations_max", deviations_max, 0, _DEVIATIONS_MAX)
    check_range("step_max", step_max, 0, STEP_MAX)
    return _lines(world_size, deviations_max, step_max)


@st.composite
def _lines(draw: Any, world_size: int, deviations_max: int, step_max: int) -> str:
    steps = draw(st.lists(st.integers(0, step_max), max_size=deviations_max, unique=True))
    choices = st.integers(0, max(world_size, 2) - 1)
    deviations = tuple(Deviation(step, draw(choices)) for step in sorted(steps))
    return str(Schedule(world_size, (), deviations))
