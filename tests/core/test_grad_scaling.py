"""torch.amp.GradScaler on shards: an overflow that one rank sees is one that all see."""

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim import Optimizer

import fsdp_core
import fsdp_sim
from fsdp_core import MixedPrecisionPolicy, Placements, RowAtomic, RuntimePolicy, StateError
from fsdp_sim.op import Kind
from tests.cases.programs import (
    HYBRID,
    SHARDED,
    ZERO_1,
    Tensors,
    assert_equal,
    batch,
    begin_step,
    fill,
    integers,
    linear,
    mesh_of,
    ops_by_step,
    shard,
)
from tests.core.worlds import device_type, need_point_to_point, on_ranks, unsharded, world_size

WIDTH = 4

NO_SHARD = Placements((0,), (Replicate(),), (Partial("avg"),), (Replicate(),))
HFSDP = Placements(
    (0, 1), (Replicate(), RowAtomic()), (Partial("avg"), RowAtomic()), (RowAtomic(), RowAtomic())
)
STRATEGIES = {"none": NO_SHARD, "ZeRO-3": SHARDED, "HSDP": HYBRID, "HFSDP": HFSDP}

OVERFLOWS = ("a", "b", "", "")
"""The layer whose last row overflows in a step, on the last rank alone."""
SCALES = [4.0, 2.0, 2.0, 2.0]
"""The scale behind each of these steps."""

Make = Callable[[Iterable[Any]], Optimizer]


class Beside(nn.ModuleDict):
    """Layers beside each other: where one overflows, the others do not."""

    def __init__(self, *names: str) -> None:
        super().__init__({name: linear(WIDTH, WIDTH) for name in names})
        fill(self)

    def loss(self, names: Sequence[str], rank: int, number: int, overflow: str = "") -> Tensor:
        """One rank's loss of some layers, infinite in the last row of one."""
        total = torch.zeros(())
        for start, name in enumerate(names):
            factors = integers(1, WIDTH, start=rank + start)
            if name == overflow:
                factors[0, -1] = torch.inf
            total = total + (self[name](batch(rank, number, width=WIDTH)) * factors).sum()
        return total


def sgd(parameters: Iterable[Any]) -> Optimizer:
    """An optimizer whose steps of integers are exact."""
    return torch.optim.SGD(parameters, lr=1.0)


def sharded_sgd(parameters: Iterable[Any]) -> Optimizer:
    """The same on shards."""
    return fsdp_core.fully_shard_optimizer(sgd(parameters))


def shard_pair(
    a: Placements, b: Placements, ranks: int, policy: RuntimePolicy | None = None
) -> Any:
    """Two layers on all ranks, each with placements of its own."""
    model = Beside("a", "b")
    outer = 2 if ranks % 2 == 0 else 1
    with fsdp_core.fully_shard_context(runtime_policy=policy or RuntimePolicy()):
        for name, placements in (("a", a), ("b", b)):
            shape = (ranks,) if placements.dp_axes == (0,) else (outer, ranks // outer)
            fsdp_core.fully_shard(model[name], mesh_of(*shape), placements)
    return model


def new_scaler(init_scale: float = 8.0) -> torch.amp.GradScaler:
    """A scaler that never grows in a test."""
    return torch.amp.GradScaler(device_type(), init_scale=init_scale, growth_interval=100)


def whole_weights(model: nn.Module) -> Tensors:
    """All weights; a collective where they are sharded."""
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in model.named_parameters()
    }


