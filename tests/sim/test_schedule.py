"""Schedules: the line that replays a run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_sim.errors import ConfigError
from fsdp_sim.schedule import RANKS_MAX, STEP_MAX, Deviation, Schedule


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any valid schedule."""
    world_size = draw(st.integers(1, 64))
    steps = sorted(draw(st.sets(st.integers(0, STEP_MAX), max_size=8)))
    choices = st.integers(0, max(world_size, 2) - 1)
    knobs = draw(st.lists(st.sampled_from(["seed7", "late", "shuffle3", "crash"]), unique=True))
    return Schedule(world_size, tuple(knobs), tuple(Deviation(s, draw(choices)) for s in steps))


@given(schedules())
def test_a_schedule_is_read_back_as_it_was_written(schedule: Schedule) -> None:
    """Parsing undoes printing."""
    assert Schedule.parse(str(schedule)) == schedule


def test_a_line_is_version_world_knobs_and_deviations() -> None:
    """The printed form is fixed: replay lines outlive a version of the code."""
    line = "v1;w4;seed7;late;17>2;42>0"

    schedule = Schedule.parse(line)

    assert schedule == Schedule(4, ("seed7", "late"), (Deviation(17, 2), Deviation(42, 0)))
    assert str(schedule) == line


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("", "got ''"),
        ("w4;17>2", "got 'w4;17>2'"),
        ("v2;w4", "got 'v2'"),
        ("v01;w4", "got 'v01;w4'"),
        ("v1", "got the end"),
        ("v1;4", "got '4'"),
        ("v1;w0", "got 0"),
        (f"v1;w{RANKS_MAX + 1}", f"got {RANKS_MAX + 1}"),
        ("v1;w4;", "got ''"),
        ("v1;w4;17>2;late", "got 'late'"),
        ("v1;w4;w4", "got 'w4'"),
        ("v1;w4;x", "got 'x'"),
        ("v1;w4;latest", "got 'latest'"),
        ("v1;w4;late;late", "got 'late' twice"),
        ("v1;w4;17>", "got '17>'"),
        ("v1;w4; 17>2", "got ' 17>2'"),
        ("v1;w4;017>2", "got '017>2'"),
        ("v1;w4;-1>2", "got '-1>2'"),
        ("v1;w4;17>2;17>3", "got 17>2 before 17>3"),
        ("v1;w4;17>2;3>1", "got 17>2 before 3>1"),
        ("v1;w4;17>4", "got 17>4"),
        ("v1;w1;17>2", "got 17>2"),
        ("v1;w4;999999999>1", "got 999999999>1"),
    ],
)
def test_a_line_that_is_no_schedule_is_refused_by_part(line: str, named: str) -> None:
    """The error says which part is wrong."""
    with pytest.raises(ConfigError, match=r"schedule|deviation") as caught:
        Schedule.parse(line)

    assert named in str(caught.value)


def test_a_yes_no_deviation_fits_a_world_of_one() -> None:
    """A single rank still polls, so 1 is a choice in a world of one."""
    assert Schedule.parse("v1;w1;3>1").deviations == (Deviation(3, 1),)
