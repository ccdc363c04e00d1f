"""B17: a checkpointed parent with a sharded child runs forward several times before backward."""

import weakref
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_core.torch_private import in_graph_task
from fsdp_core.unit import ShardedUnit
from fsdp_sim.program.model import fold
from tests.cases.programs import (
    Training,
    batch,
    check_parity,
    fill,
    gathered,
    linear,
    ops_by_step,
    reduced,
)

Where = Literal["parent", "child", "both"]


class Block(nn.Module):
    """Two layers, of which the first is a unit; it may be called through a checkpoint."""

    def __init__(self, where: Where, reentrant: bool) -> None:
        super().__init__()
        self.fc1, self.fc2 = linear(), linear()
        self.where, self.reentrant = where, reentrant

    def forward(self, x: Tensor) -> Tensor:
        """Return what both layers make of `x`."""
        if self.where != "parent":
            y = checkpoint(self.fc1, x, use_reentrant=self.reentrant)
        else:
            y = self.fc1(x)
        return fold(self.fc2(fold(y)))


class Model(nn.Module):
    """A block behind a checkpoint."""

    def __init__(self, where: Where, reentrant: bool) -> None:
        super().__init__()
        self.block = Block(where, reentrant)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the block makes of `x`."""
        if self.block.where == "child":
            return self.block(x)
        y: Tensor = checkpoint(self.block, x, use_reentrant=self.block.reentrant)
        return y


def several(
    forwards: int, where: Where = "parent", reentrant: bool = False, root: bool = True
) -> Training:
    """The product of the outputs of several forwards of one input, and one backward."""

    def step(model: nn.Module, rank: int, number: int) -> None:
        x = batch(rank, number).requires_grad_()
        product = model(x)
        for _ in range(forwards - 1):
            product = product * model(x)
        product.sum().backward()

    units = ("block.fc1", "") if root else ("block.fc1", "block.fc2")
    return Training(lambda: fill(Model(where, reentrant)), step, units, steps=2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_two_forwards_and_one_backward_gather_the_child_four_times(reentrant: bool) -> None:
    """pytorch#187437, #153354, #171779: twice in forward and twice in recomputation."""
    report = check_parity(several(2, reentrant=reentrant))

    for ops in ops_by_step(report):
        assert gathered(ops).count("block.fc1") == 4
        assert reduced(ops).count("block.fc1") == 1


@given(
    forwards=st.integers(1, 3),
    where=st.sampled_from(["parent", "child", "both"]),
    reentrant=st.booleans(),
    root=st.booleans(),
)
@settings(max_examples=8)
@pytest.mark.filterwarnings("ignore:step")
def test_any_number_of_forwards_and_any_checkpoint_has_parity(
    forwards: int, where: Where, reentrant: bool, root: bool
) -> None:
    """At the parent, at the child, or one inside the other."""
    report = check_parity(several(forwards, where, reentrant, root))

    if root:
        for ops in ops_by_step(report):
            assert reduced(ops).count("block.fc1") == 1


def test_a_second_recomputation_that_does_not_gather_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The defect planted: a unit gathers once for a backward, however often it is recomputed."""
    begun: set[weakref.ref[ShardedUnit]] = set()
    pre_forward = ShardedUnit.pre_forward

    def gather_once(unit: ShardedUnit, module: nn.Module) -> None:
        pre_forward(unit, module)
        if not in_graph_task():
            begun.discard(unit.ref)
        elif unit.ref not in begun:
            begun.add(unit.ref)
        else:
            unit.weights.reshard()

    monkeypatch.setattr(ShardedUnit, "pre_forward", gather_once)

    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        check_parity(several(2))
