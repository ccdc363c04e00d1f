"""FsdpMuon: the bits of torch.optim.Muon, wherever the rows are."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import fsdp_core
from fsdp_core import (
    BlockAtomic,
    ConfigError,
    MixedPrecisionPolicy,
    Placements,
    StateError,
    TensorAtomic,
)
from fsdp_core.muon import Cost
from fsdp_core.owner_planning import orthogonalization_cost
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
    put_together,
    shard,
)
from tests.core.strategies import (
    STRATEGIES,
    mesh_shape,
    placements_of,
    reference,
    uneven,
    whole_by_name,
    width_of,
)
from tests.core.worlds import need_point_to_point, on_ranks, unsharded, world_size

OPTIONS: dict[str, Any] = {"lr": 0.125, "momentum": 0.5, "weight_decay": 0.25}
BLOCKS = Placements((0,), *((BlockAtomic(2),),) * 3)
WHOLE = Placements((0,), *((TensorAtomic(),),) * 3)


def build() -> nn.Module:
    """Matrices of 5, 1 and 4 rows."""
    return fill(Row(a=linear(5, 4), b=linear(1, 5), c=linear(4, 1)))


def build_even() -> nn.Module:
    """Matrices of 6, 2 and 4 rows."""
    return fill(Row(a=linear(6, 4), b=linear(2, 6), c=linear(4, 2)))


def muon(parameters: Iterable[Any]) -> Optimizer:
    """The optimizer of one process."""
    return torch.optim.Muon(parameters, **OPTIONS)


def step(model: nn.Module, rank: int, number: int) -> None:
    """One forward and backward on a rank's batch."""
    loss_of(model(batch(rank, number, width=width_of(model))), rank).backward()


def take_steps(model: nn.Module, rank: int, **options: Any) -> dict[str, Tensor | None]:
    """Two steps of a sharded model, with momentum and decay; return its whole weights."""
    optimizer = fsdp_core.FsdpMuon(model.parameters(), **options, **OPTIONS)
    for number in range(2):
        step(model, rank, number)
        optimizer.step()
        optimizer.zero_grad()
    return whole_by_name(model)


def check(
    make: Callable[[], nn.Module],
    mesh: tuple[int, ...],
    placements: Placements,
    units: Sequence[str] = ("a", ""),
    **options: Any,
) -> None:
    """Two steps, by default of a unit inside another, as on one process."""
    need_point_to_point()
    ranks = torch.Size(mesh).numel()

    def body(rank: int) -> dict[str, Tensor | None]:
        model = make()
        shard(model, *units, mesh=mesh, placements=placements)
        return take_steps(model, rank, **options)

    expected = unsharded(lambda: reference(make, ranks, 2, 1, muon))
    for weights in on_ranks(body, ranks):
        assert_equal(dict(sorted(weights.items())), expected)


@pytest.mark.everywhere
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_gives_the_bits_of_one_process(name: str) -> None:
    """Rows on one rank, on several, on replicas, gradients whole or not."""
    check(build, mesh_shape(name), placements_of(name))


@pytest.mark.everywhere
@pytest.mark.parametrize("ranks", [1, 2])
def test_few_ranks_give_the_bits_of_one_process(ranks: int) -> None:
    """A matrix that lies whole on one rank, and one that two share."""
    check(build, (ranks,), SHARDED)


@pytest.mark.everywhere
@pytest.mark.parametrize("name", ["zero_1", "zero_3", "hsdp", "hfsdp"])
def test_unequal_shards_give_the_bits_of_one_process(name: str) -> None:
    """The layout has no padding, so ranks hold different numbers of elements."""
    check(uneven, mesh_shape(name), placements_of(name))


@pytest.mark.everywhere
def test_matrices_without_a_gradient_are_left_out_of_a_step() -> None:
    """Another one in each step: what is exchanged follows."""
    need_point_to_point()
    dropped = (None, "a.weight", "b.weight", None)

    def train(model: nn.Module, optimizer: Optimizer, backwards: Callable[[int], None]) -> None:
        for number, name in enumerate(dropped):
            backwards(number)
            if name is not None:
                model.get_parameter(name).grad = None
            optimizer.step()
            optimizer.zero_grad()

    def body(rank: int) -> dict[str, Tensor | None]:
        shard(model := build(), "", mesh=(world_size(2),))
        optimizer = fsdp_core.FsdpMuon(model.parameters(), **OPTIONS)
        train(model, optimizer, lambda number: step(model, rank, number))
        return whole_by_name(model)

    def whole() -> dict[str, Tensor | None]:
        model = build()

        def backwards(number: int) -> None:
            for rank in range(world_size(2)):
                step(model, rank, number)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= world_size(2)

        train(model, muon(model.parameters()), backwards)
        return {name: each.detach() for name, each in model.named_parameters()}

    expected = unsharded(whole)
    for weights in on_ranks(body, world_size(2)):
        assert_equal(weights, expected)


@pytest.mark.everywhere
def test_blocks_of_rows_give_the_bits_of_one_process() -> None:
    """Two rows stay together."""
    check(build_even, (world_size(2),), BLOCKS)


