"""Checkpoints: whole or refused, no code run, full state dicts, safetensors."""

import json
import os
import pickle
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MEMORY_FORMATS
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import fsdp_core
from fsdp_core import ConfigError, MixedPrecisionPolicy, Placements, full_state
from fsdp_core import checkpoint_files as files
from fsdp_core.checkpoint_reader import PlainReader, PlainUnpickler
from fsdp_core.errors import UnsupportedError
from tests.cases.programs import (
    SHARDED,
    ZERO_1,
    assert_equal,
    batch,
    fill,
    local_rows,
    loss_of,
    put_together,
    shard,
)
from tests.core.worlds import on_ranks


class Tied(nn.Module):
    """Three layers of uneven shapes, of which two share a weight, and a buffer."""

    def __init__(self, rows: int = 5) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, rows), nn.Linear(rows, 2)
        self.third = nn.Linear(2, rows, bias=False)
        self.third.weight = self.first.weight
        self.register_buffer("count", torch.tensor([7]))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both ways."""
        y: Tensor = self.second(self.first(x) + self.third(x))
        return y


def build(units: tuple[Any, ...] = ((("first", "third")), "second"), **options: Any) -> Any:
    """A sharded model and its optimizer."""
    model = fill(Tied())
    context = shard(model, *units, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.5, 0.75))
    fsdp_core.fully_shard_optimizer(optimizer)
    return model, optimizer, context


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    """Train on one batch for all ranks, so that every world size gives the same gradients."""
    for number in steps:
        loss_of(model(batch(0, number)), 0).backward()
        optimizer.step()
        optimizer.zero_grad()


def save(directory: Path, steps: int = 2) -> dict[str, Tensor | None]:
    """Train and save on two ranks, train one step more; return the weights."""

    def body(_rank: int) -> dict[str, Tensor | None]:
        model, optimizer, _ = build()
        train(model, optimizer, range(steps))
        fsdp_core.save_checkpoint(model, optimizer, str(directory))
        train(model, optimizer, range(steps, steps + 1))
        return local_rows(model)

    return put_together(on_ranks(body, 2))


def save_anew(directory: Path) -> None:
    """Save a model as it begins."""
    model, optimizer, _ = build(mesh=(torch.distributed.get_world_size(),))
    fsdp_core.save_checkpoint(model, optimizer, directory)


def load(directory: Path, **options: Any) -> list[dict[str, Tensor | None]]:
    """Load on two ranks over other weights, train a step; return the weights of each rank."""

    def body(_rank: int) -> dict[str, Tensor | None]:
        model, optimizer, _ = build(**options)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(9.0)
        fsdp_core.load_checkpoint(model, optimizer, str(directory))
        assert model.count.item() == 7
        train(model, optimizer, range(2, 3))
        return local_rows(model)

    return on_ranks(body, 2)


@pytest.mark.everywhere
def test_training_goes_on_with_other_unit_boundaries(tmp_path: Path) -> None:
    """Names and shapes are all that must agree."""
    expected = save(tmp_path / "saved")
    loaded = load(tmp_path / "saved", units=(("first", "third", "second"),))

    assert_equal(put_together(loaded), expected)


@pytest.mark.everywhere
@pytest.mark.parametrize("placements", [SHARDED, ZERO_1])
def test_training_goes_on_with_other_placements(tmp_path: Path, placements: Placements) -> None:
    """Whatever the shards were, the next step gives the same bits."""
    expected = save(tmp_path / "saved")

    assert_equal(put_together(load(tmp_path / "saved", placements=placements)), expected)


@pytest.mark.everywhere
def test_a_second_save_takes_the_place_of_the_first(tmp_path: Path) -> None:
    """Nothing but the new checkpoint is left."""
    save(tmp_path / "saved", steps=1)
    expected = save(tmp_path / "saved")

    assert_equal(put_together(load(tmp_path / "saved")), expected)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["saved"]


def test_a_save_that_dies_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """Half a directory beside it is never taken for a checkpoint."""
    expected = save(tmp_path / "saved")

    class Dies:
        """A value that cannot be saved."""

    def body(_rank: int) -> None:
        model, optimizer, _ = build()
        train(model, optimizer, range(3))
        optimizer.param_groups[0]["extra"] = Dies()
        with pytest.raises(
            ConfigError, match=r"^'optimizer.options' must be a tensor or what JSON"
        ):
            fsdp_core.save_checkpoint(model, optimizer, str(tmp_path / "saved"))

    on_ranks(body, 2)
    (tmp_path / "saved.partial").mkdir()
    (tmp_path / "saved.partial" / ".metadata").write_bytes(b"half")

    assert_equal(put_together(load(tmp_path / "saved")), expected)


def test_a_save_that_died_between_two_renames_is_loaded_from_the_old_name(tmp_path: Path) -> None:
    """The previous checkpoint was moved away, the new one is not in its place yet."""
    expected = save(tmp_path / "saved")
    (tmp_path / "saved").rename(tmp_path / "saved.old")

    assert_equal(put_together(load(tmp_path / "saved")), expected)


def test_saves_that_die_again_and_again_leave_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each dies when the new checkpoint is to take its place; the next that ends leaves no other."""
    expected = save(tmp_path / "saved")
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if self.name == "saved.partial":
            raise OSError("no more room")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fails)
        for _ in range(2):
            with pytest.raises(OSError, match="no more room"):
                on_ranks(lambda _: save_anew(tmp_path / "saved"), 2)

    assert_equal(put_together(load(tmp_path / "saved")), expected)
    save(tmp_path / "saved")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["saved"]


