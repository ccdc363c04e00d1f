"""Whole models: out of shards and into them, on rank 0 alone, and as safetensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp_sim
from fsdp_core import ConfigError, Placements
from fsdp_core.errors import UnsupportedError
from fsdp_core.full_state import export_safetensors, full_state_dict, load_full_state_dict
from fsdp_sim.analysis import analyse
from fsdp_sim.checkers import make as make_checkers
from fsdp_sim.checkers.memory_peak import MemoryPeak
from tests.cases.programs import (
    SHARDED,
    ZERO_1,
    Tensors,
    assert_equal,
    begin_step,
    fill,
    linear,
    local_rows,
    ops_by_step,
    shard,
)
from tests.core.saved_models import Tied, build, counting
from tests.core.strategies import whole_by_name
from tests.core.worlds import on_ranks


@pytest.mark.everywhere
def test_a_full_state_dict_goes_out_and_in(tmp_path: Path) -> None:
    """Rank 0 alone holds it, on the CPU; loading it elsewhere gives the same model."""

    def out(_rank: int) -> dict[str, Tensor]:
        model, _ = build()
        return full_state_dict(model)

    def back(rank: int) -> dict[str, Tensor]:
        model, _ = build(units=(("first", "third", "second"),), mesh=(3,))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(9.0)
        load_full_state_dict(model, whole if rank == 0 else None)
        return full_state_dict(model)

    whole, empty = on_ranks(out, 2)
    again = on_ranks(back, 3)[0]

    expected = dict(fill(Tied()).state_dict())
    assert empty == {}
    assert_equal(dict(whole), expected)
    assert_equal(dict(again), expected)


@pytest.mark.everywhere
@pytest.mark.parametrize(
    ("change", "got"),
    [
        (
            lambda full: {"first.weight": full["first.weight"]},
            "none for 'count', 'first.bias', 'second.weight', 'second.bias'",
        ),
        (lambda _full: None, "none for 'count', 'first.weight', 'first.bias', 'second.weight'"),
        (lambda full: {**full, "fourth.weight": full["count"]}, "more: 'fourth.weight'"),
    ],
    ids=["missing", "nothing", "extra"],
)
def test_a_full_state_dict_with_other_entries_is_refused_on_every_rank(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor] | None], got: str
) -> None:
    """Ranks that hold nothing raise what rank 0 found; nobody loads anything."""

    def body(rank: int) -> str:
        model, _ = build()
        before = local_rows(model)
        with pytest.raises(ConfigError) as caught:
            load_full_state_dict(model, change(Tied().state_dict()) if rank == 0 else None)
        assert_equal(local_rows(model), before)
        return str(caught.value)

    message = (
        f"a full state dict must have the model's entries, got {got}; pass what full_state_dict "
        f"returned for such a model; nothing was loaded"
    )
    assert on_ranks(body, 2) == [message] * 2


@pytest.mark.everywhere
@pytest.mark.parametrize(
    ("entry", "got"),
    [
        (3, "int for 'second.bias' instead of a whole tensor"),
        (None, "NoneType for 'second.bias' instead of a whole tensor"),
        (DTensor, "DTensor for 'second.bias' instead of a whole tensor"),
        (
            torch.empty(2, device="meta"),
            "layout torch.strided on meta for 'second.bias' instead of",
        ),
        (torch.ones(2).to_sparse(), "layout torch.sparse_coo on cpu for 'second.bias' instead of"),
        (torch.ones(3), "shape (3,) for 'second.bias' instead of (2,);"),
        (torch.ones(1, 2), "shape (1, 2) for 'second.bias' instead of (2,);"),
        (torch.tensor(1.0), "shape () for 'second.bias' instead of (2,);"),
    ],
    ids=["a number", "None", "sharded", "meta", "sparse", "longer", "of two dims", "a scalar"],
)
def test_a_full_state_dict_of_anything_but_whole_tensors_is_refused_on_every_rank(
    entry: Any, got: str
) -> None:
    """Before the first entry is sent."""

    def body(rank: int) -> str:
        model, _ = build()
        before = local_rows(model)
        sharded = model.state_dict()["second.bias"]
        wrong = {**Tied().state_dict(), "second.bias": sharded if entry is DTensor else entry}
        with pytest.raises(ConfigError) as caught:
            load_full_state_dict(model, wrong if rank == 0 else None)
        assert_equal(local_rows(model), before)
        return str(caught.value)

    messages = on_ranks(body, 2)

    assert messages[0] == messages[1]
    assert f", got {got}" in messages[0]


@pytest.mark.everywhere
def test_a_model_is_exported_as_safetensors(tmp_path: Path) -> None:
    """One file with every name, tied ones too, which the package reads and the plain module loads."""

    def body(_rank: int) -> None:
        model, _ = build()
        export_safetensors(model, tmp_path / "model.safetensors")

    on_ranks(body, 2)
    read = load_file(tmp_path / "model.safetensors")
    plain = Tied()
    plain.load_state_dict(read)

    expected = dict(fill(Tied()).state_dict())
    assert_equal({name: read[name] for name in expected}, expected)
    assert sorted(read) == sorted(expected)
    assert_equal(dict(plain.state_dict()), expected)
    assert [each.name for each in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.everywhere
def test_a_file_that_rank_0_cannot_write_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    """The others have the error of rank 0."""

    def body(_rank: int) -> str:
        model, _ = build()
        with pytest.raises(Exception, match="nowhere") as caught:
            export_safetensors(model, tmp_path / "nowhere" / "model.safetensors")
        return str(caught.value)

    messages = on_ranks(body, 2)

    assert messages[1] == f"SafetensorError: {messages[0]}"


@pytest.mark.everywhere
def test_a_state_that_is_no_tensor_is_not_exported_as_safetensors(tmp_path: Path) -> None:
    """The error names it, on every rank."""

    def body(_rank: int) -> str:
        model, _ = counting()
        with pytest.raises(UnsupportedError) as caught:
            export_safetensors(model, tmp_path / "model.safetensors")
        return str(caught.value)

    message = (
        "a safetensors file holds tensors alone, got a dict for '_extra_state'; use full_state_dict, "
        "or give the module a state of tensors"
    )
    assert on_ranks(body, 2) == [message] * 2


# ---------------------------------------------------------------------- how much of it a rank holds

LAYERS, WIDTH = 8, 32
LAYER_NBYTES = 2 * 4 * WIDTH * WIDTH


def layers() -> nn.Module:
    """Layers of two matrices."""
    pairs = (nn.Sequential(linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)) for _ in range(LAYERS))
    return nn.Sequential(*pairs)


def most_held(
    action: Callable[[nn.Module, dict[str, Any] | None], object], placements: Placements
) -> list[float]:
    """What each of four ranks holds at most beyond its shards in an action, in layers.

    The action gets the sharded model, and what a whole state dict is made of.
    """

    def body(rank: int) -> None:
        model = layers()
        whole = model.state_dict() if rank == 0 else None
        shard(model, *map(str, range(LAYERS)), "", mesh=(4,), placements=placements)
        begin_step(0)
        action(model, whole)

    report = fsdp_sim.simulate(body, 4, trace=True, checkers=())
    peaks = []
    for rank in range(4):
        (ops,) = ops_by_step(report, rank)
        checker = analyse(ops, make_checkers(("memory_peak",)), 4).checker(MemoryPeak)
        assert checker is not None
        peaks.append(checker.peaks(rank).requested / LAYER_NBYTES)
    return peaks


@pytest.mark.parametrize("placements", [SHARDED, ZERO_1], ids=["zero_3", "zero_1"])
def test_taking_a_model_out_needs_one_unit_whole_and_all_on_rank_0_alone(
    placements: Placements,
) -> None:
    """However many layers there are."""
    peaks = most_held(lambda model, _whole: full_state_dict(model), placements)

    assert peaks == [LAYERS + 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("placements", [SHARDED, ZERO_1], ids=["zero_3", "zero_1"])
def test_putting_a_model_in_needs_one_parameter_whole(placements: Placements) -> None:
    """Half a layer, on rank 0 too, beside the state dict that it was given."""
    assert most_held(load_full_state_dict, placements) == [0.5] * 4


@pytest.mark.parametrize("placements", [SHARDED, ZERO_1], ids=["zero_3", "zero_1"])
def test_a_way_that_leaves_all_on_every_rank_is_seen(placements: Placements) -> None:
    """The measure itself: what gathers unit after unit and keeps them holds them all."""
    peaks = most_held(lambda model, _whole: whole_by_name(model), placements)

    assert peaks == [float(LAYERS)] * 4


# ---------------------------------------------------------------------- from nothing


class Sevens(nn.Linear):
    """A layer that starts with sevens, and notes what it filled."""

    def reset_parameters(self) -> None:
        """Fill what is the layer's own."""
        for each in self.parameters():
            nn.init.constant_(each, 7)
        if not self.weight.is_meta:
            self.filled = [*getattr(self, "filled", []), tuple(self.weight.shape)]


