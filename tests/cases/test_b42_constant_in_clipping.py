"""B42: the constant that keeps clipping from dividing by zero is added once, not on every rank."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp_core
import fsdp_sim
from fsdp_core import grad_norm
from tests.cases.programs import linear, shard

NORM = 5.0


def clip(rank: int) -> tuple[Tensor, Tensor]:
    """Clip gradients of 3 on rank 0 and 4 on rank 1 to a norm of 1; return norm and gradient."""
    model = nn.Sequential(linear(2, 1))
    shard(model, "")
    model(torch.ones(1, 1)).backward(torch.tensor([[3.0, 4.0]]))
    norm = fsdp_core.clip_grad_norm_(model.parameters(), 1.0)
    (parameter,) = model.parameters()
    assert isinstance(parameter.grad, DTensor)
    return norm.clone(), parameter.grad.to_local().clone()


def gradients_over(divisor: float) -> list[Tensor]:
    """What the two ranks' gradients are when both are divided so, as fp32 multiplies."""
    factor = torch.tensor(1.0) / torch.tensor(divisor)
    return [torch.tensor([[3.0]]) * factor, torch.tensor([[4.0]]) * factor]


def test_the_norm_is_exact_and_the_factor_is_the_same_on_all_ranks() -> None:
    """pytorch#149768: the factor is 1 / (5 + 1e-6), whatever the number of ranks."""
    report = fsdp_sim.simulate(clip, 2)

    for (norm, gradient), expected in zip(report.results, gradients_over(NORM + 1e-6), strict=True):
        assert norm.item() == NORM
        assert torch.equal(gradient, expected)


def test_a_large_constant_shows_that_it_is_added_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1 it is 1/6; added on each rank before the sum it would be 1/sqrt(4**2 + 5**2)."""
    monkeypatch.setattr(grad_norm, "EPSILON", 1.0)

    report = fsdp_sim.simulate(clip, 2)

    for (norm, gradient), expected in zip(report.results, gradients_over(6.0), strict=True):
        assert norm.item() == NORM
        assert torch.equal(gradient, expected)


def test_a_constant_that_each_rank_adds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect planted: the norm is the root of 4**2 + 5**2, and both gradients are too small."""

    def added_by_each(_grads: Any, rows: list[Tensor], *_: Any) -> Tensor:
        total = (torch.linalg.vector_norm(rows[0]) + 1.0) ** 2
        dist.all_reduce(total)
        return total.sqrt()

    monkeypatch.setattr(grad_norm, "_norm_over_ranks", added_by_each)

    report = fsdp_sim.simulate(clip, 2)

    for (norm, gradient), expected in zip(report.results, gradients_over(6.0), strict=True):
        assert norm.item() == pytest.approx(math.hypot(4, 5))
        assert (gradient < expected).all()