@pytest.mark.everywhere
@pytest.mark.parametrize("name", ["all", "all/notes"])
def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path, name: str) -> None:
    """Such as the folder of earlier ones; nothing is written, in it or beside it."""
    expected = save(tmp_path / "all" / "first")
    (tmp_path / "all" / "notes").write_text("a file")

    def body(_rank: int) -> None:
        with pytest.raises(ConfigError) as caught:
            save_anew(tmp_path / name)
        assert str(caught.value) == (
            f"{str(tmp_path / name)!r} must be a checkpoint, empty or new, got something else, which "
            f"would be lost; pass another directory, or remove it"
        )

    on_ranks(body, 2)

    assert_equal(put_together(load(tmp_path / "all" / "first")), expected)
    assert [each.name for each in tmp_path.iterdir()] == ["all"]
    assert sorted(each.name for each in (tmp_path / "all").iterdir()) == ["first", "notes"]


@pytest.mark.everywhere
@pytest.mark.parametrize("rank", [0, 1])
def test_a_state_that_one_rank_alone_cannot_save_is_refused_on_all(
    tmp_path: Path, rank: int
) -> None:
    """Nobody waits for it."""

    def body(mine: int) -> str:
        model, optimizer, _ = build()
        if mine == rank:
            optimizer.param_groups[0]["extra"] = {1, 2}
        with pytest.raises(UnsupportedError) as caught:
            fsdp_core.save_checkpoint(model, optimizer, tmp_path / "saved")
        return str(caught.value)

    messages = on_ranks(body, 2)

    assert messages[0] == messages[1]
    assert messages[0].startswith("'optimizer.options' must be a tensor or what JSON can say")


@pytest.mark.everywhere
def test_a_directory_that_rank_0_cannot_make_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    """The others have the error of rank 0, with the path."""
    (tmp_path / "file").write_text("")

    def body(_rank: int) -> str:
        with pytest.raises(NotADirectoryError) as caught:
            save_anew(tmp_path / "file" / "saved")
        return str(caught.value)

    message = f"[Errno 20] Not a directory: {str(tmp_path / 'file' / 'saved.partial')!r}"
    assert on_ranks(body, 2) == [message] * 2


@pytest.mark.everywhere
def test_a_checkpoint_that_one_rank_does_not_see_is_refused_on_all(tmp_path: Path) -> None:
    """As on a disk that the ranks do not share."""
    save(tmp_path / "saved")

    def body(rank: int) -> str:
        model, optimizer, _ = build()
        with pytest.raises(ConfigError) as caught:
            fsdp_core.load_checkpoint(model, optimizer, tmp_path / ("saved", "elsewhere")[rank])
        return str(caught.value)

    for message in on_ranks(body, 2):
        assert f"{str(tmp_path / 'elsewhere')!r} must hold a whole checkpoint" in message


