"""B23: a unit that was frozen in its first forward reduces as if it had never been."""

from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import fsdp_sim
from fsdp_core import MixedPrecisionPolicy
from fsdp_core.parameter_group import ParameterGroup
from fsdp_sim.op import Kind
from tests.cases.programs import (
    Row,
    Tensors,
    Training,
    assert_equal,
    assert_resting,
    batch,
    check_values,
    fill,
    integers,
    local_rows,
    loss_of,
    put_together,
    shard,
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


def reduced_dtypes(report: fsdp_sim.Report) -> list[str]:
    """The dtype of each reduction of gradients, of all ranks."""
    return [
        op.call.dtype
        for op in report.trace.all_ops()
        if op.kind is Kind.COLLECTIVE
        and op.call
        and (op.annotation or "").startswith("fsdp_core::reduce")
    ]


@pytest.mark.parametrize("frozen", ["when sharded", "in the first forward"])
@pytest.mark.filterwarnings("ignore:step")
def test_it_reduces_in_fp32_and_as_a_run_that_was_never_frozen(frozen: Frozen) -> None:
    """pytorch#186998: never in the compute dtype, never without a reduction."""
    never = fsdp_sim.simulate(train_shards, 2, args=(unfrozen("never"),))

    report = fsdp_sim.simulate(train_shards, 2, args=(unfrozen(frozen),), trace=True)

    assert reduced_dtypes(report) == ["float32"] * 4
    for (got,), (expected,) in zip(report.results, never.results, strict=True):
        assert_equal(got.gradients, expected.gradients)
        assert_equal(got.weights, expected.weights)
        assert {g.dtype for g in got.gradients.values() if g is not None} == {torch.float32}


@pytest.mark.everywhere
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
    check_values(Training(row, step, ("front", "unit"), len(frozen), options=options))


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("whole_model", [True, False])
@pytest.mark.filterwarnings("ignore:step")
def test_what_is_set_while_the_unit_is_gathered_holds_from_the_next_forward_on(
    *, trainable: bool, whole_model: bool
) -> None:
    """On the sharded parameter, whose full one runs: it is told when weights are gathered next."""

    def program(rank: int) -> Tensors:
        model = row()
        model.get_parameter("unit.weight").requires_grad_(not trainable)
        shard(model, *([""] if whole_model else ["front", "unit"]))
        sharded = model.get_parameter("unit.weight")

        def change(_module: nn.Module, _args: Any) -> None:
            sharded.requires_grad_(trainable)

        handle = model.get_submodule("unit").register_forward_pre_hook(change)
        loss_of(model(batch(rank)), rank).backward()
        handle.remove()
        assert_resting(model)
        model.zero_grad()
        loss_of(model(batch(rank, 1)), rank).backward()
        assert_resting(model)
        assert sharded.requires_grad is trainable
        return local_rows(model, grads=True)

    gradients = put_together(fsdp_sim.simulate(program, 2).results)

    expected = row()
    expected.get_parameter("unit.weight").requires_grad_(trainable)
    for rank in range(2):
        loss_of(expected(batch(rank, 1)), rank).backward()
    sums = local_rows(expected, grads=True)
    assert_equal(
        gradients, {name: each if each is None else each / 2 for name, each in sums.items()}
    )


@pytest.mark.filterwarnings("ignore:step")
def test_a_dtype_that_is_settled_while_all_is_frozen_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The defect planted: a group that is frozen when it is built reduces in its compute dtype."""
    init = ParameterGroup.__init__

    def settle(group: ParameterGroup, *args: Any) -> None:
        init(group, *args)
        if not group.is_trainable:
            group._reduce_dtype = group._compute_dtype

    monkeypatch.setattr(ParameterGroup, "__init__", settle)

    report = fsdp_sim.simulate(train_shards, 2, args=(unfrozen("when sharded"),), trace=True)

    assert sorted(reduced_dtypes(report)) == ["bfloat16", "bfloat16", "float32", "float32"]
