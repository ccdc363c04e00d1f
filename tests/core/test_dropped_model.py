"""A model that is dropped goes at once: nothing waits for the garbage collector."""

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_core
from fsdp_core.torch_private import queue_backward_callback
from tests.core.worlds import make_mesh, on_ranks

ROWS = (fsdp_core.RowAtomic(),)


def dropped(_rank: int) -> list[bool]:
    """Train a step, drop the model, and say which of its objects are left, with no collection."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = make_mesh(dist.get_world_size())
    with fsdp_core.fully_shard_context() as context:
        for module in (*model, model):
            placements = fsdp_core.Placements((0,), ROWS, ROWS, ROWS)
            fsdp_core.fully_shard(module, mesh, placements)
    model(torch.ones(2, 4)).sum().backward()
    parts = [context, model, *model, *model.parameters()]
    refs = [weakref.ref(part) for part in parts]
    del context, model, parts, module, mesh
    return [ref() is not None for ref in refs]


@pytest.mark.everywhere
def test_a_dropped_model_leaves_nothing_behind() -> None:
    """Modules, parameters and the context are free as soon as the program has no name for them."""
    results = on_ranks(dropped, 2)

    assert results == [[False] * 8] * 2


def test_a_callback_that_autograd_still_holds_keeps_no_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU a thread of autograd's lets go of it a little after the backward has returned."""
    held = []

    def holding(callback: Callable[[], None]) -> None:
        held.append(callback)
        queue_backward_callback(callback)

    monkeypatch.setattr("fsdp_core.context.queue_backward_callback", holding)

    assert on_ranks(dropped, 2) == [[False] * 8] * 2
    assert held


class _OneOfTwo(nn.Module):
    """Two activations, of which one runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.runs, self.rests = nn.Linear(4, 4), nn.ReLU(), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.runs(self.linear(x))


def _run_one_of_two(_rank: int) -> bool:
    """Shard both as one unit, train a step, drop the model, and say whether one is left."""
    model = _OneOfTwo()
    mesh = make_mesh(dist.get_world_size())
    placements = fsdp_core.Placements((0,), ROWS, ROWS, ROWS)
    with fsdp_core.fully_shard_context():
        fsdp_core.fully_shard([model.runs, model.rests], mesh, placements)
        fsdp_core.fully_shard(model, mesh, placements)
    model(torch.ones(2, 4)).sum().backward()
    ref = weakref.ref(model.runs)
    del model
    return ref() is not None


def test_a_unit_without_parameters_lets_go_of_modules_that_wait_for_others() -> None:
    """Nothing of it is ever gathered, so that no reshard makes it forget which modules ran."""
    assert on_ranks(_run_one_of_two, 2) == [False] * 2