# ---------------------------------------------------------------------- states of modules


class Counting(nn.Module):
    """A layer with a state of its own that is no tensor, and one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.inner = nn.Linear(2, 2), Scale()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Count, and call the layer."""
        self.calls += 1
        y: Tensor = self.inner(self.layer(x))
        return y

    def get_extra_state(self) -> Any:
        """Return what JSON can say, of another length each time."""
        return {"calls": ["one"] * self.calls}

    def set_extra_state(self, state: Any) -> None:
        """Take it back."""
        self.calls = len(state["calls"])


class Scale(nn.Module):
    """A factor that is neither a parameter nor a buffer."""

    factor = torch.tensor([2.0])

    def forward(self, x: Tensor) -> Tensor:
        """Return x times the factor."""
        return x * self.factor

    def get_extra_state(self) -> Tensor:
        """Return the factor."""
        return self.factor

    def set_extra_state(self, state: Tensor) -> None:
        """Take it back."""
        self.factor = state


def counting() -> tuple[Any, Optimizer]:
    """A sharded model of them, and its optimizer."""
    shard(model := fill(Counting()), "layer", "", mesh=(2,))
    return model, fsdp_core.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))


@pytest.mark.everywhere
def test_states_of_modules_come_back(tmp_path: Path) -> None:
    """Through a checkpoint and through a full state dict: what JSON can say, and tensors."""

    def body(rank: int) -> list[tuple[int, float]]:
        model, optimizer = counting()
        train(model, optimizer, range(3))
        model.inner.factor = torch.tensor([4.0])
        fsdp_core.save_checkpoint(model, optimizer, tmp_path / "saved")
        full = full_state.full_state_dict(model)
        seen = []
        for way in ("checkpoint", "full"):
            other, other_optimizer = counting()
            if way == "checkpoint":
                fsdp_core.load_checkpoint(other, other_optimizer, tmp_path / "saved")
            else:
                full_state.load_full_state_dict(other, full if rank == 0 else None)
            assert_equal(local_rows(other), local_rows(model))
            seen.append((other.calls, other.inner.factor.item()))
        return seen

    assert on_ranks(body, 2) == [[(3, 4.0)] * 2] * 2


def test_a_state_that_is_no_tensor_is_not_exported_as_safetensors(tmp_path: Path) -> None:
    """The error names it, on every rank."""

    def body(_rank: int) -> None:
        model, _ = counting()
        with pytest.raises(UnsupportedError, match=r"holds tensors alone, got a dict for '_extra"):
            full_state.export_safetensors(model, tmp_path / "model.safetensors")

    on_ranks(body, 2)


# ---------------------------------------------------------------------- refusals


