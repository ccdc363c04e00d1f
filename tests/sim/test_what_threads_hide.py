"""What PyTorch's own threads backend lets pass, with wrong numbers or after a timeout, is found here at once.

Each was run there (``torch.testing._internal.distributed.multi_threaded_pg``, torch 2.13).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

import fsdp_sim


def gather() -> None:
    """Gather one element of each of two ranks."""
    dist.all_gather([torch.ones(1), torch.ones(1)], torch.ones(1))


def scatter() -> None:
    """Reduce two elements and keep one."""
    dist.reduce_scatter(torch.ones(1), [torch.ones(1), torch.ones(1)])


def sum_of(numel: int) -> Tensor:
    """Return what two ranks add up."""
    total = torch.ones(numel)
    dist.all_reduce(total)
    return total


HIDDEN: dict[str, tuple[type[Exception], Callable[[int], Any]]] = {
    "another operation": (
        fsdp_sim.CollectiveMismatch,
        lambda rank: dist.broadcast(torch.ones(4), 0) if rank else sum_of(4),
    ),
    "another reduction": (
        fsdp_sim.CollectiveMismatch,
        lambda rank: dist.all_reduce(torch.ones(4), (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[rank]),
    ),
    "another root": (
        fsdp_sim.CollectiveMismatch,
        lambda rank: dist.broadcast(torch.ones(4), rank),
    ),
    "another size, expanded in silence": (
        fsdp_sim.CollectiveMismatch,
        lambda rank: dist.broadcast(torch.ones((1, 8)[rank]), 0),
    ),
    "another size of a sum": (fsdp_sim.CollectiveMismatch, lambda rank: sum_of((4, 8)[rank])),
    "another type": (
        fsdp_sim.CollectiveMismatch,
        lambda rank: dist.all_reduce(torch.ones(4, dtype=(torch.float, torch.half)[rank])),
    ),
    "another order": (
        fsdp_sim.CollectiveMismatch,
        lambda rank: [call() for call in ((gather, scatter), (scatter, gather))[rank]],
    ),
    "a rank that is missing": (fsdp_sim.Deadlock, lambda rank: rank or sum_of(4)),
    "a result that nobody waited for": (
        fsdp_sim.Race,
        lambda _: dist.all_reduce(total := torch.ones(4), async_op=True) and total.sum(),
    ),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_the_threads_backend_hides_is_found(name: str) -> None:
    """One line of what it was tried with; the report names both ranks."""
    error, program = HIDDEN[name]
    with pytest.raises(error) as caught:
        fsdp_sim.simulate(program, 2)

    finding: Any = getattr(caught.value, "finding", None)
    assert sorted(finding.ranks) == [0, 1]


def test_gradients_are_divided_by_a_factor_of_the_users() -> None:
    """FSDP2 multiplies before it sums, a reduction that the threads backend does not have."""

    def gradient(rank: int) -> list[float]:
        model: Any = fully_shard(nn.Linear(2, 1, bias=False))
        model.set_gradient_divide_factor(2.0)
        model(torch.full((1, 2), float(rank + 1))).sum().backward()
        return model.weight.grad.full_tensor().flatten().tolist()

    report = fsdp_sim.simulate(gradient, 4, trace=True)
    reductions = {op.call.reduce_op for op in report.trace.ops if op.call is not None}

    assert report.results == [[(1 + 2 + 3 + 4) / 2] * 2] * 4
    assert "PREMUL_SUM" in reductions


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # its hooks make views of outputs
def test_a_rank_counts_its_own_collectives() -> None:
    """``CommDebugMode`` hooks all modules of a process, and loses its way among threads.

    Its tracker keeps the weights for good, in real processes too, and is reported for that.
    """

    def counts(_rank: int) -> dict[str, int]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for unit in (*model, model):
            fully_shard(unit)
        with CommDebugMode() as mode:
            model(torch.ones(1, 4).requires_grad_()).sum().backward()
        return {str(name): count for name, count in mode.get_comm_counts().items()}

    report = fsdp_sim.simulate(counts, 3, strict=False)

    assert {finding.kind for finding in report.findings} == {"Leak"}
    assert report.results == [{"c10d._allgather_base_": 4, "c10d._reduce_scatter_base_": 2}] * 3
