"""Strategies: each trains as the unsharded model, and exchanges what its placements need, no more."""

import itertools
from collections import Counter
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement

import fsdp_core
import fsdp_sim
from fsdp_core import (
    BlockAtomic,
    ConfigError,
    FsdpContext,
    FsdpModule,
    Placements,
    RuntimePolicy,
    TensorAtomic,
)
from tests.cases.programs import (
    SHARDED,
    Row,
    assert_equal,
    batch,
    fill,
    integers,
    linear,
    local_rows,
    loss_of,
    mesh_of,
    shard,
)
from tests.core.strategies import (
    STRATEGIES,
    Collectives,
    P,
    R,
    S,
    mesh_shape,
    placements_of,
    reference,
    uneven,
    whole_by_name,
)
from tests.core.worlds import device_type, on_ranks, unsharded, world_size

REDUCE = "fsdp_core::reduce_gradients"


@pytest.mark.everywhere
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_trains_as_the_unsharded_model(name: str, microbatches: int) -> None:
    """Five steps, accumulated or not, gradients zeroed in place at first and dropped later: the same bits."""

    def build() -> nn.Module:
        return fill(Row(a=linear(5, 2), b=linear(2, 5)))

    def body(rank: int) -> dict[str, Tensor | None]:
        model = build()
        context = shard(model, "a", "b", "", mesh=mesh_shape(name), placements=placements_of(name))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        fsdp_core.fully_shard_optimizer(optimizer)
        for number in range(5):
            for micro in range(microbatches):
                with fsdp_core.microbatch(context, is_last=micro == microbatches - 1):
                    y = model(batch(rank, number * microbatches + micro))
                    loss_of(y, rank).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=number >= 2)
        return whole_by_name(model)

    expected = reference(build, world_size(4), 5, microbatches)
    for weights in on_ranks(body, world_size(4)):
        assert_equal(weights, dict(expected))


@pytest.mark.everywhere
@pytest.mark.parametrize("parameter", [R, S, P, BlockAtomic(2), TensorAtomic()], ids=repr)
def test_placements_that_are_not_refused_train_as_unsharded(parameter: Placement) -> None:
    """Whatever the three roles are on one axis: refused when they are said, or the right bits."""
    kinds = (R, S, P, Partial("sum"), BlockAtomic(2), TensorAtomic())
    expected = reference(lambda: fill(linear(6, 2)), 2, 1, 1)
    for gradient, optimizer in itertools.product(kinds, kinds):
        try:
            placements = Placements((0,), (parameter,), (gradient,), (optimizer,))
        except ConfigError:
            continue
        step = partial(one_step, placements=placements)
        for weights in on_ranks(step, 2):
            assert_equal(weights, dict(expected))


def one_step(rank: int, placements: Placements) -> dict[str, Tensor | None]:
    """One step of one layer with SGD; the second rank owns it where it stays whole."""
    model = fill(linear(6, 2))
    shard(model, "", placements=placements, parameter_to_owner={model.get_parameter("weight"): 1})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    fsdp_core.fully_shard_optimizer(optimizer)
    loss_of(model(batch(rank)), rank).backward()
    optimizer.step()
    return whole_by_name(model)


