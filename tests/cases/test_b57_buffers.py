"""B57: the runtime writes no buffer, so a graph that has saved one can still go backward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fsdp_core.unit import ShardedUnit
from fsdp_sim.program.model import fold
from tests.cases.programs import (
    Training,
    batch,
    check_parity,
    check_values,
    fill,
    integers,
    linear,
    loss_of,
)


class Scaled(nn.Module):
    """A layer whose output is multiplied by a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.register_buffer("scale", integers(2, start=2))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the buffer, which the graph saves."""
        return fold(self.layer(x) * self.scale)


def build() -> nn.Module:
    """Two such layers."""
    return fill(nn.Sequential(Scaled(), Scaled()))


def forwards_first(count: int) -> Training:
    """Several forwards, then one backward of their sum."""

    def step(model: nn.Module, rank: int, number: int) -> None:
        buffers = dict(model.named_buffers())
        versions = {name: buffer._version for name, buffer in buffers.items()}
        losses = [loss_of(model(batch(rank, number + i)), rank) for i in range(count)]
        torch.stack(losses).sum().backward()
        for name, buffer in model.named_buffers():
            assert buffer is buffers[name]
            assert buffer._version == versions[name]

    return Training(build, step, ("0", "1", ""), steps=2)


@pytest.mark.everywhere
def test_two_forwards_then_a_backward_have_parity() -> None:
    """pytorch#22095, #110363, #65907: no broadcast rewrites what the first graph saved."""
    check_values(forwards_first(2))


@pytest.mark.everywhere
@given(st.integers(1, 4))
@settings(max_examples=3)
def test_any_number_of_forwards_has_parity(count: int) -> None:
    """Before one backward."""
    check_values(forwards_first(count))


def test_a_broadcast_of_buffers_in_each_forward_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect planted: DDP's copy out of what was broadcast, written under the first graph."""
    pre_forward = ShardedUnit.pre_forward

    def broadcast_too(unit: ShardedUnit, module: nn.Module) -> None:
        for buffer in module.buffers():
            sent = buffer.clone()
            torch.distributed.broadcast(sent, 0)
            buffer.copy_(sent)
        pre_forward(unit, module)

    monkeypatch.setattr(ShardedUnit, "pre_forward", broadcast_too)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        check_parity(forwards_first(2))