def damage(directory: Path, how: str) -> None:
    """Damage one file of a checkpoint."""
    victim = sorted(directory.glob("__*.distcp"))[0]
    if how == "missing":
        victim.unlink()
    elif how == "truncated":
        victim.write_bytes(victim.read_bytes()[:-1])
    elif how == "changed":
        contents = bytearray(victim.read_bytes())
        contents[len(contents) // 2] ^= 1
        victim.write_bytes(bytes(contents))
    elif how == "manifest":
        (directory / files.MANIFEST).write_text("{")
    else:
        manifest = json.loads((directory / files.MANIFEST).read_text())
        manifest["format"] = 99
        (directory / files.MANIFEST).write_text(json.dumps(manifest))


def refused(
    directory: Path, message: str, prepare: Callable[[nn.Module], None] | None = None
) -> None:
    """Check that loading raises with this text on every rank, and changes nothing."""

    def body(_rank: int) -> str:
        model, optimizer, _ = build()
        if prepare is not None:
            prepare(model)
        before = local_rows(model)
        with pytest.raises(ConfigError) as caught:
            fsdp_core.load_checkpoint(model, optimizer, str(directory))
        assert_equal(local_rows(model), before)
        assert not optimizer.state
        return str(caught.value)

    for text in on_ranks(body, 2):
        assert message in text


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "no file '__0_0.distcp'; load another one; nothing was loaded"),
        ("truncated", "in '__0_0.distcp' instead of "),
        (
            "changed",
            "other contents in '__0_0.distcp' than were saved; load another one; nothing was loaded",
        ),
        ("manifest", "a manifest.json that cannot be read; load another one; nothing was loaded"),
        ("format", "format 99, where this version reads 2; load another one; nothing was loaded"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_the_name_of_the_file(
    tmp_path: Path, how: str, message: str
) -> None:
    """On every rank, whichever of them read that file."""
    save(tmp_path / "saved")
    damage(tmp_path / "saved", how)

    refused(tmp_path / "saved", message)


def test_a_file_that_breaks_while_it_is_read_leaves_everything_as_it_was(tmp_path: Path) -> None:
    """Its checksum is right, and its last tensor cannot be understood: no rank loads the others."""
    save(tmp_path / "saved")
    stored = PlainReader(tmp_path / "saved").read_metadata().storage_data
    tensors = [place for index, place in stored.items() if "optimizer.state" in index.fqn]
    last = max(tensors, key=lambda place: (place.relative_path, place.offset))
    victim = tmp_path / "saved" / last.relative_path
    contents = bytearray(victim.read_bytes())
    contents[last.offset : last.offset + last.length] = b"?" * last.length
    victim.write_bytes(bytes(contents))
    put_in_manifest(victim)

    def body(_rank: int) -> None:
        model, optimizer, _ = build()
        model.count.fill_(1)
        before = local_rows(model)
        with pytest.raises(CheckpointException):
            fsdp_core.load_checkpoint(model, optimizer, tmp_path / "saved")
        assert_equal(local_rows(model), before)
        assert model.count.item() == 1
        assert not optimizer.state

    on_ranks(body, 2)


def put_in_manifest(file: Path) -> None:
    """Let the manifest have a file's present size and checksum."""
    path = file.parent / files.MANIFEST
    manifest = json.loads(path.read_text())
    manifest["files"][file.name] = [file.stat().st_size, files.checksum(file)]
    path.write_text(json.dumps(manifest))


@pytest.mark.everywhere
def test_weights_of_another_dtype_are_refused(tmp_path: Path) -> None:
    """A checkpoint keeps every bit; a full state dict is converted, as by `load_state_dict`."""
    save(tmp_path / "saved")
    half = MixedPrecisionPolicy(main_params_dtype=torch.bfloat16)

    def body(rank: int) -> tuple[str, list[torch.dtype]]:
        model, optimizer, _ = build(mixed_precision_policy=half)
        with pytest.raises(ConfigError) as caught:
            fsdp_core.load_checkpoint(model, optimizer, tmp_path / "saved")
        whole = fill(Tied()).state_dict() if rank == 0 else None
        full_state.load_full_state_dict(model, whole)
        return str(caught.value), [each.dtype for each in model.parameters()]

    for message, dtypes in on_ranks(body, 2):
        assert message == (
            f"'first.weight' in the checkpoint in {str(tmp_path / 'saved')!r} must have dtype "
            f"torch.bfloat16, got torch.float32; load it into a model of that dtype "
            f"(main_params_dtype of MixedPrecisionPolicy), whose full_state_dict may be loaded into "
            f"any; nothing was loaded"
        )
        assert set(dtypes) == {torch.bfloat16}


@pytest.mark.everywhere
def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    """A directory without a manifest was not written by a save that ended."""
    refused(
        tmp_path,
        "must hold a whole checkpoint, got no manifest.json or no .metadata in it; pass a directory "
        "that save_checkpoint wrote",
    )


@pytest.mark.everywhere
def test_missing_extra_and_wrongly_shaped_entries_are_refused(tmp_path: Path) -> None:
    """By their names; nothing is loaded."""
    save(tmp_path / "saved")

    def add(model: nn.Module) -> None:
        model.register_buffer("more", torch.ones(1))

    def drop(model: nn.Module) -> None:
        del model.count

    def grow(model: nn.Module) -> None:
        model.register_buffer("count", torch.ones(3))

    refused(
        tmp_path / "saved",
        "lacks 1: 'more'; build the model that was saved; nothing was loaded",
        add,
    )
    refused(
        tmp_path / "saved",
        "has, but the model lacks, 1: 'count'; build the model that was saved; nothing was loaded",
        drop,
    )
    refused(tmp_path / "saved", "'count' in the checkpoint in ", grow)


OTHER_PARAMETERS = (
    "the optimizer must hold the parameters that were saved with it, got 2 {}; build it with the "
    "same parameters"
)
OTHER_OPTIONS = (
    "parameters of one optimizer group must have been saved with the same options, got another 'lr' "
    "for 'second.weight' than for 'first.weight' in param_groups[0]; split the group as it was when "
    "it was saved"
)


def adamw(model: nn.Module) -> Optimizer:
    """One group of all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=0.5)


def without_second(model: nn.Module) -> Optimizer:
    """Of the first layer alone."""
    return torch.optim.AdamW(model.get_submodule("first").parameters(), lr=0.5)


def in_two_groups(model: nn.Module) -> Optimizer:
    """Each layer its own learning rate."""
    first, second = model.get_submodule("first"), model.get_submodule("second")
    groups = [{"params": first.parameters(), "lr": 0.5}, {"params": second.parameters(), "lr": 1.0}]
    return torch.optim.AdamW(groups)


def sgd(model: nn.Module) -> Optimizer:
    """Another class."""
    return torch.optim.SGD(model.parameters(), lr=0.5)


@pytest.mark.everywhere
@pytest.mark.parametrize(
    ("saved", "other", "message"),
    [
        (
            sgd,
            adamw,
            "the optimizer must be of the class that was saved, SGD, got AdamW; pass one of that class",
        ),
        (without_second, adamw, OTHER_PARAMETERS.format("more: 'second.weight', 'second.bias'")),
        (adamw, without_second, OTHER_PARAMETERS.format("fewer: 'second.bias', 'second.weight'")),
        (in_two_groups, adamw, OTHER_OPTIONS),
    ],
    ids=["class", "more", "fewer", "options"],
)
def test_an_optimizer_that_does_not_fit_is_refused_before_the_model_is_written(
    tmp_path: Path,
    saved: Callable[[nn.Module], Optimizer],
    other: Callable[[nn.Module], Optimizer],
    message: str,
) -> None:
    """On every rank; neither the weights nor the optimizer are touched."""

    def body(_rank: int) -> str:
        model = fill(Tied())
        shard(model, ("first", "third"), "second")
        optimizer = fsdp_core.fully_shard_optimizer(saved(model))
        train(model, optimizer, range(1))
        fsdp_core.save_checkpoint(model, optimizer, tmp_path / "saved")
        train(model, optimizer, range(1, 2))
        optimizer = fsdp_core.fully_shard_optimizer(other(model))
        before, options = local_rows(model), [dict(each) for each in optimizer.param_groups]
        with pytest.raises(ConfigError) as caught:
            fsdp_core.load_checkpoint(model, optimizer, tmp_path / "saved")
        assert_equal(local_rows(model), before)
        assert not optimizer.state
        assert optimizer.param_groups == options
        return str(caught.value)

    assert on_ranks(body, 2) == [f"{message}; nothing was loaded"] * 2


@pytest.mark.everywhere
def test_groups_may_be_split_otherwise(tmp_path: Path) -> None:
    """Options follow the parameters."""

    def body(_rank: int) -> list[float]:
        model = fill(Tied())
        shard(model, ("first", "third"), "second")
        fsdp_core.save_checkpoint(model, adamw(model), tmp_path / "saved")
        optimizer = in_two_groups(model)
        fsdp_core.load_checkpoint(model, optimizer, tmp_path / "saved")
        return [group["lr"] for group in optimizer.param_groups]

    assert on_ranks(body, 2) == [[0.5, 0.5]] * 2


class Bomb:
    """A pickle that would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        """Call os.mkdir when it is loaded."""
        return os.mkdir, (str(self.path),)


def test_loading_runs_no_code_of_the_file(tmp_path: Path) -> None:
    """Metadata that names anything else than its own classes is refused, not run."""
    save(tmp_path / "saved")
    path = tmp_path / "saved" / files.METADATA
    path.write_bytes(pickle.dumps(Bomb(tmp_path / "harm")))
    put_in_manifest(path)

    refused(tmp_path / "saved", "mkdir is no part of checkpoint metadata")
    assert not (tmp_path / "harm").exists()


class Attribute:
    """Pickled as the attribute of something, as Python 3.11.2 pickles the members of enums."""

    def __init__(self, of: object, name: str) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.of, self.name)