@pytest.mark.everywhere
@pytest.mark.parametrize("name", ["zero_1", "zero_3", "hsdp", "hfsdp"])
def test_unequal_shards_train_as_the_unsharded_model(name: str) -> None:
    """To pad these rows would take more than the weights, so ranks hold different numbers of elements."""

    def body(rank: int) -> tuple[bool, dict[str, Tensor | None]]:
        model = uneven()
        shard(model, "", mesh=mesh_shape(name), placements=placements_of(name))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        fsdp_core.fully_shard_optimizer(optimizer)
        for number in range(3):
            loss_of(model(batch(rank, number, width=31)), rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert isinstance(model, FsdpModule)
        (group,) = model.fsdp_unit.groups
        return group.layout.has_equal_shard_sizes, whole_by_name(model)

    expected = reference(uneven, world_size(4), 3, 1)
    for is_even, weights in on_ranks(body, world_size(4)):
        assert is_even == (world_size(4) == 1)
        assert_equal(weights, dict(expected))


@pytest.mark.everywhere
def test_blocks_of_each_axis_stay_together() -> None:
    """Two rows on the outer axis and three on the inner one: six rows are never split."""
    kinds = (BlockAtomic(2), BlockAtomic(3))

    def body(_rank: int) -> int:
        model = fill(linear(12, 2))
        shard(model, "", mesh=(2, 2), placements=Placements((0, 1), kinds, kinds, kinds))
        rows = local_rows(model)["weight"]
        assert rows is not None
        return len(rows)

    rows = on_ranks(body, 4)

    assert sum(rows) == 12
    assert [count % 6 for count in rows] == [0] * 4


@pytest.mark.everywhere
@pytest.mark.parametrize("name", STRATEGIES)
def test_two_last_backwards_add_up(name: str) -> None:
    """Backwards that are both flagged last, without zero_grad between, lose nothing."""

    def body(rank: int) -> list[Tensor]:
        model = linear()
        shard(model, "", mesh=mesh_shape(name), placements=placements_of(name))
        for _ in range(2):
            (model(torch.ones(1, 2)) * (rank + 1)).sum().backward()
        assert isinstance(model, FsdpModule)
        full = model.fsdp_unit.groups[0].final_grad.redistribute([R] * len(mesh_shape(name)))
        return [full.get_tensor_view(0)]

    # The mean over ranks of rank + 1, twice: world + 1.
    for (grad,) in on_ranks(body, world_size(4)):
        assert torch.equal(grad, torch.full((2, 2), world_size(4) + 1.0))


@pytest.mark.everywhere
@pytest.mark.parametrize("name", STRATEGIES)
def test_two_backwards_of_which_none_is_last_add_up(name: str) -> None:
    """What earlier microbatches left is shown as gradients, not yet reduced over partial axes."""

    def body(rank: int) -> Tensor:
        model = linear()
        context = shard(model, "", mesh=mesh_shape(name), placements=placements_of(name))
        for _ in range(2):
            with fsdp_core.microbatch(context, is_last=False):
                (model(torch.ones(1, 2)) * (rank + 1)).sum().backward()
        context.finish_grad_sync()  # nobody waits by himself before the last one
        grad = model.weight.grad
        assert isinstance(grad, DTensor)
        assert grad.placements == STRATEGIES[name][1]
        # One copy of each element for each coordinate of the axes that are not sharded.
        mesh = mesh_shape(name)
        copies = prod(n for n, p in zip(mesh, grad.placements, strict=True) if p != S)
        return grad.to_local().sum() / copies

    # The mean over ranks of rank + 1, twice, in each of four elements.
    assert sum(on_ranks(body, world_size(4))) == 4 * (world_size(4) + 1)


@pytest.mark.everywhere
@pytest.mark.parametrize(
    ("name", "gathers", "scatters", "reductions"),
    [
        ("no_shard", 0, 0, 1),
        ("zero_1", 1, 1, 0),
        ("zero_2", 1, 3, 0),
        ("zero_3", 6, 3, 0),
        ("no_shard_2d", 0, 0, 2),
        ("hsdp", 6, 3, 1),
        ("hfsdp", 7, 4, 0),
        ("zero_1_outer_zero_2_inner", 2, 4, 0),
        ("all_sharded_2d", 12, 6, 0),
    ],
)
def test_collectives_of_a_window_of_three_microbatches(
    name: str, gathers: int, scatters: int, reductions: int
) -> None:
    """What each strategy exchanges for one unit in one step, by kind, and no more."""

    def body(rank: int) -> dict[str, int]:
        model = fill(linear(4, 2))
        context = shard(model, "", mesh=mesh_shape(name), placements=placements_of(name))
        with Collectives() as collectives:
            for micro in range(3):
                with fsdp_core.microbatch(context, is_last=micro == 2):
                    loss_of(model(batch(rank)), rank).backward()
        return collectives.counts

    expected = {"all-gather": gathers, "reduce-scatter": scatters, "all-reduce": reductions}
    assert on_ranks(body, world_size(4)) == [expected] * world_size(4)


OUTER = ("no_shard_2d", "hsdp", "hfsdp", "zero_1_outer_zero_2_inner")
"""Strategies whose windows end with a reduction over the outer axis."""


def accumulate(model: nn.Module, rank: int, name: str) -> FsdpContext:
    """Two steps of three microbatches, with a stream for outer reductions."""
    policy = RuntimePolicy(overlap_outer_communication=True)
    context = shard(
        model,
        *("a", "b"),
        mesh=mesh_shape(name),
        placements=placements_of(name),
        runtime_policy=policy,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    fsdp_core.fully_shard_optimizer(optimizer)
    for number in range(6):
        with fsdp_core.microbatch(context, is_last=number % 3 == 2):
            loss_of(model(batch(rank, number)), rank).backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return context


@pytest.mark.everywhere
@pytest.mark.parametrize("name", OUTER)
def test_the_outer_reduction_may_have_a_stream_of_its_own(name: str) -> None:
    """Microbatches are accumulated, the values are the same, and nothing is unordered."""

    def body(rank: int) -> dict[str, Tensor | None]:
        accumulate(model := fill(Row("a", "b")), rank, name)
        return whole_by_name(model)

    expected = reference(lambda: fill(Row("a", "b")), world_size(4), 2, 3)
    for weights in on_ranks(body, world_size(4)):
        assert_equal(weights, dict(expected))


@pytest.mark.parametrize("name", ["hsdp", "hfsdp", "zero_1_outer_zero_2_inner"])
def test_reductions_run_on_the_stream_of_their_axis(name: str) -> None:
    """Over the inner axis once for each microbatch and unit, over the outer one once for each window."""

    def body(rank: int) -> dict[int, str]:
        context = accumulate(fill(Row("a", "b")), rank, name)
        names = ("allgather_stream", "inner_reduction_stream", "outer_reduction_stream")
        return {getattr(context, each).stream_id: each for each in names}

    report = fsdp_sim.simulate(body, 4, trace=True)

    for rank, names in enumerate(report.results):
        reductions = Counter(
            (names[op.stream], op.call.group)
            for op in report.trace.ops
            if op.rank == rank and op.call and (op.annotation or "").startswith(REDUCE)
        )
        inner, outer = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
        assert reductions == {
            ("inner_reduction_stream", inner): 12,
            ("outer_reduction_stream", outer): 4,
        }


@pytest.mark.everywhere
def test_a_divisor_divides_each_contribution_once() -> None:
    """On top of the mean, and not again what was accumulated before."""

    def body(rank: int) -> Tensor:
        model = linear()
        context = shard(model, "", grad_divisor=4)
        for is_last in (False, True):
            with fsdp_core.microbatch(context, is_last=is_last):
                (model(torch.ones(1, 2)) * 8 * (rank + 1)).sum().backward()
        grad = local_rows(model, grads=True)["weight"]
        assert grad is not None
        return grad

    # The mean of 8 and 16 over a divisor of 4, twice.
    assert torch.equal(torch.cat(on_ranks(body, 2)), torch.full((2, 2), 6.0))


def tokens(rank: int, number: int) -> Tensor:
    """The two tokens of a rank in a microbatch: the first is for expert 0, the second for expert 1."""
    return integers(2, 2, start=rank + 3 * number)


def expert(number: int) -> nn.Linear:
    """The expert of that number."""
    layer = linear()
    with torch.no_grad():
        layer.weight.copy_(integers(2, 2, start=number + 3))
    return layer


@pytest.mark.everywhere
def test_experts_on_a_sub_mesh_train_as_on_one_process() -> None:
    """Two experts, each on two of four ranks, see the tokens of all; the dense layer is on all.

    An expert sums the gradients of its tokens from all ranks, so the mean over its two ranks is
    divided by two once more. Two steps of two microbatches, one optimizer over both meshes.
    """

    def body(rank: int) -> list[Tensor]:
        mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("expert_dp", "ep"))
        model = nn.ModuleDict({"dense": fill(linear()), "expert": expert(rank % 2)})
        with fsdp_core.fully_shard_context() as context:
            fsdp_core.fully_shard(model["dense"], mesh_of(4), SHARDED)
            fsdp_core.fully_shard(model["expert"], mesh["expert_dp"], SHARDED, grad_divisor=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        fsdp_core.fully_shard_optimizer(optimizer)
        for number in range(4):
            with fsdp_core.microbatch(context, is_last=number % 2 == 1):
                y = model["dense"](tokens(rank, number))
                # Both ranks of a pair exchange their tokens.
                sent = Exchange.apply(y, mesh["ep"].get_group())  # type: ignore[no-untyped-call]
                model["expert"](sent).sum().backward()
            if number % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
        return [each for each in local_rows(model).values() if each is not None]

    results = on_ranks(body, 4)

    dense, experts = unsharded(train_experts)
    assert torch.equal(torch.cat([rows for rows, _ in results]), dense)
    for number, whole in enumerate(experts):
        assert torch.equal(torch.cat([rows for _, rows in results[number::2]]), whole)


def train_experts() -> tuple[Tensor, list[Tensor]]:
    """The same on one process, with the tokens of each rank in turn: the weights."""
    dense, experts = fill(linear()), [expert(0), expert(1)]
    model = nn.ModuleList([dense, *experts])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for number in range(4):
        for rank in range(4):
            y = dense(tokens(rank, number))
            loss = experts[0](y[:1]).sum() + experts[1](y[1:]).sum()
            (loss / 4).backward()
        if number % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    return dense.get_parameter("weight").detach(), [each.weight.detach() for each in experts]


class Exchange(torch.autograd.Function):
    """Bring token t of both ranks of a pair to rank t; gradients go back."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, pair: Any) -> Tensor:
        """Exchange rows [2, width]."""
        ctx.pair = pair
        out = torch.empty_like(y)
        dist.all_to_all_single(out, y.contiguous(), group=pair)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Exchange the gradients back."""
        out = torch.empty_like(grads[0])
        dist.all_to_all_single(out, grads[0].contiguous(), group=ctx.pair)
        return out, None
