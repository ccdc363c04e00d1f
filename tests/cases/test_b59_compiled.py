"""B59: a compiled unit's layers are in compiled graphs, and nothing falls back in silence."""

import importlib
import weakref
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tests.cases.programs import (
    Training,
    batch,
    check_parity,
    fill,
    gathered,
    linear,
    loss_of,
    ops_by_step,
    reduced,
)

STEPS = 5


class Layers(nn.Module):
    """Two layers; a class of PyTorch's own would not be compiled by torch 2.11."""

    def __init__(self) -> None:
        super().__init__()
        self.first = linear()
        self.second = linear()

    def forward(self, x: Tensor) -> Tensor:
        """Run one behind the other."""
        hidden: Tensor = self.first(x)
        return cast("Tensor", self.second(hidden))


class Backend:
    """Counts the linear layers in the graphs that it is given, and runs them as they are."""

    def __init__(self) -> None:
        self.linears: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        """Note one graph."""
        nodes = [node for node in graph.graph.nodes if node.target is torch._C._nn.linear]
        self.linears.append(len(nodes))
        return graph.forward


def training(compile_with: Backend | None, graphs: list[int]) -> Training:
    """One unit of two layers; notes how many graphs there are after each step."""

    def step(model: nn.Module, rank: int, number: int) -> None:
        if compile_with is not None and hasattr(model, "context") and number == 0:
            model.compile(backend=compile_with)
        (loss_of(model(batch(rank, number)), rank) / 16).backward()
        if compile_with is not None:
            graphs.append(len(compile_with.linears))

    return Training(lambda: fill(Layers()), step, ("",), STEPS, mesh=(1,))


def test_the_layers_are_compiled_once_and_communicate_as_without() -> None:
    """pytorch#174435, #167009: the hooks are left out of the graphs and break none."""
    torch.compiler.reset()
    backend, graphs = Backend(), []  # type: ignore[var-annotated]

    compiled = check_parity(training(backend, graphs))
    eager = check_parity(training(None, []))

    assert backend.linears == [2]
    assert graphs[:STEPS] == [1] * STEPS
    for ops, others in zip(ops_by_step(compiled), ops_by_step(eager), strict=True):
        assert gathered(ops) == gathered(others) == ["<root>", "<root>"]
        assert reduced(ops) == reduced(others) == ["<root>"]


def test_a_unit_that_is_left_out_of_the_graphs_in_silence_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The defect planted: a unit's class disables the compiler around its forward."""
    fully_shard = importlib.import_module("fsdp_core.fully_shard")

    def eager_forward(cls: Any) -> dict[str, Any]:
        return {"forward": torch.compiler.disable(cls.forward)}

    monkeypatch.setattr(fully_shard, "guarded_methods", eager_forward)
    monkeypatch.setattr(fully_shard, "_sharded_classes", weakref.WeakKeyDictionary())
    torch.compiler.reset()
    backend = Backend()

    check_parity(training(backend, []))

    assert backend.linears == []
