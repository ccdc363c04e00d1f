"""B23: a unit that was frozen in its first forward reduces as if it had never been."""

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import fsdp_sim
from fsdp_core import MixedPrecisionPolicy
from fsdp_sim.op import Kind
from tests.cases.programs import (
    Row,
    Training,
    assert_equal,
    batch,
    check_parity,
    fill,
    integers,
    loss_of,
    train_shards,
)

POLICY = MixedPrecisionPolicy(grad_comm_dtype=torch.float32, compute_dtype=torch.bfloat16)
"""Weights and gradients in fp32, compute in bf16, reductions in fp32."""
Frozen = Literal["never", "when sharded", "in the first forward"]


class Casting(nn.Module):
    """A weight [2, 2] that computes in its own dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(integers(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` times the weight, in the weight's dtype."""
        return F.linear(x.to(self.weight.dtype), self.weight)


def row() -> nn.Module:
    """Two such layers."""
    return fill(Row(front=Casting(), unit=Casting()))


def unfrozen(frozen: Frozen) -> Training:
    """A forward without a backward, in which the unit may be frozen, then an ordinary step."""

    def build() -> nn.Module:
        model = row()
        model.get_submodule("unit").requires_grad_(frozen != "when sharded")
        return model

    def step(model: nn.Module, rank: int, number: int) -> None:
        unit = model.get_submodule("unit")
        if frozen == "in the first forward":
            unit.requires_grad_(False)
        model(batch(rank, number))
        unit.requires_grad_(True)
        loss_of(model(batch(rank, number)), rank).backward()

    options = {"mixed_precision_policy": POLICY}
    return Training(build, step, ("front", "unit"), options=options)


@pytest.mark.parametrize("frozen", ["when sharded", "in the first forward"])
@pytest.mark.filterwarnings("ignore:step")
def test_it_reduces_in_fp32_and_as_a_run_that_was_never_frozen(frozen: Frozen) -> None:
    """pytorch#186998: never in the compute dtype, never without a reduction."""
    never = fsdp_sim.simulate(train_shards, 2, args=(unfrozen("never"),))

    report = fsdp_sim.simulate(train_shards, 2, args=(unfrozen(frozen),), trace=True)

    reductions = [
        op.call
        for op in report.trace.all_ops()
        if op.kind is Kind.COLLECTIVE and (op.annotation or "").startswith("fsdp_core::reduce")
    ]
    assert [call.dtype for call in reductions if call] == ["float32"] * 4
    for (got,), (expected,) in zip(report.results, never.results, strict=True):
        assert_equal(got.gradients, expected.gradients)
        assert_equal(got.weights, expected.weights)
        assert {g.dtype for g in got.gradients.values() if g is not None} == {torch.float32}


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=4))
@settings(max_examples=8)
@pytest.mark.filterwarnings("ignore:step")
def test_freezing_and_unfreezing_at_any_step_has_parity(frozen: list[tuple[bool, bool]]) -> None:
    """Both units, in every step anew; one that is frozen keeps its weight and has no gradient."""

    def step(model: nn.Module, rank: int, number: int) -> None:
        for name, is_frozen in zip(("front", "unit"), frozen[number], strict=True):
            model.get_submodule(name).requires_grad_(not is_frozen)
        loss = loss_of(model(batch(rank, number)), rank)
        if loss.requires_grad:
            loss.backward()

    options = {"mixed_precision_policy": POLICY}
    check_parity(Training(row, step, ("front", "unit"), len(frozen), options=options))
