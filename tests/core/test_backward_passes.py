"""Backward passes that are not one plain `backward`: gradients asked for, replays by other units."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdp_sim
from fsdp_core import FsdpModule
from tests.cases.programs import (
    Row,
    Tensors,
    Training,
    assert_equal,
    assert_resting,
    batch,
    check_values,
    fill,
    linear,
    local_rows,
    loss_of,
    put_together,
    shard,
)
from tests.core.worlds import on_ranks, unsharded


def gradient_of_input(model: nn.Module, rank: int, how: str) -> Tensor:
    """The gradient of a loss by the input, in one of the two ways that name what they want."""
    x = batch(rank).requires_grad_()
    loss = loss_of(model(x), rank)
    if how == "autograd.grad":
        return torch.autograd.grad(loss, x)[0]
    loss.backward(inputs=[x])
    assert x.grad is not None
    return x.grad


@pytest.mark.everywhere
@pytest.mark.parametrize("how", ["autograd.grad", "backward(inputs=...)"])
def test_a_gradient_that_was_asked_for_leaves_zeros_in_units(how: str) -> None:
    """Units are entered as by any backward: nothing says that all ranks want the same."""

    def body(rank: int) -> bool:
        shard(model := fill(Row("a", "b")), "a", "b", "")
        gradient = gradient_of_input(model, rank, how)
        assert_resting(model)
        for rows in local_rows(model, grads=True).values():
            assert rows is not None
            assert not rows.any()
        return torch.equal(gradient, gradient_of_input(fill(Row("a", "b")), rank, how))

    assert on_ranks(body, 2) == [True, True]


@pytest.mark.everywhere
@pytest.mark.parametrize("how", ["autograd.grad", "backward(inputs=...)"])
def test_a_gradient_that_was_asked_for_adds_nothing_to_the_step(how: str) -> None:
    """The backward behind it gives what it gives alone."""

    def step(model: nn.Module, rank: int, number: int) -> None:
        gradient_of_input(model, rank, how)
        loss_of(model(batch(rank, number)), rank).backward()

    check_values(Training(lambda: fill(Row("a", "b")), step, ("a", "b", ""), steps=2))


class Replay:
    """A call whose output is thrown away and computed again, when a later tensor's hook says so.

    Source: activation recomputation without a stored output, in Megatron-LM.
    """

    def __init__(self, run: Any, x: Tensor) -> None:
        self.run, self.x = run, x.detach().requires_grad_()
        self.y: Tensor | None = None

    def again(self, _grad: Tensor) -> None:
        """Compute the output again, with a graph."""
        with torch.enable_grad():
            self.y = self.run(self.x)


class Replayed(torch.autograd.Function):
    """Gives the output without a graph, and the gradients of its replay."""

    @staticmethod
    def forward(ctx: Any, replay: Replay, x: Tensor) -> Tensor:
        """Run the call."""
        ctx.replay = replay
        output: Tensor = replay.run(x)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Run the backward of the replay."""
        ctx.replay.y.backward(grad)
        return None, ctx.replay.x.grad


class Replaying(nn.Module):
    """The first layer is replayed from a hook on the output of the last one."""

    owner: nn.Module
    last: nn.Module

    def __init__(self, *, unshards: bool) -> None:
        super().__init__()
        self.owner, self.last = Owner(linear()), linear()
        self.unshards = unshards

    def forward(self, x: Tensor) -> Tensor:
        """Call the owner of the replayed layer, then the last one."""
        y, replay = self.owner(x)
        y = self.last(y)
        y.register_hook(self._gathered(replay) if self.unshards else replay.again)
        return y

    def _gathered(self, replay: Replay) -> Any:
        def again(grad: Tensor) -> None:
            if isinstance(self.owner, FsdpModule):
                self.owner.unshard()
            replay.again(grad)

        return again


class Owner(nn.Module):
    """Calls a layer so that it can be replayed without this module."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, Replay]:
        """Return the layer's output, and how to compute it again."""
        replay = Replay(self.layer, x)
        return Replayed.apply(replay, x), replay  # type: ignore[no-untyped-call]


def replaying(units: tuple[str, ...], *, unshards: bool) -> Training:
    """A training of the model above."""

    def step(model: nn.Module, rank: int, number: int) -> None:
        loss_of(model(batch(rank, number).requires_grad_()), rank).backward()

    return Training(lambda: fill(Replaying(unshards=unshards)), step, units, steps=2)


