"""Reading checkpoints: nothing that a file says is run, whatever its checksum."""

import os
import pickle
from collections import OrderedDict
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MEMORY_FORMATS
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from fsdp_core import ConfigError
from fsdp_core.checkpoint_files import METADATA
from fsdp_core.checkpoint_reader import PlainReader, _PlainUnpickler
from tests.core.saved_models import edit_metadata, put_in_manifest, refused, save, save_anew
from tests.core.worlds import on_simulated_ranks, once

NAMES = ("__0_0.distcp", "__1_0.distcp")


class Bomb:
    """A pickle that would leave a folder behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        """Call os.mkdir when it is loaded."""
        return os.mkdir, (str(self.path),)


class Call:
    """A pickle that would call a function."""

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        """Call it when it is loaded."""
        return self.function, self.args


def replace_file(path: Path, data: bytes) -> None:
    """Put other contents into a file, with a right checksum."""

    def replace() -> None:
        path.write_bytes(data)
        put_in_manifest(path)

    once(replace)


@pytest.mark.everywhere
def test_loading_runs_no_code_of_the_metadata(tmp_path: Path) -> None:
    """Metadata that name anything else than their own classes are refused, not run."""
    save(tmp_path / "saved")
    path = tmp_path / "saved" / METADATA
    replace_file(path, pickle.dumps(Bomb(tmp_path / "harm")))

    refused(
        tmp_path / "saved",
        f"{str(path)!r} must hold checkpoint metadata only, got UnpicklingError: posix.mkdir is no "
        f"part of checkpoint metadata; pass a directory that save_checkpoint wrote; nothing was loaded",
    )
    assert not (tmp_path / "harm").exists()


@pytest.mark.everywhere
@pytest.mark.parametrize("key", ["model.second.weight", "optimizer.options"])
def test_loading_runs_no_code_of_a_tensor(tmp_path: Path, key: str) -> None:
    """A pickle in the place of one, of weights or of JSON, is refused by the name of its file."""
    save(tmp_path / "saved")
    stored = PlainReader(tmp_path / "saved", NAMES).metadata.storage_data
    place = next(place for index, place in stored.items() if index.fqn == key)
    path = tmp_path / "saved" / place.relative_path
    bomb = pickle.dumps(Bomb(tmp_path / "harm"))
    data = bytearray(path.read_bytes())
    data[place.offset : place.offset + place.length] = bomb.ljust(place.length, b"\0")
    replace_file(path, bytes(data))

    refused(tmp_path / "saved", f"must be whole, got {path.name!r}, which cannot be read (")
    assert not (tmp_path / "harm").exists()


@pytest.mark.everywhere
def test_a_file_that_breaks_at_its_last_tensor_leaves_everything_as_it_was(tmp_path: Path) -> None:
    """All others were read by then, and no rank loads them."""
    save(tmp_path / "saved")
    stored = PlainReader(tmp_path / "saved", NAMES).metadata.storage_data
    tensors = [place for index, place in stored.items() if "optimizer.state" in index.fqn]
    last = max(tensors, key=lambda place: (place.relative_path, place.offset))
    path = tmp_path / "saved" / last.relative_path
    data = bytearray(path.read_bytes())
    data[last.offset : last.offset + last.length] = b"?" * last.length
    replace_file(path, bytes(data))

    refused(tmp_path / "saved", f"must be whole, got {path.name!r}, which cannot be read (")


class Attribute:
    """Pickled as the attribute of something, as Python 3.11.2 pickles the members of enums."""

    def __init__(self, of: object, name: str) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.of, self.name)


def unpickled(value: object) -> object:
    """What is left of a value in a file of metadata."""
    return _PlainUnpickler(BytesIO(pickle.dumps(value))).load()


def test_metadata_may_name_members_of_their_enums_in_the_way_of_every_python() -> None:
    """And no attribute of anything else, which could be a method."""
    member = MEMORY_FORMATS.TORCH_CONTIGUOUS_FORMAT

    for way in (member, Attribute(MEMORY_FORMATS, member.name)):
        assert unpickled(way) is member
    with pytest.raises(pickle.UnpicklingError, match="is no part of checkpoint metadata"):
        unpickled(Attribute(torch.Size, "numel"))


@pytest.mark.parametrize(
    "value",
    [
        Call(filesystem._generate_uuid),
        Call(filesystem.FileSystemWriter, "folder"),
        Call(filesystem.FileSystem),
        Call(torch.load, "file"),
        OrderedDict(),
    ],
    ids=["a function", "a writer", "a file system", "torch.load", "another class"],
)
def test_metadata_may_name_nothing_else_of_their_own_modules(value: object) -> None:
    """Neither functions nor classes that metadata are not made of."""
    with pytest.raises(pickle.UnpicklingError, match=r"is no part of checkpoint metadata$"):
        unpickled(value)


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (None, "a NoneType of other things"),
        ({"model.first.weight": 1}, "a dict of other things"),
        (torch.Size((1,)), "a Size of other things"),
        (Metadata({}), "a Metadata of other things"),
        (Metadata({"model.first.weight": 1}, storage_data={}), "a Metadata of other things"),  # type: ignore[dict-item]
        (Metadata({}, storage_data={"a": StorageMeta()}), "a Metadata of other things"),
    ],
)
def test_anything_but_metadata_is_refused(tmp_path: Path, value: object, got: str) -> None:
    """Also in the right class."""
    (tmp_path / METADATA).write_bytes(pickle.dumps(value))

    with pytest.raises(ConfigError) as caught:
        PlainReader(tmp_path, NAMES)

    assert str(caught.value) == (
        f"{str(tmp_path / METADATA)!r} must hold checkpoint metadata only, got {got}; pass a directory "
        f"that save_checkpoint wrote; nothing was loaded"
    )


def drop_chunk(metadata: Metadata) -> None:
    """Forget the rows of one rank."""
    entry: Any = metadata.state_dict_metadata["model.first.weight"]
    entry.chunks.pop()


def read_elsewhere(metadata: Metadata) -> None:
    """Say that a tensor lies in a file that is no part of the checkpoint."""
    next(iter(metadata.storage_data.values())).relative_path = "../other"


@pytest.mark.everywhere
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (drop_chunk, "must hold checkpoint metadata only, got a Metadata of other things"),
        (read_elsewhere, "must be whole, got no checksum of '../other'"),
    ],
)
def test_metadata_that_do_not_say_where_all_rows_are_are_refused(
    tmp_path: Path, change: Callable[[Metadata], None], problem: str
) -> None:
    """Rows would keep what they were, in silence."""
    save(tmp_path / "saved")
    edit_metadata(tmp_path / "saved", change)

    refused(tmp_path / "saved", problem)


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of metadata."""
    folder = tmp_path_factory.mktemp("metadata")
    on_simulated_ranks(lambda _: save_anew(folder / "saved"), 2)
    return (folder / "saved" / METADATA).read_bytes()


@given(st.data())
@settings(max_examples=100)
def test_whatever_bytes_are_in_it_they_are_metadata_or_refused(
    metadata: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Replaced, dropped or doubled anywhere: no other error, and nothing is run."""
    start = data.draw(st.integers(0, len(metadata) - 1), label="start")
    stop = data.draw(st.integers(start, min(len(metadata), start + 8)), label="stop")
    other = data.draw(st.binary(max_size=8), label="other")
    folder = tmp_path_factory.mktemp("changed")
    (folder / METADATA).write_bytes(metadata[:start] + other + metadata[stop:])

    try:
        reader = PlainReader(folder, NAMES)
    except ConfigError:
        return
    assert all(place.relative_path in NAMES for place in reader.metadata.storage_data.values())
