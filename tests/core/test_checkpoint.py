"""Checkpoints: what is saved on any ranks, in any layout, goes on on any others with the same bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

import fsdp_core
from fsdp_core import BlockAtomic, MixedPrecisionPolicy, Placements, TensorAtomic
from fsdp_core.errors import UnsupportedError
from fsdp_core.full_state import full_state_dict, load_full_state_dict
from tests.cases.programs import (
    HYBRID,
    SHARDED,
    ZERO_1,
    Tensors,
    assert_equal,
    batch,
    fill,
    linear,
    local_rows,
    shard,
    units_in,
)
from tests.core.invariants import Watch
from tests.core.saved_models import (
    VALUES_ALONE,
    Tied,
    adamw,
    build,
    counting,
    overwrite,
    train,
    uninterrupted,
)
from tests.core.strategies import STRATEGIES, mesh_shape, placements_of, whole_by_name
from tests.core.worlds import device_type, need_point_to_point, on_ranks, unsharded, world_size

SIZES = (1, 2, 3, 5, 8)

# ---------------------------------------------------------------------- other ranks


def trained_and_saved(directory: Path, ranks: int) -> None:
    """Save after one step on so many ranks."""

    def body(_rank: int) -> None:
        model, optimizer = build(mesh=(ranks,))
        train(model, optimizer, range(1))
        fsdp_core.save_checkpoint(model, optimizer, directory)

    on_ranks(body, ranks, **VALUES_ALONE)


def gone_on(directories: list[Path], ranks: int) -> list[list[Tensors]]:
    """Load each checkpoint on so many ranks and train a step; return each rank's whole weights."""

    def body(_rank: int) -> list[Tensors]:
        found = []
        for directory in directories:
            model, optimizer = build(("",), mesh=(ranks,))
            overwrite(model)
            fsdp_core.load_checkpoint(model, optimizer, directory)
            train(model, optimizer, range(1, 2))
            found.append(whole_by_name(model))
        return found

    return on_ranks(body, ranks, **VALUES_ALONE)