@pytest.mark.everywhere
def test_a_unit_that_another_units_hook_replays_has_parity() -> None:
    """Its own forward hook gathers the weights inside the backward pass."""
    check_values(replaying(("owner.layer", "last", ""), unshards=False))


@pytest.mark.everywhere
def test_a_part_of_a_unit_can_be_replayed_once_the_unit_is_gathered() -> None:
    """No hook of the owner fires, so whoever replays the part calls `unshard` first."""
    check_values(replaying(("owner", "last", ""), unshards=True))


@pytest.mark.everywhere
def test_a_part_of_a_unit_is_not_replayed_with_released_weights() -> None:
    """PyTorch refuses to mix shards and whole tensors; nothing is computed from freed memory."""

    def body(rank: int) -> None:
        shard(model := fill(Replaying(unshards=False)), "owner", "last", "")
        loss = loss_of(model(batch(rank).requires_grad_()), rank)
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            loss.backward()
        model.context.reset()  # type: ignore[union-attr, operator]

    on_ranks(body, 2)


@pytest.mark.filterwarnings("ignore:step 0. unit 'outer.b' was expected")
def test_ranks_that_disagree_on_calling_an_inner_unit_are_named() -> None:
    """Rank 1 leaves the unit out that is called inside another; both calls are in the report."""

    def body(rank: int) -> None:
        model = fill(Row(outer=Row("a", "b"), c=linear()))
        shard(model, "outer.a", "outer.b", "outer", "c", "")
        outer = model.get_submodule("outer")
        y = outer(batch(rank), ["a", "b"] if rank == 0 else ["a"])
        loss_of(model.get_submodule("c")(y), rank).backward()

    report = fsdp_sim.simulate(body, 2, strict=False)

    assert report.findings[0].kind == "CollectiveMismatch"
    assert "outer.b" in report.findings[0].message


class Lookup(nn.Module):
    """A table whose gradient names the rows that were looked up, under a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(5, 2, sparse=True), linear()

    def forward(self, ids: Tensor) -> Tensor:
        """Look rows up."""
        y: Tensor = self.layer(self.table(ids))
        return y


@pytest.mark.everywhere
@pytest.mark.parametrize("units", [("table", ""), ("",)], ids=["own unit", "one unit"])
def test_sparse_gradients_are_reduced_as_dense_ones(units: tuple[str, ...]) -> None:
    """Ranks look up other rows, so what is reduced is the whole table's gradient."""

    def step(model: nn.Module, rank: int, number: int) -> None:
        loss_of(model(torch.tensor([rank, 2, 2 + number])), rank).backward()
        if not isinstance(model, FsdpModule):
            table: Any = model.get_parameter("table.weight")
            table.grad = table.grad.to_dense()

    check_values(Training(lambda: fill(Lookup()), step, units))


def add_one(parameter: Tensor) -> None:
    """Write a weight in place, as loading does."""
    with torch.no_grad():
        (parameter.to_local() if isinstance(parameter, DTensor) else parameter).add_(1)


def recomputed(model: Any, x: Tensor, name: str) -> Tensor:
    """Run two layers, of which one or both are run again in backward."""
    x = x.requires_grad_()
    if not name:
        return checkpoint(model, x, use_reentrant=True)
    return checkpoint(model[1], model[0](x), use_reentrant=True)


@pytest.mark.everywhere
@pytest.mark.parametrize("name", ["", "1"])
def test_a_recomputation_uses_weights_that_were_written_since_the_forward(name: str) -> None:
    """As without sharding; its gather, the first of the backward, is behind the writes."""

    def build() -> nn.Sequential:
        return nn.Sequential(linear(), linear())

    def body(rank: int) -> Tensors:
        shard(model := fill(build()), "0", "1", "")
        y = recomputed(model, batch(rank), name)
        add_one(model.get_parameter("1.weight"))
        loss_of(y, rank).backward()
        return local_rows(model, grads=True)

    def whole() -> Tensors:
        model = fill(build())
        outputs = [recomputed(model, batch(rank), name) for rank in range(2)]
        add_one(model.get_parameter("1.weight"))
        for rank, y in enumerate(outputs):
            (loss_of(y, rank) / 2).backward()
        return local_rows(model, grads=True)

    assert_equal(put_together(on_ranks(body, 2)), unsharded(whole))
