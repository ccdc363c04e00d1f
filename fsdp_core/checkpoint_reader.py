"""Reads the files of a checkpoint, and runs nothing that they say.

Metadata are a pickle, which may name nothing but the classes of metadata.
"""

import pickle
from enum import Enum, EnumMeta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from fsdp_core.checkpoint_files import METADATA
from fsdp_core.errors import ConfigError


class PlainReader(FileSystemReader):
    """Reads checkpoints without running anything that their files say."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Return the metadata.

        Raises:
            ConfigError: the file holds something else than metadata.
        """
        path = Path(self.path) / METADATA
        try:
            with path.open("rb") as file:
                metadata = PlainUnpickler(file).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError) as error:
            msg = (
                f"{str(path)!r} must hold checkpoint metadata only, got: {error}; pass a directory "
                f"that save_checkpoint wrote"
            )
            raise ConfigError(msg) from error
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        assert isinstance(metadata, Metadata)
        return metadata


def buffer_of(metadata: Metadata, key: str) -> Tensor:
    """Return an empty tensor that takes a saved value."""
    saved = metadata.state_dict_metadata.get(key)
    if not isinstance(saved, TensorStorageMetadata):
        msg = (
            f"the checkpoint must have {key!r}, got none; pass a directory that save_checkpoint "
            f"wrote; nothing was loaded"
        )
        raise ConfigError(msg)
    return torch.empty(saved.size, dtype=saved.properties.dtype)


class PlainUnpickler(pickle.Unpickler):
    """Builds the classes of checkpoint metadata, and none else."""

    _MODULES = (
        "torch.distributed.checkpoint.metadata",
        "torch.distributed.checkpoint.filesystem",
    )
    _NAMES = (
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib", "Path"),
    )

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of metadata.

        Raises:
            UnpicklingError: the file asks for another one.
        """
        plain = name.isidentifier() and name[:1] in "_ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module in self._MODULES and plain) or (module, name) in self._NAMES or dtype:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member_of_enum
        msg = f"{module}.{name} is no part of checkpoint metadata"
        raise pickle.UnpicklingError(msg)


def _member_of_enum(cls: object, name: str) -> Enum:
    """Stand in for `getattr`, by which some releases of Python 3.11 pickle the members of an enum."""
    if isinstance(cls, EnumMeta) and name in cls.__members__:
        member: Enum = cls[name]
        return member
    msg = f"{name!r} of {cls!r} is no part of checkpoint metadata"
    raise pickle.UnpicklingError(msg)
