"""B24: a unit may hold parameters of several dtypes; each keeps its own."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_sim
from fsdp_core import ConfigError, MixedPrecisionPolicy
from fsdp_sim.op import Kind
from fsdp_sim.program.model import fold
from tests.cases.programs import (
    Training,
    check_parity,
    gathered,
    integers,
    loss_of,
    ops_by_step,
    reduced,
    shard,
)

OWN = MixedPrecisionPolicy(main_params_dtype=None)
"""Every parameter is stored in the dtype that it has."""


class Router(nn.Module):
    """A bf16 weight, an fp32 gate and a frozen table of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(integers(8, 8).bfloat16())
        self.gate = nn.Parameter(integers(8, start=2))
        table = integers(3, 4, start=1).to(torch.int8)
        self.table = nn.Parameter(table, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` [1, 8] through the weight and the gate, plus what the table says."""
        y = fold((x.bfloat16() @ self.weight).float()) * self.gate
        return fold(y + self.table.float().sum())


def step(model: nn.Module, rank: int, number: int) -> None:
    """Forward and backward."""
    loss_of(model(integers(1, 8, start=rank + number)), rank).backward()


TWO = Training(Router, step, ("",), steps=2, options={"mixed_precision_policy": OWN})


def test_each_dtype_is_gathered_and_reduced_by_itself_in_one_order() -> None:
    """pytorch#156784, accelerate#3985, #1620, peft#484, trl#1723, axolotl#1494."""
    report = check_parity(TWO)

    orders = []
    for rank in range(2):
        for ops in ops_by_step(report, rank):
            assert gathered(ops) == ["<root>"] * 4
            assert reduced(ops) == ["<root>"] * 2
            calls = [op.call for op in ops if op.kind is Kind.COLLECTIVE]
            orders.append([(call.name, call.dtype) for call in calls if call])
    assert orders == orders[:1] * 4
    assert {dtype for _, dtype in orders[0]} == {"bfloat16", "float32"}


def test_parameters_keep_their_dtypes_and_integers_stay_whole() -> None:
    """At rest and inside the forward; what stays whole is on every rank and in the state dict."""

    def program(rank: int) -> dict[str, Any]:
        model = Router()
        shard(model, "", mixed_precision_policy=OWN)
        inside: dict[str, torch.dtype] = {}

        def look(module: nn.Module, _args: Any) -> None:
            inside.update({name: each.dtype for name, each in module.named_parameters()})

        model.register_forward_pre_hook(look)
        resting = {name: each.dtype for name, each in model.named_parameters()}
        step(model, rank, 0)
        state = model.state_dict()
        return {"inside": inside, "resting": resting, "table": state["table"].clone()}

    dtypes = {name: each.dtype for name, each in Router().named_parameters()}
    for result in fsdp_sim.simulate(program, 2).results:
        assert result["inside"] == result["resting"] == dtypes
        assert torch.equal(result["table"], Router().table)


def test_what_cannot_be_sharded_is_refused_by_name_when_sharded() -> None:
    """A complex parameter; the unit stays as it was."""

    def program(rank: int) -> tuple[str, type]:
        model = Router()
        model.phases = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
        with pytest.raises(ConfigError) as caught:
            shard(model, "")
        return str(caught.value), type(model)

    message = (
        "parameter 'phases' must have a real floating dtype, got torch.complex64; register its real "
        "and imaginary parts as two parameters, and torch.complex() them in the forward"
    )
    assert fsdp_sim.simulate(program, 2).results == [(message, Router)] * 2


def test_a_unit_that_stores_all_its_parameters_in_one_dtype_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The defect planted: one buffer for all, in the dtype of the first."""
    fully_shard = importlib.import_module("fsdp_core.fully_shard")
    monkeypatch.setattr(fully_shard, "_group_members", lambda members: [list(members)])

    def program(_rank: int) -> dict[str, torch.dtype]:
        model = Router()
        shard(model, "", mixed_precision_policy=OWN)
        return {name: each.dtype for name, each in model.named_parameters()}

    dtypes = {"weight": torch.bfloat16, "gate": torch.bfloat16, "table": torch.int8}
    assert fsdp_sim.simulate(program, 2).results == [dtypes] * 2