def test_metadata_may_name_members_of_its_enums_in_the_way_of_every_python() -> None:
    """And no attribute of anything else, which could be a method."""
    member = MEMORY_FORMATS.TORCH_CONTIGUOUS_FORMAT

    for way in (member, Attribute(MEMORY_FORMATS, member.name)):
        assert PlainUnpickler(BytesIO(pickle.dumps(way))).load() is member
    with pytest.raises(pickle.UnpicklingError, match="is no part of checkpoint metadata"):
        PlainUnpickler(BytesIO(pickle.dumps(Attribute(torch.Size, "numel")))).load()


# ---------------------------------------------------------------------- whole models


@pytest.mark.everywhere
def test_a_full_state_dict_goes_out_and_in(tmp_path: Path) -> None:
    """Rank 0 alone holds it, on the CPU; loading it elsewhere gives the same model."""

    def out(_rank: int) -> dict[str, Tensor]:
        model, _, _ = build()
        return full_state.full_state_dict(model)

    def back(rank: int) -> dict[str, Tensor]:
        model, _, _ = build(units=(("first", "third", "second"),), mesh=(3,))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(9.0)
        full_state.load_full_state_dict(model, whole if rank == 0 else None)
        return full_state.full_state_dict(model)

    whole, empty = on_ranks(out, 2)
    again = on_ranks(back, 3)[0]

    expected = dict(fill(Tied()).state_dict())
    assert empty == {}
    assert_equal(dict(whole), expected)
    assert_equal(dict(again), expected)


