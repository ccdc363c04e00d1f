"""Prefetch: what was gathered for nothing."""

import pytest

from fsdp_sim.op import Kind
from tests.sim.ops import Ops, read, write

LABEL = "fsdp_core::unshard fc2"


def gather(ops: Ops, block: int = 7, label: str | None = LABEL) -> None:
    """Gather a block on stream 1."""
    ops.alloc(1, block)
    ops.collective(1, read(3), write(block), annotation=label)


def test_a_gather_that_is_freed_unread_is_a_notice() -> None:
    """Legal, but the bandwidth was wasted."""
    ops = Ops()
    gather(ops)
    ops.free(1, 7)

    (finding,) = ops.findings("prefetch")

    assert finding.is_notice
    assert finding.message == (
        "rank 0: what 'all_gather' gathered for 'fsdp_core::unshard fc2' was never used"
    )
    assert finding.detail == ("freed at op 2 (program.py:2)",)


def test_a_gather_that_is_still_there_at_the_end_unread_is_a_notice() -> None:
    """Nobody will read it any more."""
    ops = Ops()
    gather(ops)

    assert len(ops.findings("prefetch")) == 1


def test_a_gather_that_is_read_in_part_was_used() -> None:
    """One parameter of a unit is enough."""
    ops = Ops()
    gather(ops)
    ops.aten(0, read(7, 0, 4))
    ops.free(1, 7)

    assert ops.findings("prefetch") == ()


@pytest.mark.parametrize("label", [None, LABEL])
def test_a_gather_that_another_collective_reads_was_used(label: str | None) -> None:
    """Gathers over several axes pass the data on, and the last of them is what is to be used."""
    ops = Ops()
    gather(ops)
    ops.collective(1, read(7), write(8), annotation=label)
    ops.free(1, 7)

    notices = [finding.ops[0].index for finding in ops.findings("prefetch")]
    assert notices == ([] if label is None else [2])


@pytest.mark.parametrize(("guards", "count"), [(True, 0), (False, 1)])
def test_a_wait_for_the_event_of_a_gather_is_a_use(guards: bool, count: int) -> None:
    """The runtime needed the weights; an event behind a later gather says nothing of this one."""
    ops = Ops()
    gather(ops)
    if guards:
        ops.record(1, event=0)
    else:
        ops.record(1, event=1)
        gather(ops, block=8)
        ops.record(1, event=0)
    ops.wait(0, event=0)
    ops.free(1, 7)

    assert len(ops.findings("prefetch")) == count


def test_a_wait_to_drop_the_weights_is_no_use() -> None:
    """The runtime brings a gather to rest that it turned out not to need."""
    ops = Ops()
    gather(ops)
    ops.record(1, event=0)
    ops.add(Kind.WAIT_EVENT, "wait_event", 0, other=0, annotation="fsdp_core::reshard fc2")
    ops.free(1, 7)

    assert len(ops.findings("prefetch")) == 1


def test_one_unit_gathered_in_segments_is_one_notice() -> None:
    """Unequal shards arrive as one broadcast each."""
    ops = Ops()
    ops.alloc(1, 7)
    for lo in (0, 32):
        ops.collective(1, write(7, lo, lo + 32), name="broadcast", annotation=LABEL)
    ops.free(1, 7)

    assert [finding.count for finding in ops.findings("prefetch")] == [1]


def test_a_gather_of_the_program_itself_may_go_unread() -> None:
    """It may be for another rank's eyes."""
    ops = Ops()
    gather(ops, label=None)
    ops.free(1, 7)

    assert ops.findings("prefetch") == ()


def test_each_unit_that_was_gathered_in_vain_is_named() -> None:
    """Two units gathered by one line of the runtime are two notices."""
    ops = Ops()
    for block, unit in ((7, "fc2"), (8, "fc3")):
        op = ops.collective(1, write(block), annotation=f"fsdp_core::unshard {unit}")
        op.source = None

    assert len(ops.findings("prefetch")) == 2


def test_a_gather_that_is_in_flight_when_the_step_completes_is_an_error() -> None:
    """Its unit would look gathered to the next step."""
    ops = Ops()
    gather(ops)
    ops.push("fsdp_core::complete")
    ops.pop_range("fsdp_core::complete")

    (finding,) = ops.findings("prefetch")

    assert finding.kind == "NotAtRest"
    assert "'fsdp_core::unshard fc2' must be waited for or freed" in finding.message


def test_a_gather_that_was_waited_for_may_stay_when_the_step_completes() -> None:
    """Weights that are kept on purpose are no defect."""
    ops = Ops()
    gather(ops)
    ops.record(1, event=0)
    ops.wait(0, event=0)
    ops.push("fsdp_core::complete")
    ops.pop_range("fsdp_core::complete")

    assert ops.findings("prefetch") == ()
