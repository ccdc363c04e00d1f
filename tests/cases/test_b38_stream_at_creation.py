"""B38: deferred work runs on the stream that was current when it was made, and nobody waits there."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_sim

cpu: Any = torch.cpu


def deferred_gradient(rank: int, looks_up_late: bool) -> list[float]:
    """Make a closure on one stream, run it inside another; the reduction waits for that one only."""
    compute, side, reduction = cpu.current_stream(), cpu.Stream(), cpu.Stream()
    values, total = torch.ones(4), torch.empty(2)
    current_when_made = cpu.current_stream()

    def compute_gradient() -> torch.Tensor:
        with cpu.stream(cpu.current_stream() if looks_up_late else current_when_made):
            return values * (rank + 1)

    side.wait_stream(compute)
    with cpu.stream(side):
        gradient = compute_gradient()
    reduction.wait_stream(side)
    with cpu.stream(reduction):
        dist.reduce_scatter(total, list(gradient.chunk(2)))
    compute.wait_stream(side)
    compute.wait_stream(reduction)
    return total.tolist()


def test_work_that_looks_its_stream_up_when_it_runs_is_clean() -> None:
    """NVIDIA/TransformerEngine#3089, mended."""
    report = fsdp_sim.simulate(deferred_gradient, 2, args=(True,))

    assert report.results == [[3.0, 3.0], [3.0, 3.0]]


def test_work_on_the_stream_of_its_making_races_with_the_reduction() -> None:
    """NVIDIA/TransformerEngine#3089: values are right here by luck; the report names the stream."""
    with pytest.raises(fsdp_sim.Race) as caught:
        fsdp_sim.simulate(deferred_gradient, 2, args=(False,))

    # Streams are numbered in the order of their first use: compute, side, reduction.
    finding = caught.value.finding
    assert finding is not None
    assert [(op.name, op.stream.split(" (")[0]) for op in finding.ops] == [
        ("mul.Tensor", "stream 0"),
        ("reduce_scatter", "stream 2"),
    ]
    assert "nothing orders" in finding.describe()
    assert "stream 2 has never waited for stream 0" in finding.describe()
