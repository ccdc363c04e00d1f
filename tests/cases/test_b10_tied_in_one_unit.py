"""B10: a tied parameter is one parameter, in every state and on every path."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_sim
from fsdp_core import FsdpModule
from fsdp_core.parameter_group import Member
from tests.cases.programs import (
    Training,
    check_parity,
    fill,
    gathered,
    integers,
    ops_by_step,
    reduced,
    shard,
)

# The module: the package exports the function of the same name.
fully_shard = importlib.import_module("fsdp_core.fully_shard")


class Tied(nn.Module):
    """An embedding and a head that share one weight [5, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [tokens, 5]."""
        logits: Tensor = self.head(self.emb(tokens))
        return logits


def build() -> nn.Module:
    """Return the tied model with small integers."""
    return fill(Tied())


def step(model: nn.Module, rank: int, number: int) -> None:
    """One forward and backward on two tokens of the rank."""
    logits = model(torch.tensor([rank + number, 4 - rank]))
    (logits * integers(2, 5, start=rank)).sum().backward()


TIED = Training(build, step, ("",), steps=1)
"""The embedding's and the head's part of the gradient must both arrive."""


def test_the_gradient_is_the_sum_of_both_uses_in_one_reduction() -> None:
    """NVIDIA/Megatron-LM#6164: the ready count is completed by one gradient, in each of two cycles."""

    def twice(model: nn.Module, rank: int, number: int) -> None:
        step(model, rank, number)
        step(model, rank, number + 1)

    (ops,) = ops_by_step(check_parity(Training(build, twice, ("",))))

    assert gathered(ops) == ["<root>"] * 4
    assert reduced(ops) == ["<root>"] * 2


def sizes(_rank: int) -> tuple[int, int, int]:
    """How many parameters the model and its unit have, and the elements of the buffer."""
    model = build()
    shard(model, "")
    assert isinstance(model, FsdpModule)
    (group,) = model.fsdp_unit.groups
    return len(list(model.parameters())), len(group.members), group.full_numel


def test_there_is_one_parameter_and_one_place_for_it() -> None:
    """The optimizer sees one, the buffer holds its 20 elements (and padding of less than a row a rank)."""
    for parameters, members, numel in fsdp_sim.simulate(sizes, 2).results:
        assert (parameters, members) == (1, 1)
        assert 20 <= numel < 20 + 2 * 4


def test_the_two_names_hold_one_object_in_both_states() -> None:
    """Sharded at rest, full inside the forward; both names are in the state dict."""

    def program(rank: int) -> dict[str, Any]:
        model = build()
        seen: list[bool] = []

        def look(module: nn.Module, *_: Any) -> None:
            seen.append(module.emb.weight is module.head.weight)  # type: ignore[union-attr]

        shard(model, "")
        assert isinstance(model, Tied)
        model.register_forward_pre_hook(look)
        seen.append(model.emb.weight is model.head.weight)
        step(model, rank, 0)
        seen.append(model.emb.weight is model.head.weight)
        return {"seen": seen, "names": list(model.state_dict())}

    for result in fsdp_sim.simulate(program, 2).results:
        assert result == {"seen": [True] * 3, "names": ["emb.weight", "head.weight"]}


def test_a_hook_on_the_parameter_fires_once_in_each_backward() -> None:
    """Behind the reduction, when the whole gradient is in place."""

    def program(rank: int) -> int:
        model = build()
        shard(model, "")
        fired: list[bool] = []
        (parameter,) = model.parameters()
        parameter.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad is not None))
        for number in range(2):
            step(model, rank, number)
        return fired.count(True)

    assert fsdp_sim.simulate(program, 2).results == [2, 2]


def test_a_tied_parameter_that_is_sharded_once_for_each_place_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The defect planted: each place counts as a parameter, with elements and gradients of its own."""
    collect = fully_shard._collect_members

    def apart(*args: Any) -> tuple[list[Member], list[nn.Parameter]]:
        members, whole = collect(*args)
        return [Member(each.full, [slot]) for each in members for slot in each.slots], whole

    monkeypatch.setattr(fully_shard, "_collect_members", apart)

    assert fsdp_sim.simulate(sizes, 2).results == [(2, 2, 2 * 20)] * 2
