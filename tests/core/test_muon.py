"""FsdpMuon: the bits of torch.optim.Muon, wherever the rows are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import fsdp_core
from fsdp_core import ConfigError, MixedPrecisionPolicy, Placements, TensorAtomic
from fsdp_core.owner_planning import orthogonalization_cost
from tests.cases.programs import (
    SHARDED,
    ZERO_1,
    assert_equal,
    fill,
    integers,
    linear,
    local_rows,
    loss_of,
    mesh_of,
    put_together,
    shard,
)
from tests.core.worlds import need_point_to_point, on_ranks, unsharded

R, P, S = Replicate(), Partial("avg"), Shard(0)
HFSDP = Placements((0, 1), (R, S), (P, S), (S, S))
HSDP = Placements((0, 1), (R, S), (P, S), (R, S))
WHOLE = Placements((0,), *((TensorAtomic(),),) * 3)
OPTIONS: dict[str, Any] = {"lr": 0.125, "momentum": 0.5, "weight_decay": 0.25}


def build() -> nn.Module:
    """Matrices of 5, 1 and 4 rows."""
    return fill(nn.Sequential(linear(5, 4), linear(1, 5), linear(4, 1)))


def step(model: nn.Module, rank: int, number: int, scale: float = 1.0) -> None:
    """One forward and backward on a rank's batch."""
    y = model(integers(2, 4, start=2 * rank + 3 * number))
    (loss_of(y, rank) * scale).backward()


def reference(
    world_size: int, steps: int, make: Callable[[], nn.Module] = build
) -> dict[str, Tensor | None]:
    """The weights of torch.optim.Muon on one process."""
    model = make()
    optimizer = torch.optim.Muon(model.parameters(), **OPTIONS)
    for number in range(steps):
        for rank in range(world_size):
            step(model, rank, number, 1 / world_size)
        optimizer.step()
        optimizer.zero_grad()
    return {name: each.detach() for name, each in model.named_parameters()}


@pytest.mark.everywhere
@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((1,), SHARDED),
        ((2,), SHARDED),
        ((4,), SHARDED),
        ((4,), ZERO_1),
        ((4,), Placements((0,), (R,), (P,), (R,))),
        ((2, 2), HSDP),
        ((2, 2), HFSDP),
    ],
)
def test_every_layout_gives_the_bits_of_one_process(
    mesh: tuple[int, ...], placements: Placements
) -> None:
    """Rows on one rank, on several, on replicas: two steps with momentum and decay."""
    need_point_to_point()
    world_size = torch.Size(mesh).numel()

    def body(rank: int) -> dict[str, Tensor | None]:
        model = build()
        shard(model, "0", "", mesh=mesh, placements=placements)
        optimizer = fsdp_core.FsdpMuon(model.parameters(), **OPTIONS)
        for number in range(2):
            step(model, rank, number)
            optimizer.step()
            optimizer.zero_grad()
        return whole(model)

    expected = unsharded(lambda: reference(world_size, 2))
    for weights in on_ranks(body, world_size):
        assert_equal(weights, expected)


@pytest.mark.everywhere
@pytest.mark.parametrize(
    ("mesh", "placements"), [((4,), Placements((0,), (R,), (P,), (R,))), ((2, 2), HSDP)]
)
def test_units_of_two_strategies_give_the_bits_of_one_process(
    mesh: tuple[int, ...], placements: Placements
) -> None:
    """What a rank computes for the copies of a unit that others have too moves no owner elsewhere."""
    need_point_to_point()

    def squares() -> nn.Module:
        return fill(nn.Sequential(linear(4, 4), linear(4, 4)))

    def body(rank: int) -> dict[str, Tensor | None]:
        model = squares()
        with fsdp_core.fully_shard_context():
            fsdp_core.fully_shard(model.get_submodule("0"), mesh_of(*mesh), placements)
            fsdp_core.fully_shard(model, mesh_of(4), SHARDED)
        optimizer = fsdp_core.FsdpMuon(model.parameters(), **OPTIONS)
        step(model, rank, 0)
        optimizer.step()
        return whole(model)

    expected = unsharded(lambda: reference(4, 1, squares))
    for weights in on_ranks(body, 4):
        assert_equal(weights, expected)


def whole(model: nn.Module) -> dict[str, Tensor | None]:
    """All parameters, gathered, by name."""
    tensors: dict[str, Tensor | None] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, fsdp_core.FsdpModule):
            for group in module.fsdp_unit.groups:
                full = group.gather_main_weight()
                for index, member in enumerate(group.members):
                    name = f"{prefix}.{member.fqn}" if prefix else member.fqn
                    tensors[name] = full.get_tensor_view(index)
    return dict(sorted(tensors.items()))


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
        return whole(model)

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
        return whole(model)

    expected = unsharded(lambda: reference(2, 1))
    for weights in on_ranks(body, 2):
        assert_equal(weights, expected)


@pytest.mark.everywhere
def test_each_matrix_is_computed_by_one_rank_that_holds_part_of_it() -> None:
    """The same owners on every rank, chosen by cost; the given cost is asked for each shape."""
    asked: list[tuple[int, ...]] = []

    def cost(shape: Any) -> int:
        asked.append(tuple(shape))
        return orthogonalization_cost(shape)

    def body(_rank: int) -> list[dict[int, int]]:
        model = build()
        shard(model, "", mesh=(4,))
        optimizer = fsdp_core.FsdpMuon(model.parameters(), cost=cost, **OPTIONS)
        return [buffer.owners for buffer in optimizer.buffers]

    results = on_ranks(body, 4)

    assert all(owners == results[0] for owners in results)
    assert sorted(results[0][0]) == [0, 1, 2]
    assert set(asked) == {(5, 4), (1, 5), (4, 1)}


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
        shard(model, "0", "1", "2")
        optimizer = fsdp_core.FsdpMuon(model.parameters(), **OPTIONS)
        loss_of(model.get_submodule("2")(integers(2, 1, start=rank)), rank).backward()
        optimizer.step()
        return local_rows(model)

    def expected() -> dict[str, Tensor | None]:
        model = build()
        optimizer = torch.optim.Muon(model.parameters(), **OPTIONS)
        for rank in range(2):
            y = model.get_submodule("2")(integers(2, 1, start=rank))
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
