"""Reads the files of a checkpoint, and runs nothing that they say.

Metadata are a pickle, which may name nothing but the classes of metadata. Tensors are read by
PyTorch's reader of weights alone.
"""

import pickle
from collections.abc import Collection
from dataclasses import replace
from enum import Enum, EnumMeta
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from fsdp_core.checkpoint_files import METADATA, not_whole
from fsdp_core.errors import ConfigError


class PlainReader(FileSystemReader):
    """Reads checkpoints without running anything that their files say.

    Attributes:
        directory: of the checkpoint.
        metadata: what it says about its tensors, read once.
    """

    def __init__(self, directory: Path, checked: Collection[str]) -> None:
        """Read the metadata.

        Args:
            directory: of the checkpoint.
            checked: names of files whose checksums are right; no other is read.

        Raises:
            ConfigError: the file holds something else than metadata, or metadata of another file.
        """
        super().__init__(directory)
        self.directory = directory
        self.metadata = _read_metadata(directory / METADATA)
        for place in self.metadata.storage_data.values():
            if place.relative_path not in checked:
                raise not_whole(directory, f"no checksum of {place.relative_path!r}")

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Return the metadata."""
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read tensors, file by file.

        Raises:
            ConfigError: names the file that does not hold what the metadata say.
        """
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            name = self.storage_data[item.storage_index].relative_path
            by_file.setdefault(name, []).append(item)
        for name, items in by_file.items():
            try:
                super().read_data(replace(plan, items=items), planner)
            except Exception as error:
                problem = f"{name!r}, which cannot be read ({type(error).__name__}: {error})"
                raise not_whole(self.directory, problem) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def target_of(self, key: str, device: torch.device | str = "cpu") -> Tensor:
        """Return an empty tensor that takes a saved value.

        Raises:
            ConfigError: no tensor of that name was saved.
        """
        saved = self.metadata.state_dict_metadata.get(key)
        if not isinstance(saved, TensorStorageMetadata):
            raise not_whole(self.directory, f"no tensor {key!r}")
        return torch.empty(saved.size, dtype=saved.properties.dtype, device=device)


def _read_metadata(path: Path) -> Metadata:
    """Return what a file of metadata says.

    Why any exception: which ones unpickling raises on other contents is not said.

    Raises:
        ConfigError: the file holds something else.
    """
    try:
        with path.open("rb") as file:
            metadata = _PlainUnpickler(file).load()
        if _are_metadata(metadata):
            return metadata
        problem = f"a {type(metadata).__name__} of other things"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    msg = (
        f"{str(path)!r} must hold checkpoint metadata only, got {problem}; pass a directory that "
        f"save_checkpoint wrote; nothing was loaded"
    )
    raise ConfigError(msg)


def _are_metadata(metadata: object) -> TypeGuard[Metadata]:
    """Whether something is made of what metadata are made of, whatever its class says."""
    return (
        isinstance(metadata, Metadata)
        and isinstance(metadata.state_dict_metadata, dict)
        and isinstance(metadata.storage_data, dict)
        and all(map(_is_entry, metadata.state_dict_metadata.items()))
        and all(
            isinstance(index, MetadataIndex) and isinstance(place.relative_path, str)
            for index, place in metadata.storage_data.items()
        )
    )


def _is_entry(item: tuple[object, object]) -> bool:
    """Whether a name is that of a value whose chunks make it up."""
    name, saved = item
    if not isinstance(saved, TensorStorageMetadata):
        return isinstance(name, str) and isinstance(saved, BytesStorageMetadata)
    numel = sum(torch.Size(chunk.sizes).numel() for chunk in saved.chunks)
    return (
        isinstance(name, str)
        and isinstance(saved.size, torch.Size)
        and isinstance(saved.properties.dtype, torch.dtype)
        and numel == saved.size.numel()
    )


def _member_of_enum(cls: object, name: str) -> Enum:
    """Stand in for `getattr`, by which some releases of Python 3.11 pickle the members of an enum."""
    if isinstance(cls, EnumMeta) and name in cls.__members__:
        member: Enum = cls[name]
        return member
    msg = f"{name!r} of {cls!r} is no part of checkpoint metadata"
    raise pickle.UnpicklingError(msg)


class _PlainUnpickler(pickle.Unpickler):
    """Builds the classes of checkpoint metadata, and none else."""

    _METADATA = "torch.distributed.checkpoint.metadata"
    _NAMES = (
        (_METADATA, "BytesStorageMetadata"),
        (_METADATA, "ChunkStorageMetadata"),
        (_METADATA, "Metadata"),
        (_METADATA, "MetadataIndex"),
        (_METADATA, "StorageMeta"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "TensorStorageMetadata"),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib", "WindowsPath"),
    )

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of metadata.

        Raises:
            UnpicklingError: the file asks for something else.
        """
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in self._NAMES or is_dtype:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member_of_enum
        msg = f"{module}.{name} is no part of checkpoint metadata"
        raise pickle.UnpicklingError(msg)
