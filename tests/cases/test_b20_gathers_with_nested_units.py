"""B20: nested units behind a checkpoint are gathered twice a step, not more."""

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_core.unit import ShardedUnit
from fsdp_core.unit_protocol import Call
from fsdp_sim.program.model import fold
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


class Layer(nn.Module):
    """A layer with a weight of its own, an attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        """Return what all three make of `x`."""
        return fold(self.mlp(fold(self.attn(fold(self.norm(x))))))


class Layers(nn.Module):
    """Two layers, each called through a checkpoint, or not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers, self.how = nn.ModuleList([Layer(), Layer()]), how

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layers make of `x`."""
        for layer in self.layers:
            if self.how == "plain":
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.how == "reentrant")
        return x


UNITS = [f"layers.{number}{name}" for number in range(2) for name in (".attn", ".mlp", "")]


@pytest.mark.parametrize("root", [[], [""]])
@pytest.mark.parametrize("how", ["plain", "reentrant", "non_reentrant"])
def test_each_unit_is_gathered_twice_and_reduced_once(how: str, root: list[str]) -> None:
    """pytorch#175406: what recomputation gathered serves the backward."""

    def step(model: nn.Module, rank: int, number: int) -> None:
        loss_of(model(batch(rank, number).requires_grad_()), rank).backward()

    report = check_parity(Training(lambda: fill(Layers(how)), step, [*UNITS, *root], steps=2))

    for ops in ops_by_step(report):
        counts = [gathered(ops).count(name) for name in dict.fromkeys(gathered(ops))]
        assert counts == [2] * 6
        assert len(reduced(ops)) == len(set(reduced(ops))) == 6


def test_units_that_reshard_behind_their_recomputation_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The defect planted: their backward, which comes next, gathers them a third time."""
    leave_forward = ShardedUnit._leave_forward

    def reshard_too(unit: ShardedUnit, call: Call, *, failed: bool) -> None:
        leave_forward(unit, call, failed=failed)
        if call.recomputing:
            unit.weights.reshard()

    monkeypatch.setattr(ShardedUnit, "_leave_forward", reshard_too)

    def step(model: nn.Module, rank: int, number: int) -> None:
        loss_of(model(batch(rank, number).requires_grad_()), rank).backward()

    (ops,) = ops_by_step(check_parity(Training(lambda: fill(Layers("reentrant")), step, UNITS)))
    assert [gathered(ops).count(name) for name in dict.fromkeys(gathered(ops))] == [3] * 6