@pytest.mark.everywhere
@pytest.mark.parametrize("placements", [SHARDED, ZERO_1], ids=["zero_3", "zero_1"])
def test_a_model_of_the_meta_device_takes_what_rank_0_alone_has(placements: Placements) -> None:
    """Each module's reset runs once before, with the shapes of the whole; buffers come too."""

    def plain() -> nn.Module:
        return nn.Sequential(Sevens(2, 5), nn.Sequential(Sevens(5, 3), nn.BatchNorm1d(3)))

    def filled() -> nn.Module:
        model = fill(plain())
        model.get_buffer("1.1.running_mean").fill_(2)
        return model

    def body(rank: int) -> dict[str, Any]:
        whole = filled().state_dict() if rank == 0 else None
        with torch.device("meta"):
            model = plain()
        shard(model, "0", "1", placements=placements)
        resets = [each.filled for each in model.modules() if isinstance(each, Sevens)]
        load_full_state_dict(model, whole)
        return {"resets": resets, **whole_by_name(model), **dict(model.named_buffers())}

    expected: Tensors = {**dict(filled().named_parameters()), **dict(filled().named_buffers())}
    for found in on_ranks(body, 2):
        assert found.pop("resets") == [[(5, 2)], [(3, 5)]]
        assert_equal({name: found[name] for name in expected}, expected)
