"""B33: memory that is reused behind its reader is no race, whether it was recorded or not."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, cpu

import fsdp_sim
from fsdp_core.torch_private import all_gather_single


def gather_buckets(rank: int, waits: bool, count: int = 3) -> float:
    """Gather into a bucket on a stream of its own, use it, free it, and do so again."""
    assert dist.group.WORLD is not None
    shard = torch.full((4,), float(rank + 1))
    gather = cpu.Stream()
    gather.wait_stream(cpu.current_stream())
    total = torch.zeros(())
    for _ in range(count):
        if waits:
            gather.wait_stream(cpu.current_stream())
        with cpu.stream(gather):
            bucket = torch.empty(8)
            all_gather_single(bucket, shard, dist.group.WORLD)
        cpu.current_stream().wait_stream(gather)
        total = use(total, bucket)
        del bucket
    return float(total)


def use(total: Tensor, bucket: Tensor) -> Tensor:
    """Read the bucket on the current stream."""
    return total + bucket.sum()


def test_a_wait_before_each_allocation_is_enough() -> None:
    """NVIDIA/Megatron-LM#5788, retracted: an edge orders the reuse, so no record is missed."""
    report = fsdp_sim.simulate(gather_buckets, 2, args=(True,))

    assert report.results == [3 * 12.0] * 2
    assert report.findings == ()
    assert report.notices == ()


def test_without_that_wait_there_is_exactly_one_report() -> None:
    """Every reuse is the same missing edge."""
    report = fsdp_sim.simulate(gather_buckets, 2, args=(False,), strict=False)

    (finding,) = report.findings
    assert finding.kind == "UseAfterFree"
    assert finding.count == 2 * 2
    assert finding.ranks == (0, 1)


@pytest.mark.parametrize("waits", [True, False])
def test_a_block_that_is_freed_once_and_never_reused_is_no_race(waits: bool) -> None:
    """Nothing is allocated behind it."""
    assert fsdp_sim.simulate(gather_buckets, 2, args=(waits, 1)).findings == ()