def train(
    model: nn.Module, optimizers: Sequence[Optimizer], loss: Callable[[int, str], Tensor]
) -> tuple[list[float], Tensors]:
    """Train as users of a scaler do; return its scale behind each step, and the whole weights."""
    scaler, scales = new_scaler(), []
    for number, overflow in enumerate(OVERFLOWS):
        scaler.scale(loss(number, overflow)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        model.zero_grad()
    return scales, whole_weights(model)


def train_pair(model: Any, make: Make, rank: int, ranks: int) -> tuple[list[float], Tensors]:
    """Train both layers by one optimizer, where the last rank overflows."""

    def loss(number: int, overflow: str) -> Tensor:
        on_this = overflow if rank == ranks - 1 else ""
        return model.loss(("a", "b"), rank, number, on_this)

    return train(model, [make(model.parameters())], loss)


def train_whole(make: Make, ranks: int) -> tuple[list[float], Tensors]:
    """The same unsharded: the mean of the losses of all ranks."""
    model = Beside("a", "b")

    def loss(number: int, overflow: str) -> Tensor:
        losses = [
            model.loss(("a", "b"), rank, number, overflow if rank == ranks - 1 else "")
            for rank in range(ranks)
        ]
        return torch.stack(losses).sum() / ranks

    return train(model, [make(model.parameters())], loss)


def check_like_unsharded(
    results: Sequence[tuple[list[float], Tensors]], expected: tuple[list[float], Tensors]
) -> None:
    """The scales and weights of the unsharded run, on every rank."""
    scales, weights = expected
    assert scales == SCALES
    for mine, whole in results:
        assert mine == scales
        assert_equal(whole, weights)


@pytest.mark.everywhere
@pytest.mark.parametrize(("first", "second"), list(product(STRATEGIES, STRATEGIES)))
def test_an_overflow_in_rows_of_one_rank_skips_the_step_on_all(first: str, second: str) -> None:
    """Whichever unit it is in, and whichever the optimizer holds first; then steps go on."""
    ranks = world_size(4)

    def body(rank: int) -> tuple[list[float], Tensors]:
        model = shard_pair(STRATEGIES[first], STRATEGIES[second], ranks)
        return train_pair(model, sharded_sgd, rank, ranks)

    check_like_unsharded(on_ranks(body, ranks), unsharded(lambda: train_whole(sgd, ranks)))


@pytest.mark.everywhere
def test_a_gradient_that_is_too_large_for_fp16_on_one_rank_is_unscaled_at_a_lower_scale() -> None:
    """256 at a scale of 512 and 256 overflows; at 128 all ranks step by the mean."""
    ranks = world_size(2)
    factors = torch.ones(ranks, WIDTH)
    factors[-1, -1] = 256.0

    def body(rank: int) -> tuple[list[float], Tensors]:
        model: Any = Beside("a")
        shard(
            model["a"],
            "",
            mesh=(ranks,),
            mixed_precision_policy=MixedPrecisionPolicy(compute_dtype=torch.float16),
        )
        optimizer = sharded_sgd(model.parameters())
        scaler = new_scaler(init_scale=512.0)
        scales = []
        for _ in range(3):
            y = model["a"](torch.ones(1, WIDTH, dtype=torch.float16)).float()
            scaler.scale((y * factors[rank].to(y.device)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            optimizer.zero_grad()
        return scales, whole_weights(model)

    mean = factors.mean(0).unsqueeze(1).expand(WIDTH, WIDTH)
    start: Any = Beside("a")["a"].weight
    expected = start.detach() - mean
    for scales, weights in on_ranks(body, ranks):
        assert scales == [256.0, 128.0, 128.0]
        assert_equal(weights, {"a.weight": expected})


OPTIMIZERS: dict[str, tuple[Make, Make]] = {
    "fused": (
        lambda p: fsdp_core.fully_shard_optimizer(torch.optim.AdamW(p, lr=0.5, fused=True)),
        lambda p: torch.optim.AdamW(p, lr=0.5, fused=True),
    ),
    "not handed over": (sgd, sgd),
    "Muon": (
        lambda p: fsdp_core.FsdpMuon(p, lr=0.5),
        lambda p: torch.optim.Muon(p, lr=0.5),
    ),
}


@pytest.mark.everywhere
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_kind_of_optimizer_skips_together(name: str) -> None:
    """One that skips in its own kernel, one of DTensors, and one of whole matrices."""
    if name == "Muon":
        need_point_to_point()
    ranks = world_size(2)
    mine, theirs = OPTIMIZERS[name]

    def body(rank: int) -> tuple[list[float], Tensors]:
        return train_pair(shard_pair(NO_SHARD, SHARDED, ranks), mine, rank, ranks)

    check_like_unsharded(on_ranks(body, ranks), unsharded(lambda: train_whole(theirs, ranks)))


@pytest.mark.everywhere
def test_experts_with_an_optimizer_of_their_own_skip_together_and_keep_one_scale() -> None:
    """The rank that overflows shares the expert with one other, and the scale with all."""

    def names(rank: int) -> tuple[str, str]:
        return "b", f"expert {rank % 2}"

    def overflowing(rank: int, overflow: str) -> str:
        return "" if rank != 3 else {"a": "expert 1"}.get(overflow, overflow)

    def body(rank: int) -> tuple[list[float], Tensors]:
        dense, expert = names(rank)
        model: Any = Beside("b", "expert 0", "expert 1")
        del model[f"expert {1 - rank % 2}"]
        mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "ep"))
        with fsdp_core.fully_shard_context():
            fsdp_core.fully_shard(model[dense], mesh_of(4), NO_SHARD)
            fsdp_core.fully_shard(model[expert], mesh["dp"], SHARDED, grad_divisor=2)
        optimizers = [sharded_sgd(model[name].parameters()) for name in (expert, dense)]
        return train(
            model,
            optimizers,
            lambda number, overflow: model.loss(
                (dense, expert), rank, number, overflowing(rank, overflow)
            ),
        )

    def whole() -> tuple[list[float], Tensors]:
        model: Any = Beside("b", "expert 0", "expert 1")
        experts = [model[f"expert {number}"].weight for number in range(2)]

        def loss(number: int, overflow: str) -> Tensor:
            losses = [
                model.loss(names(rank), rank, number, overflowing(rank, overflow))
                for rank in range(4)
            ]
            return torch.stack(losses).sum() / 4

        return train(model, [sgd(experts), sgd(model["b"].parameters())], loss)

    scales, weights = unsharded(whole)
    for rank, (mine, held) in enumerate(on_ranks(body, 4)):
        assert mine == scales == SCALES
        assert_equal(held, {f"{name}.weight": weights[f"{name}.weight"] for name in names(rank)})


@pytest.mark.parametrize(
    ("placements", "exchanges"), [((SHARDED, HYBRID), 1), ((NO_SHARD, NO_SHARD), 0)]
)
def test_ranks_ask_each_other_once_and_not_where_all_hold_the_same(
    placements: tuple[Placements, Placements], exchanges: int
) -> None:
    """One all-reduce for an optimizer, however many meshes it has."""

    def body(rank: int) -> None:
        model = shard_pair(*placements, 4)
        scaler = new_scaler()
        scaler.scale(model.loss(("a", "b"), rank, 0)).backward()
        begin_step(0)
        scaler.unscale_(sharded_sgd(model.parameters()))

    (ops,) = ops_by_step(fsdp_sim.simulate(body, 4, trace=True))

    assert len([op for op in ops if op.kind is Kind.COLLECTIVE]) == exchanges


def test_unscaling_waits_for_reductions_that_the_caller_manages() -> None:
    """Without it, gradients would be read while the reductions write them."""

    def body(rank: int) -> None:
        policy = RuntimePolicy(caller_managed_grad_sync=True)
        model = shard_pair(SHARDED, ZERO_1, 2, policy)
        scaler = new_scaler()
        scaler.scale(model.loss(("a", "b"), rank, 0)).backward()
        scaler.unscale_(sharded_sgd(model.parameters()))

    fsdp_sim.simulate(body, 2)


@pytest.mark.everywhere
def test_gradients_are_not_unscaled_before_the_last_microbatch() -> None:
    """Those to come would be added as they are, scaled."""

    def body(rank: int) -> str:
        model = Beside("a")
        context = shard(model, "a", mesh=(2,), placements=ZERO_1)
        optimizer = sharded_sgd(model.parameters())
        scaler = new_scaler()
        with fsdp_core.microbatch(context, is_last=False):
            scaler.scale(model.loss(("a",), rank, 0)).backward()
        with pytest.raises(StateError) as caught:
            scaler.unscale_(optimizer)
        return str(caught.value)

    message = (
        "the gradients of unit '<root>' must be complete when they are used, got none from a last "
        "microbatch; run that backward inside microbatch(context, is_last=True)"
    )
    assert on_ranks(body, 2) == [message] * 2