@pytest.mark.everywhere
def test_the_cost_moves_owners_and_no_bit() -> None:
    """The third matrix goes to the rank that has less to do: by rows to one, by columns to the other."""
    need_point_to_point()

    def owners(_rank: int, cost: Cost) -> list[dict[int, int]]:
        shard(model := build_even(), *"abc")
        optimizer = fsdp_core.FsdpMuon(model.parameters(), cost=cost, **OPTIONS)
        return [buffer.owners for buffer in optimizer.buffers]

    for axis, last in ((0, 1), (1, 0)):
        cost = partial(by_length, axis=axis)
        assert on_ranks(partial(owners, cost=cost), 2) == [[{0: 0}, {0: 1}, {0: last}]] * 2
        check(build_even, (2,), SHARDED, "abc", cost=cost)


def by_length(shape: Sequence[int], axis: int) -> int:
    """A cost that grows with rows (axis 0) or with columns (axis 1)."""
    return shape[axis] ** 4


@pytest.mark.everywhere
@pytest.mark.parametrize("name", STRATEGIES)
def test_units_of_two_strategies_give_the_bits_of_one_process(name: str) -> None:
    """What a rank computes for the copies of a unit that others have too moves no owner elsewhere."""
    need_point_to_point()
    ranks = world_size(4)

    def squares() -> nn.Module:
        return fill(Row(a=linear(4, 4), b=linear(4, 4)))

    def body(rank: int) -> dict[str, Tensor | None]:
        model = squares()
        with fsdp_core.fully_shard_context():
            inner = model.get_submodule("a")
            fsdp_core.fully_shard(inner, mesh_of(*mesh_shape(name)), placements_of(name))
            fsdp_core.fully_shard(model, mesh_of(ranks), SHARDED)
        return take_steps(model, rank)

    expected = unsharded(lambda: reference(squares, ranks, 2, 1, muon))
    for weights in on_ranks(body, ranks):
        assert_equal(dict(sorted(weights.items())), expected)


class TwoDtypes(nn.Module):
    """Two matrices, of which the second is bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = fill(linear(5, 4)), fill(linear(2, 5)).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, 2] in fp32."""
        y: Tensor = self.second(self.first(x).bfloat16())
        return y.float()


@pytest.mark.everywhere
def test_a_unit_of_two_dtypes_gives_the_bits_of_one_process() -> None:
    """Each dtype travels in messages of its own; main weights have the parameters' dtypes."""
    need_point_to_point()
    policy = MixedPrecisionPolicy(main_params_dtype=None)

    def sharded(rank: int) -> dict[str, Tensor | None]:
        shard(model := TwoDtypes(), "", mixed_precision_policy=policy)
        optimizer = fsdp_core.FsdpMuon(model.parameters(), **OPTIONS)
        loss_of(model(integers(2, 4)), 0).backward()
        optimizer.step()
        return whole_by_name(model)

    def plain() -> dict[str, Tensor | None]:
        optimizer = torch.optim.Muon((model := TwoDtypes()).parameters(), **OPTIONS)
        loss_of(model(integers(2, 4)), 0).backward()
        optimizer.step()
        return local_rows(model)

    expected = unsharded(plain)
    assert [None if each is None else each.dtype for each in expected.values()] == [
        torch.float32,
        torch.bfloat16,
    ]
    for weights in on_ranks(sharded, 2):
        assert_equal(weights, expected)


@pytest.mark.everywhere
def test_whole_tensors_are_computed_where_they_lie() -> None:
    """With TensorAtomic storage nothing is exchanged in a step."""
    need_point_to_point()

    def body(rank: int) -> dict[str, Tensor | None]:
        model = build()
        owners = {each: number % 2 for number, each in enumerate(model.parameters())}
        shard(model, "", placements=WHOLE, parameter_to_owner=owners)
        optimizer = fsdp_core.FsdpMuon(model.parameters(), **OPTIONS)
        step(model, rank, 0)
        optimizer.step()
        return whole_by_name(model)

    expected = unsharded(lambda: reference(build, 2, 1, 1, muon))
    for weights in on_ranks(body, 2):
        assert_equal(weights, expected)


@pytest.mark.everywhere
def test_each_matrix_is_computed_by_one_rank_that_holds_part_of_it() -> None:
    """The same owners on every rank, chosen by cost; the given cost is asked for each shape."""

    def body(_rank: int) -> tuple[list[dict[int, int]], set[tuple[int, ...]]]:
        asked = set()

        def cost(shape: Sequence[int]) -> int:
            asked.add(tuple(shape))
            return orthogonalization_cost(shape)

        model = build()
        shard(model, "", mesh=(4,))
        optimizer = fsdp_core.FsdpMuon(model.parameters(), cost=cost, **OPTIONS)
        return [buffer.owners for buffer in optimizer.buffers], asked

    results = on_ranks(body, 4)

    assert all(each == results[0] for each in results)
    ((owners,), asked) = results[0]
    assert sorted(owners) == [0, 1, 2]
    assert asked == {(5, 4), (1, 5), (4, 1)}


