"""B03: recomputation prefetches nothing that is finished already."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_core
import fsdp_sim
from fsdp_core import FsdpModule
from fsdp_core.torch_private import in_graph_task
from fsdp_core.unit import ShardedUnit
from fsdp_sim.program.model import fold
from tests.cases.programs import (
    Row,
    Training,
    batch,
    check_parity,
    fill,
    gathered,
    linear,
    loss_of,
    ops_by_step,
    reduced,
    shard,
)


class Checkpointed(Row):
    """Calls the layers named in `modes` through a checkpoint, reentrant or not."""

    def __init__(self, *names: str, modes: dict[str, bool], **layers: nn.Module) -> None:
        super().__init__(*names, **layers)
        self.modes = modes

    def forward(self, x: Tensor, calls: Sequence[str] | None = None) -> Tensor:
        """Call the layers in order."""
        for name in self.names if calls is None else calls:
            layer = self.get_submodule(name)
            mode = self.modes.get(name)
            y = layer(x) if mode is None else checkpoint(layer, x, use_reentrant=mode)
            x = fold(y)
        return x


def checkpointed(count: int, modes: dict[str, bool], steps: int = 2) -> Training:
    """Layers L1, L2, ... in a row, each a unit; no rank has rows of more than one weight's half."""
    names = [f"L{number + 1}" for number in range(count)]

    def step(model: nn.Module, rank: int, number: int) -> None:
        x = batch(rank, number).requires_grad_()
        loss_of(model(x), rank).backward()

    return Training(lambda: fill(Checkpointed(*names, modes=modes)), step, names, steps)


@pytest.mark.parametrize("reentrant", [True, False])
def test_two_checkpointed_layers_take_four_gathers_and_two_reductions(reentrant: bool) -> None:
    """NVIDIA/Megatron-LM#6153: and both rest after each step, in either mode."""
    report = check_parity(checkpointed(2, {"L1": reentrant, "L2": reentrant}))

    for ops in ops_by_step(report):
        assert len(gathered(ops)) == 4
        assert len(reduced(ops)) == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_zero_grad_leaves_no_gradient_on_any_shard(reentrant: bool) -> None:
    """Empty shards included: rank 1 has no row of either weight of one row."""

    def program(rank: int) -> list[bool]:
        modes = {"L1": reentrant, "L2": reentrant}
        layers = {"L1": linear(1, 2), "L2": linear(1, 1)}
        model = fill(Checkpointed(modes=modes, **layers))
        shard(model, "L1", "L2")
        optimizer = fsdp_core.fully_shard_optimizer(torch.optim.SGD(model.parameters()))
        has_gradients = []
        for number in range(2):
            x = batch(rank, number).requires_grad_()
            loss_of(model(x), rank).backward()
            has_gradients += [parameter.grad is not None for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            assert all(parameter.grad is None for parameter in model.parameters())
        return has_gradients

    assert fsdp_sim.simulate(program, 2).results == [[True] * 4] * 2


@given(
    count=st.integers(1, 3),
    modes=st.dictionaries(st.sampled_from(["L1", "L2", "L3"]), st.booleans()),
)
@settings(max_examples=6)
def test_any_layers_may_be_checkpointed_in_any_mode(count: int, modes: dict[str, bool]) -> None:
    """Two gathers and one reduction for each layer: recomputed weights serve the backward too."""
    for ops in ops_by_step(check_parity(checkpointed(count, modes))):
        assert len(gathered(ops)) == 2 * count
        assert len(reduced(ops)) == count


def test_a_recomputed_forward_that_prefetches_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect planted: the next unit, whose backward is over, is gathered and left so."""
    monkeypatch.setattr(ShardedUnit, "come_to_rest", lambda _: None)

    def program(rank: int) -> None:
        training = checkpointed(2, {"L1": False, "L2": False})
        model = training.build()
        shard(model, *training.units)
        second = model.get_submodule("L2")
        assert isinstance(second, FsdpModule)

        def prefetch_next(_module: nn.Module, _args: Any) -> None:
            if in_graph_task():
                second.fsdp_unit.prefetch()

        model.get_submodule("L1").register_forward_pre_hook(prefetch_next)
        training.step(model, rank, 0)

    report = fsdp_sim.simulate(program, 2, strict=False)

    # One missing edge is one finding, whatever else it shows as.
    (finding,) = report.findings
    assert finding.ops[0].annotation == "fsdp_core::unshard <root> (root 1)"
    assert "NotAtRest" in str(finding)
