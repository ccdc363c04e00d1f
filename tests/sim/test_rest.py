"""Rest: what may still be in flight when a program ends."""

import pytest
import torch
import torch.distributed as dist

import fsdp_sim
from tests.sim.ops import Ops, read, write


def test_a_collective_that_nobody_waits_for_is_not_at_rest() -> None:
    """It was in flight when the program ended."""
    ops = Ops()
    ops.collective(1, write(7))

    (finding,) = ops.findings("rest")

    assert finding.kind == "NotAtRest"
    assert finding.message == (
        "rank 0: 'all_gather' on stream 1 was still in flight when the program ended;"
        " nothing waited for it"
    )


@pytest.mark.parametrize("waiter", ["default stream", "third stream", "host"])
def test_any_waiter_brings_it_to_rest(waiter: str) -> None:
    """A stream or the host."""
    ops = Ops()
    ops.collective(1, write(7))
    if waiter == "host":
        ops.synchronize(1)
    else:
        ops.wait_stream(0 if waiter == "default stream" else 2, 1)

    assert ops.findings("rest") == ()


def test_a_wait_for_an_earlier_collective_does_not_cover_a_later_one() -> None:
    """A stream is at rest when its last one is."""
    ops = Ops()
    ops.collective(1, write(7))
    ops.wait_stream(0, 1)
    ops.collective(1, write(8))

    assert len(ops.findings("rest")) == 1


def test_a_collective_on_the_default_stream_needs_no_wait() -> None:
    """The stream that computes is behind it."""
    ops = Ops()
    ops.collective(0, write(7))

    assert ops.findings("rest") == ()


def test_compute_may_be_in_flight() -> None:
    """Only collectives have peers that were promised something."""
    ops = Ops()
    ops.aten(1, read(7))

    assert ops.findings("rest") == ()


def stopped_early(rank: int) -> None:
    """Leave a reduction in flight and run into a mismatch."""
    dist.all_reduce(torch.ones(4), async_op=True)
    if rank == 0:
        dist.all_reduce(torch.ones(4))
    else:
        dist.broadcast(torch.ones(4), src=0)


def test_a_program_that_was_stopped_is_not_blamed_for_what_it_left_open() -> None:
    """It had no chance to tidy up."""
    report = fsdp_sim.simulate(stopped_early, 2, strict=False)

    assert [finding.kind for finding in report.findings] == ["CollectiveMismatch"]