@pytest.mark.everywhere
def test_a_full_state_dict_with_other_entries_is_refused_on_every_rank() -> None:
    """Ranks that hold nothing raise what rank 0 found."""

    def body(rank: int) -> str:
        model, _, _ = build()
        wrong = {"first.weight": torch.ones(5, 2)} if rank == 0 else None
        with pytest.raises(ConfigError) as caught:
            full_state.load_full_state_dict(model, wrong)
        return str(caught.value)

    messages = on_ranks(body, 2)

    assert messages[0] == messages[1]
    assert "got none for 'count', 'first.bias', 'second.weight', 'second.bias'" in messages[0]


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
    ],
    ids=["a number", "None", "sharded", "meta", "sparse"],
)
def test_a_full_state_dict_of_anything_but_whole_tensors_is_refused_on_every_rank(
    entry: Any, got: str
) -> None:
    """Before the first entry is sent."""

    def body(rank: int) -> str:
        model, _, _ = build()
        before = local_rows(model)
        sharded = model.state_dict()["second.bias"]
        wrong = {**Tied().state_dict(), "second.bias": sharded if entry is DTensor else entry}
        with pytest.raises(ConfigError) as caught:
            full_state.load_full_state_dict(model, wrong if rank == 0 else None)
        assert_equal(local_rows(model), before)
        return str(caught.value)

    messages = on_ranks(body, 2)

    assert messages[0] == messages[1]
    assert f", got {got}" in messages[0]


@pytest.mark.everywhere
def test_a_model_is_exported_as_safetensors(tmp_path: Path) -> None:
    """One file with every name, tied ones too."""

    def body(_rank: int) -> None:
        model, _, _ = build()
        full_state.export_safetensors(model, tmp_path / "model.safetensors")

    on_ranks(body, 2)

    expected = dict(fill(Tied()).state_dict())
    got = load_file(tmp_path / "model.safetensors")
    assert_equal({name: got[name] for name in expected}, expected)
    assert sorted(got) == sorted(expected)


@pytest.mark.everywhere
def test_a_file_that_rank_0_cannot_write_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    """The others have the error of rank 0."""

    def body(_rank: int) -> str:
        model, _, _ = build()
        with pytest.raises(Exception, match="nowhere") as caught:
            full_state.export_safetensors(model, tmp_path / "nowhere" / "model.safetensors")
        return str(caught.value)

    messages = on_ranks(body, 2)

    assert messages[1] == f"SafetensorError: {messages[0]}"