@pytest.fixture(scope="module")
def saved_on_each(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A checkpoint of each number of ranks."""
    folder = tmp_path_factory.mktemp("saved")
    directories = [folder / f"on {ranks}" for ranks in SIZES]
    for directory, ranks in zip(directories, SIZES, strict=True):
        trained_and_saved(directory, ranks)
    return directories


@pytest.mark.parametrize("ranks", SIZES)
def test_what_any_number_of_ranks_saved_goes_on_on_any_other(
    saved_on_each: list[Path], ranks: int
) -> None:
    """On 1, 2, 3, 5 and 8, of which some hold nothing: the bits of a run that never stopped."""
    expected = unsharded(lambda: uninterrupted(2))

    for found in gone_on(saved_on_each, ranks):
        for weights in found:
            assert_equal({name: weights[name] for name in expected}, expected)


@pytest.mark.everywhere
@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (1, 2), (4, 2), (2, 4)])
def test_real_ranks_go_on_from_what_more_or_fewer_saved(
    tmp_path: Path, saved: int, loaded: int
) -> None:
    """Through a directory that all see."""
    trained_and_saved(tmp_path / "saved", saved)
    expected = unsharded(lambda: uninterrupted(2))

    for (weights,) in gone_on([tmp_path / "saved"], loaded):
        assert_equal({name: weights[name] for name in expected}, expected)


# ---------------------------------------------------------------------- other layouts

Units = tuple[Any, ...]
APART: Units = (("first", "third"), "second")
WHOLE_TENSORS = Placements((0,), *((TensorAtomic(),),) * 3)
BLOCKS = Placements((0,), *((BlockAtomic(2),),) * 3)


def layout_of(name: str, model: nn.Module) -> dict[str, Any]:
    """The mesh, the placements and what else a layout needs."""
    if name in STRATEGIES:
        return {"mesh": mesh_shape(name), "placements": placements_of(name)}
    ranks = world_size(4)
    if name == "blocks":
        return {"mesh": (ranks,), "placements": BLOCKS}
    owners = {each: (7 - 2 * n) % ranks for n, each in enumerate(model.parameters())}
    return {"mesh": (ranks,), "placements": WHOLE_TENSORS, "parameter_to_owner": owners}


LAYOUTS: dict[str, tuple[str, Units]] = {
    **{f"{name}, units apart": (name, APART) for name in STRATEGIES},
    "blocks, one unit": ("blocks", ("",)),
    "whole tensors, one unit": ("whole tensors", ("",)),
    "blocks, units apart": ("blocks", APART),
    "zero_3, one unit": ("zero_3", ("",)),
    "whole tensors, units apart": ("whole tensors", APART),
    "hsdp, one unit": ("hsdp", ("",)),
}
"""Placements and boundaries of units: rows, blocks, whole tensors; nested units and one."""
NEXT = dict(zip(LAYOUTS, [*list(LAYOUTS)[1:], *list(LAYOUTS)[:1]], strict=True))
"""Around the ring: each layout is saved, and loaded, once."""


def sharded(layout: str) -> nn.Module:
    """The model in one of the layouts."""
    name, units = LAYOUTS[layout]
    model = fill(Tied())
    shard(model, *units, **layout_of(name, model))
    return model


@pytest.mark.everywhere
@pytest.mark.parametrize("saved", LAYOUTS)
def test_training_goes_on_in_any_other_layout(tmp_path: Path, saved: str) -> None:
    """Whatever the placements and the units were, the next steps give the same bits."""

    def body(_rank: int) -> Tensors:
        model = sharded(saved)
        optimizer = fsdp_core.fully_shard_optimizer(adamw(model))
        train(model, optimizer, range(2))
        fsdp_core.save_checkpoint(model, optimizer, tmp_path / "saved")
        model = sharded(NEXT[saved])
        optimizer = fsdp_core.fully_shard_optimizer(adamw(model))
        overwrite(model)
        fsdp_core.load_checkpoint(model, optimizer, tmp_path / "saved")
        train(model, optimizer, range(2, 4))
        return whole_by_name(model)

    expected = unsharded(lambda: uninterrupted(4))
    for weights in on_ranks(body, world_size(4)):
        assert_equal({name: weights[name] for name in expected}, expected)


def test_the_layouts_hold_buffers_with_padding_and_without() -> None:
    """Both packings are saved, and both are loaded."""

    def body(_rank: int) -> list[bool]:
        models = [sharded(layout) for layout in LAYOUTS]
        groups = [g for each in models for unit in units_in(each) for g in unit.fsdp_unit.groups]
        return [group.layout.numel > group.layout.tensors_numel for group in groups]

    padded = on_ranks(body, 4)[0]

    assert any(padded)
    assert not all(padded)


# ---------------------------------------------------------------------- other optimizers

MUON: dict[str, Any] = {"lr": 0.125, "momentum": 0.5, "weight_decay": 0.25}


def matrices() -> nn.Module:
    """Matrices of 6, 2 and 4 rows."""
    return fill(nn.Sequential(linear(6, 2), linear(2, 6), linear(4, 2)))


@pytest.mark.everywhere
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((2, "zero_3"), (3, "zero_3")),
        ((3, "zero_1"), (2, "blocks")),
        ((2, "blocks"), (2, "whole tensors")),
        ((2, "whole tensors"), (1, "zero_2")),
        ((4, "hsdp"), (2, "zero_1")),
        ((2, "no_shard"), (4, "hfsdp")),
    ],
)
def test_muon_goes_on_with_other_owners(
    tmp_path: Path, saved: tuple[int, str], loaded: tuple[int, str]
) -> None:
    """Its momenta lie as the rows of the weights do; the bits are those of one process."""
    need_point_to_point()

    def sharded_matrices(ranks: int, name: str) -> tuple[nn.Module, Optimizer]:
        model = matrices()
        options = layout_of(name, model)
        if "parameter_to_owner" in options:
            options["parameter_to_owner"] = dict.fromkeys(model.parameters(), ranks - 1)
        shard(model, "0", "", **{**options, "mesh": (2, 2) if ranks == 4 else (ranks,)})
        return model, fsdp_core.FsdpMuon(model.parameters(), **MUON)

    def before(_rank: int) -> None:
        model, optimizer = sharded_matrices(*saved)
        train(model, optimizer, range(2))
        fsdp_core.save_checkpoint(model, optimizer, tmp_path / "saved")

    def after(_rank: int) -> Tensors:
        model, optimizer = sharded_matrices(*loaded)
        overwrite(model)
        fsdp_core.load_checkpoint(model, optimizer, tmp_path / "saved")
        train(model, optimizer, range(2, 4))
        return whole_by_name(model)

    def expected() -> Tensors:
        model = matrices()
        train(model, torch.optim.Muon(model.parameters(), **MUON), range(4))
        return {name: each.detach() for name, each in model.named_parameters()}

    on_ranks(before, saved[0])
    for weights in on_ranks(after, loaded[0]):
        assert_equal(dict(sorted(weights.items())), unsharded(expected))


@pytest.mark.everywhere
@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"fused": True}, {"amsgrad": True}], ids=str
)
def test_every_kind_of_adam_goes_on(tmp_path: Path, options: dict[str, Any]) -> None:
    """What it keeps comes back to where it needs it: a fused one alone counts its steps on the device."""

    def kind(model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.5, 0.75), **options)

    def body(_rank: int) -> Tensors:
        shard(model := fill(Tied()), *APART)
        optimizer = fsdp_core.fully_shard_optimizer(kind(model))
        train(model, optimizer, range(2))
        fsdp_core.save_checkpoint(model, optimizer, tmp_path / "saved")
        shard(model := fill(Tied()), *APART)
        optimizer = fsdp_core.fully_shard_optimizer(kind(model))
        overwrite(model)
        fsdp_core.load_checkpoint(model, optimizer, tmp_path / "saved")
        for parameter, state in optimizer.state.items():
            on_device = {key for key, each in state.items() if each.device == parameter.device}
            assert on_device >= set(state) - (set() if "fused" in options else {"step"})
            assert "fused" in options or state["step"].device.type == "cpu"
        train(model, optimizer, range(2, 4))
        return whole_by_name(model)

    def expected() -> Tensors:
        model = fill(Tied())
        train(model, kind(model), range(4))
        return {name: each.detach() for name, each in model.named_parameters()}

    for weights in on_ranks(body, 2):
        assert_equal({n: weights[n] for n, _ in Tied().named_parameters()}, unsharded(expected))


@pytest.mark.everywhere
def test_compute_weights_follow_only_if_they_are_to(tmp_path: Path, invariants: Watch) -> None:
    """With `sync_model_weights=False` a unit that kept its full weights goes on with these."""
    half = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)

    def body(_rank: int) -> list[bool]:
        model, optimizer = build(placements=ZERO_1, mixed_precision_policy=half)
        fsdp_core.save_checkpoint(model, optimizer, tmp_path / "saved")
        x = batch(0).bfloat16()
        saved, seen = model(x), []
        for sync in (False, True):
            overwrite(model)
            other = model(x)
            fsdp_core.load_checkpoint(model, optimizer, tmp_path / "saved", sync_model_weights=sync)
            assert not torch.equal(other, saved)
            if not sync:
                invariants.accept_weights(model)
            seen.append(torch.equal(model(x), saved))
        return seen

    assert on_ranks(body, 2) == [[False, True]] * 2


# ---------------------------------------------------------------------- states of modules


@pytest.mark.everywhere
def test_states_of_modules_come_back(tmp_path: Path) -> None:
    """Through a checkpoint and through a full state dict: what JSON can say, and tensors."""

    def body(rank: int) -> list[tuple[int, float]]:
        model, optimizer = counting()
        train(model, optimizer, range(3))
        model.inner.factor = torch.tensor([4.0])
        fsdp_core.save_checkpoint(model, optimizer, tmp_path / "saved")
        full = full_state_dict(model)
        seen = []
        for way in ("checkpoint", "full"):
            other, other_optimizer = counting()
            if way == "checkpoint":
                fsdp_core.load_checkpoint(other, other_optimizer, tmp_path / "saved")
            else:
                load_full_state_dict(other, full if rank == 0 else None)
            assert_equal(local_rows(other), local_rows(model))
            seen.append((other.calls, other.inner.factor.item()))
        return seen

    assert on_ranks(body, 2) == [[(3, 4.0)] * 2] * 2


@pytest.mark.everywhere
def test_what_is_not_sharded_is_saved_of_rank_0(tmp_path: Path) -> None:
    """States of modules and options that differ, be they longer or shorter, and buffers."""

    def body(rank: int) -> tuple[int, list[float], float]:
        model, optimizer = counting()
        model.calls = (12, 1)[rank]
        model.inner.factor = torch.full(((3, 12)[rank],), rank + 2.0)
        optimizer.param_groups[0]["lr"] = (0.5, 0.0625)[rank]
        fsdp_core.save_checkpoint(model, optimizer, tmp_path / "saved")
        model, optimizer = counting()
        fsdp_core.load_checkpoint(model, optimizer, tmp_path / "saved")
        return model.calls, model.inner.factor.tolist(), optimizer.param_groups[0]["lr"]

    assert on_ranks(body, 2) == [(12, [2.0] * 3, 0.5)] * 2


ACTIONS: dict[str, Callable[[nn.Module, Optimizer, Path], object]] = {
    "save": fsdp_core.save_checkpoint,
    "load": fsdp_core.load_checkpoint,
    "take out": lambda model, _optimizer, _path: full_state_dict(model),
    "put in": lambda model, _optimizer, _path: load_full_state_dict(model, {}),
}


@pytest.mark.everywhere
@pytest.mark.parametrize("action", ACTIONS)
def test_experts_of_one_name_are_refused(tmp_path: Path, action: str) -> None:
    """Two ranks each have another weight under it, of which one alone would be left."""

    def body(_rank: int) -> str:
        model = nn.ModuleDict({"dense": linear(), "expert": linear()})
        mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("expert_dp", "ep"))
        with fsdp_core.fully_shard_context():
            fsdp_core.fully_shard(model["dense"], mesh, HYBRID)
            fsdp_core.fully_shard(model["expert"], mesh["expert_dp"], SHARDED, grad_divisor=2)
        optimizer = fsdp_core.fully_shard_optimizer(adamw(model))
        with pytest.raises(UnsupportedError) as caught:
            ACTIONS[action](model, optimizer, tmp_path / "saved")
        return str(caught.value)

    what = "a checkpoint" if action in ("save", "load") else "a full state dict"
    message = (
        f"{what} has one weight of each name, got unit 'expert' on 2 of 4 ranks, where others may have "
        f"another (such as an expert); use torch.distributed.checkpoint with names of each rank's own"
    )
    assert on_ranks(body, 4) == [message] * 4
    assert list(tmp_path.iterdir()) == []
