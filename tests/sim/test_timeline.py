"""The timeline: the earliest place of each op that order allows."""

from fsdp_sim.timeline import COLLECTIVE_UNITS, RankTimeline, rank_timeline
from tests.sim.ops import Ops

COMPUTE, GATHER = 0, 1


def places(ops: Ops) -> list[tuple[int, int]]:
    """Return start and end of each span."""
    return [(span.start, span.end) for span in timeline(ops).spans]


def timeline(ops: Ops) -> RankTimeline:
    """Return the timeline of the only rank."""
    return rank_timeline(ops, 0)


def test_work_of_one_stream_stands_in_a_row() -> None:
    """The host issues one op a unit, and each takes one."""
    ops = Ops()
    ops.aten(COMPUTE)
    ops.aten(COMPUTE)

    assert places(ops) == [(1, 2), (2, 3)]


def test_streams_that_do_not_wait_overlap() -> None:
    """A gather goes on while the compute behind it is issued."""
    ops = Ops()
    ops.collective(GATHER)
    ops.aten(COMPUTE)

    assert places(ops) == [(1, 1 + COLLECTIVE_UNITS), (2, 3)]


def test_a_waiting_stream_goes_on_where_the_other_ended() -> None:
    """What follows a wait stands behind all that was on the other stream."""
    ops = Ops()
    ops.collective(GATHER)
    ops.wait_stream(COMPUTE, GATHER)
    ops.aten(COMPUTE)

    assert places(ops)[1] == (1 + COLLECTIVE_UNITS, 2 + COLLECTIVE_UNITS)


def test_an_event_is_waited_for_where_it_was_recorded() -> None:
    """Work behind the record is not waited for."""
    ops = Ops()
    ops.aten(GATHER)
    ops.record(GATHER, 7)
    ops.collective(GATHER)
    ops.wait(COMPUTE, 7)
    ops.aten(COMPUTE)

    assert places(ops)[2] == (3, 4)


def test_an_event_never_recorded_holds_nothing_up() -> None:
    """As on the device."""
    ops = Ops()
    ops.collective(GATHER)
    ops.wait(COMPUTE, 7)
    ops.aten(COMPUTE)

    assert places(ops)[1] == (2, 3)
    assert timeline(ops).joins == []


def test_a_join_leads_from_the_awaited_stream_to_the_waiting_one() -> None:
    """It has the places of both ends."""
    ops = Ops()
    ops.collective(GATHER)
    ops.wait_stream(COMPUTE, GATHER)
    (join,) = timeline(ops).joins

    assert (join.other, join.start) == (GATHER, 1 + COLLECTIVE_UNITS)
    assert (join.stream, join.end) == (COMPUTE, 1 + COLLECTIVE_UNITS)


def test_the_host_issues_nothing_while_it_waits() -> None:
    """Work behind a host wait stands behind what was waited for, on any stream."""
    ops = Ops()
    ops.collective(GATHER)
    ops.synchronize(GATHER)
    ops.aten(COMPUTE)

    assert places(ops)[1] == (2 + COLLECTIVE_UNITS, 3 + COLLECTIVE_UNITS)


def test_ops_of_other_ranks_are_passed_over() -> None:
    """Each rank has a scale of its own."""
    ops = Ops(rank=1)
    ops.aten(COMPUTE)

    assert rank_timeline(ops, 0) == RankTimeline()
