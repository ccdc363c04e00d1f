"""B29: with hybrid sharding, microbatches are added before the outer reduction, not after it."""

import torch

import fsdp_sim
from fsdp_sim.op import Kind
from tests.cases.programs import ops_by_step
from tests.cases.test_b28_no_sync import accumulate


def test_the_share_of_earlier_microbatches_crosses_the_replicas() -> None:
    """pytorch#125484, #126166: 1.5 + 11.5 on all four ranks, and the same bits on both replicas."""
    report = fsdp_sim.simulate(accumulate, 4, args=((False, True),), trace=True)

    assert all(torch.equal(gradient, torch.full((2, 2), 13.0)) for gradient in report.results)
    for rank in range(4):
        (ops,) = ops_by_step(report, rank)
        calls = [op.call.name for op in ops if op.kind is Kind.COLLECTIVE and op.call]
        assert calls.count("reduce_scatter") == 2
        assert calls.count("all_reduce") == 1
