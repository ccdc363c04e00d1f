"""Analysis: feeding, merging, and the registry of checkers."""

import pytest

from fsdp_sim.analysis import Analysis, analyse
from fsdp_sim.checkers import CHECKERS, make
from fsdp_sim.errors import ConfigError, Finding
from tests.sim.ops import Ops, read, write


def racy_loop(rank: int, rounds: int) -> Ops:
    """One missing wait, met once a round."""
    ops = Ops(rank)
    for block in range(rounds):
        ops.aten(0, write(block), line=1)
        ops.aten(1, read(block), line=2)
    return ops


def test_one_missing_wait_is_one_finding() -> None:
    """Same kind, source lines and streams: counted, with the ranks where it occurred."""
    ops = [*racy_loop(1, 3), *racy_loop(0, 2)]

    (finding,) = analyse(ops, make(["races"]), 2).findings

    assert finding.count == 5
    assert finding.ranks == (0, 1)
    assert finding.ops[0].rank == 1


def test_what_one_wait_would_mend_is_one_finding() -> None:
    """A wait before the first read orders the second one too; the finding counts it."""
    ops = Ops()
    ops.aten(0, write(7), line=1)
    ops.aten(1, read(7), line=2)
    ops.aten(1, read(7), line=3)

    (finding,) = ops.findings("races")

    assert finding.count == 1
    assert finding.detail[-1] == "the same missing edge also shows as Race 1 times"


def test_two_waits_to_add_are_two_findings() -> None:
    """A wait at the first read comes too early for the second write."""
    ops = Ops()
    ops.aten(0, write(7), line=1)
    ops.aten(1, read(7), line=2)
    ops.aten(0, write(8), line=3)
    ops.aten(1, read(8), line=4)

    assert len(ops.findings("races")) == 2


def test_edges_of_different_streams_do_not_explain_each_other() -> None:
    """Each pair of streams, and each direction, needs a wait of its own."""
    ops = Ops()
    ops.aten(0, write(7), line=1)
    ops.aten(1, read(7), line=2)
    ops.aten(2, read(7), line=3)

    assert len(ops.findings("races")) == 2


def test_feed_returns_what_is_new() -> None:
    """The engine stops at the op that broke something."""
    analysis = Analysis(make(["races"]), 1)
    first, second = racy_loop(0, 1)

    assert list(analysis.feed(first)) == []
    assert [finding.kind for finding in analysis.feed(second)] == ["Race"]


def test_a_finding_lists_the_steps_where_it_occurred() -> None:
    """The caller says at which scheduling step the run is."""
    steps = iter((11, 13))
    analysis = Analysis(make(["races"]), 1, now=lambda: next(steps))
    for op in racy_loop(0, 2):
        analysis.feed(op)

    assert analysis.findings[0].steps == (11, 13)


def test_findings_of_no_op_are_merged_by_message() -> None:
    """A deadlock found elsewhere stands among the others."""
    analysis = Analysis(make([]), 1)
    for _ in range(2):
        analysis.add(Finding("Deadlock", "rank 0 waits for rank 1"))

    assert [finding.count for finding in analysis.findings] == [2]


def test_an_unknown_checker_is_refused_with_the_known_ones() -> None:
    """The error lists what there is."""
    with pytest.raises(ConfigError, match=f"among {', '.join(CHECKERS)}, got 'luck'$"):
        make(["races", "luck"])