@pytest.mark.everywhere
def test_momentum_stays_sharded() -> None:
    """State is keyed by the sharded parameters and holds DTensors of their shapes."""
    need_point_to_point()

    def body(rank: int) -> None:
        model = build()
        shard(model, "")
        optimizer = fsdp_core.FsdpMuon(model.parameters(), **OPTIONS)
        step(model, rank, 0)
        optimizer.step()
        for parameter in model.parameters():
            momentum = optimizer.state[parameter]["momentum_buffer"]
            assert isinstance(momentum, DTensor)
            assert isinstance(parameter, DTensor)
            assert momentum.shape == parameter.shape
            assert momentum.to_local().shape == parameter.to_local().shape

    on_ranks(body, 2)


@pytest.mark.everywhere
def test_matrices_without_gradients_are_left_alone() -> None:
    """A unit that no rank used is not stepped, the others are."""
    need_point_to_point()

    def body(rank: int) -> dict[str, Tensor | None]:
        model = build()
        shard(model, "a", "b", "c")
        optimizer = fsdp_core.FsdpMuon(model.parameters(), **OPTIONS)
        loss_of(model.get_submodule("c")(integers(2, 1, start=rank)), rank).backward()
        optimizer.step()
        return local_rows(model)

    def expected() -> dict[str, Tensor | None]:
        model = build()
        optimizer = torch.optim.Muon(model.parameters(), **OPTIONS)
        for rank in range(2):
            y = model.get_submodule("c")(integers(2, 1, start=rank))
            (loss_of(y, rank) / 2).backward()
        optimizer.step()
        return local_rows(model)

    assert_equal(put_together(on_ranks(body, 2)), unsharded(expected))


@pytest.mark.everywhere
def test_what_cannot_be_computed_is_refused() -> None:
    """Vectors, parameters of no unit, closures."""

    def body() -> None:
        model = fill(nn.Sequential(nn.Linear(2, 2), linear()))
        shard(model, "0", mesh=(1,))
        with pytest.raises(ValueError, match=r"^Muon only supports 2D parameters"):
            fsdp_core.FsdpMuon(model.get_submodule("0").parameters())
        with pytest.raises(ConfigError, match=r"^FsdpMuon must hold sharded parameters only"):
            fsdp_core.FsdpMuon(model.get_submodule("1").parameters())
        optimizer = fsdp_core.FsdpMuon([model.get_parameter("0.weight")])
        with pytest.raises(NotImplementedError, match=r"^step must be called without a closure"):
            optimizer.step(lambda: 0.0)

    on_ranks(lambda _rank: body(), 1)


@pytest.mark.everywhere
def test_groups_that_change_later_give_the_bits_of_one_process() -> None:
    """A unit whose matrices are added behind the first step is stepped, one that is taken out is not."""
    need_point_to_point()

    def run(model: nn.Module, optimizer: Optimizer, of_step: Callable[[int], None]) -> None:
        later = model.get_submodule("c")
        for number in range(3):
            of_step(number)
            optimizer.step()
            optimizer.zero_grad()
            model.zero_grad()
            if number == 0:
                optimizer.add_param_group({"params": list(later.parameters())})
            if number == 1:
                optimizer.param_groups[0]["params"].pop()

    def body(rank: int) -> dict[str, Tensor | None]:
        model = build()
        shard(model, "a", "b", "c")
        optimizer = fsdp_core.FsdpMuon(model.get_submodule("a").parameters(), **OPTIONS)
        run(model, optimizer, lambda number: step(model, rank, number))
        return local_rows(model)

    def expected() -> dict[str, Tensor | None]:
        model = build()

        def of_step(number: int) -> None:
            for rank in range(2):
                step(model, rank, number)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= 2

        run(model, torch.optim.Muon(model.get_submodule("a").parameters(), **OPTIONS), of_step)
        return local_rows(model)

    assert_equal(put_together(on_ranks(body, 2)), unsharded(expected))


@pytest.mark.everywhere
def test_momentum_of_other_rows_is_refused_and_leaves_everything_as_it_was() -> None:
    """A whole tensor in its place, in the second of two units."""
    need_point_to_point()

    def body(rank: int) -> str:
        model = build()
        shard(model, "a", "c", "")
        parameters = [model.get_parameter(name) for name in ("a.weight", "c.weight")]
        optimizer = fsdp_core.FsdpMuon(parameters, **OPTIONS)
        step(model, rank, 0)
        optimizer.step()
        optimizer.state[parameters[1]]["momentum_buffer"] = torch.zeros(4, 1)
        before = local_rows(model)
        with pytest.raises(StateError) as caught:
            optimizer.step()
        assert_equal(local_rows(model), before)
        return str(caught.value)

    message = (
        "the state 'momentum_buffer' of parameter 'c.weight' must be a DTensor of the rows that this "
        "rank holds, (2, 1), got a Tensor of (4, 1) here; make it with torch.zeros_like(parameter), say"
    )
    assert on_ranks(body, 2) == [message] * 2
