"""B41: collectives of two communicators that nothing orders on the device may block each other."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_sim

cpu: Any = torch.cpu


def two_groups(rank: int, swaps: bool = False, is_ordered: bool = False) -> list[float]:
    """Add up one tensor on each of two groups of the same ranks, each on a stream of its own."""
    compute = cpu.current_stream()
    work = []
    for _ in range(2):
        stream = cpu.Stream()
        work.append((stream, dist.new_group([0, 1]), torch.ones(2)))
        stream.wait_stream(compute)
    tensors = [tensor for _, _, tensor in work]
    if swaps and rank == 1:
        work.reverse()
    for position, (stream, group, tensor) in enumerate(work):
        if is_ordered and position:
            stream.wait_event(work[0][0].record_event())
        with cpu.stream(stream):
            dist.all_reduce(tensor, group=group)
    for stream, _, _ in work:
        compute.wait_stream(stream)
    return torch.cat(tensors).tolist()


@pytest.mark.parametrize("is_ordered", [False, True])
def test_opposite_orders_are_a_deadlock(is_ordered: bool) -> None:
    """NVIDIA/nccl#195, #574; with an event between them the devices wait in a circle."""
    with pytest.raises(fsdp_sim.Deadlock) as caught:
        fsdp_sim.simulate(two_groups, 2, args=(True, is_ordered))

    finding = caught.value.finding
    assert finding is not None
    assert sorted(finding.ranks) == [0, 1]
    assert len(finding.ops) == 4
    assert all(op.name == "all_reduce" for op in finding.ops)


def test_one_order_on_unordered_streams_is_a_possible_deadlock() -> None:
    """ROCm/rccl#2191, pytorch#116611: a notice with a kind of its own; the run counts as clean."""
    report = fsdp_sim.simulate(two_groups, 2)

    assert report.results == [[2.0] * 4] * 2
    assert report.findings == ()
    (notice,) = report.notices
    assert notice.kind == "PossibleDeadlock"
    assert notice.ranks == (0, 1)
    assert "may block each other" in notice.message


def test_the_notice_can_be_switched_off() -> None:
    """By leaving its checker out."""
    report = fsdp_sim.simulate(two_groups, 2, checkers=["races", "lifetime", "collective_match"])

    assert report.notices == ()


def test_an_event_between_the_two_orders_them() -> None:
    """Then nothing is said."""
    report = fsdp_sim.simulate(two_groups, 2, args=(False, True))

    assert report.results == [[2.0] * 4] * 2
    assert report.notices == ()
