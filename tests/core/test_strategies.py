"""Strategies: each trains as the unsharded model, and exchanges what its placements need, no more."""

import itertools
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
from fsdp_core import (
    BlockAtomic,
    ConfigError,
    FsdpModule,
    Placements,
    RuntimePolicy,
    TensorAtomic,
)
from tests.cases.programs import (
    SHARDED,
    Row,
    Training,
    assert_equal,
    batch,
    check_values,
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
    whole_by_name,
)
from tests.core.worlds import device_type, on_ranks, world_size


@pytest.mark.everywhere
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_trains_as_the_unsharded_model(
    name: str, microbatches: int, *, set_to_none: bool
) -> None:
    """Two steps, accumulated or not, whichever way gradients are zeroed: the same bits."""

    def body(rank: int) -> dict[str, Tensor | None]:
        model = fill(nn.Sequential(linear(5, 2), linear(2, 5)))
        context = shard(model, "0", "1", "", mesh=mesh_shape(name), placements=placements_of(name))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        fsdp_core.fully_shard_optimizer(optimizer)
        for number in range(2):
            for micro in range(microbatches):
                with fsdp_core.microbatch(context, is_last=micro == microbatches - 1):
                    y = model(batch(rank, number * microbatches + micro))
                    loss_of(y, rank).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return whole_by_name(model)

    def build() -> nn.Module:
        return fill(nn.Sequential(linear(5, 2), linear(2, 5)))

    expected = reference(build, world_size(4), 2, microbatches)
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


@pytest.mark.everywhere
@pytest.mark.parametrize("policy", [{}, {"overlap_outer_communication": True}])
def test_the_outer_reduction_may_have_a_stream_of_its_own(policy: dict[str, bool]) -> None:
    """The values are the same, and nothing is unordered."""

    def build() -> nn.Module:
        return fill(Row("a", "b"))

    check_values(
        Training(
            build,
            lambda model, rank, number: loss_of(model(batch(rank, number)), rank).backward(),
            ("a", "b", ""),
            steps=2,
            mesh=mesh_shape("hsdp"),
            options={"runtime_policy": RuntimePolicy(**policy)},
        )
    )


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


@pytest.mark.everywhere
def test_experts_on_a_sub_mesh_train_as_on_one_process() -> None:
    """Two experts, each on two of four ranks, see the tokens of all; the dense layer is on all.

    An expert sums the gradients of its tokens from all ranks, so the mean over its two ranks is
    divided by two once more.
    """

    def tokens(rank: int) -> Tensor:
        return integers(2, 2, start=rank)

    def body(rank: int) -> tuple[Tensor, Tensor, int]:
        mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("expert_dp", "ep"))
        expert_rank = rank % 2
        model = nn.ModuleDict({"dense": linear(), "expert": linear()})
        fill(model["dense"])
        with torch.no_grad():
            model["expert"].get_parameter("weight").copy_(integers(2, 2, start=expert_rank + 3))
        with fsdp_core.fully_shard_context():
            fsdp_core.fully_shard(model["dense"], mesh_of(4), SHARDED)
            fsdp_core.fully_shard(model["expert"], mesh["expert_dp"], SHARDED, grad_divisor=2)
        y = model["dense"](tokens(rank))
        # Token 0 goes to expert 0, token 1 to expert 1; both ranks of a pair exchange them.
        sent = Exchange.apply(y, mesh["ep"].get_group())  # type: ignore[no-untyped-call]
        model["expert"](sent).sum().backward()
        dense, expert = (local_rows(model[each], grads=True)["weight"] for each in model)
        assert dense is not None
        assert expert is not None
        return dense, expert, expert_rank

    results = on_ranks(body, 4)

    dense = fill(linear())
    experts = [linear(), linear()]
    for number, expert in enumerate(experts):
        with torch.no_grad():
            expert.weight.copy_(integers(2, 2, start=number + 3))
    for rank in range(4):
        y = dense(tokens(rank))
        loss = experts[0](y[:1]).sum() + experts[1](y[1:]).sum()
        (loss / 4).backward()
    dense_grad = dense.get_parameter("weight").grad
    assert dense_grad is not None
    assert torch.equal(torch.cat([grad for grad, _, _ in results]), dense_grad)
    for number, expert in enumerate(experts):
        rows = [grad for _, grad, expert_rank in results if expert_rank == number]
        assert expert.weight.grad is not None
        assert torch.equal(torch.cat(rows), expert.weight.grad)


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
