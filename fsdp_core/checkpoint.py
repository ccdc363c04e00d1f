"""Distributed checkpoint save / load; full state dicts; safetensors.

A checkpoint is a directory written by `torch.distributed.checkpoint`, with true chunk metadata of
uneven shards, so it loads at another world size, with other placements and other unit boundaries.
Beside it lies a manifest with the size and checksum of every file. Whatever is no tensor is stored
as JSON, and pickles of metadata may name nothing but its own classes: loading runs no code.
"""

import json
import pickle
import shutil
import zlib
from collections.abc import Iterator
from enum import Enum, EnumMeta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_core.agreement import raised_by_all
from fsdp_core.errors import ConfigError, UnsupportedError
from fsdp_core.module import FsdpModule
from fsdp_core.parameter_group import ParameterGroup, describe_state, living_group, owner_of
from fsdp_core.torch_private import is_extra_state, local_tensor
from fsdp_core.unit import ShardedUnit

MANIFEST = "manifest.json"
METADATA = ".metadata"
FORMAT = 2

# Names that one message repeats.
NAMES_MAX = 4
_READ_NBYTES = 1 << 24

# What comes before the name of an entry of the model: a tensor, or what is stored as JSON.
_MODEL = "model."
_EXTRA = "extra."

_CLASS = "optimizer.class"
_OPTIONS = "optimizer.options"
_VALUES = "optimizer.values"


# --- save ------------------------------------------------------------------------------------------


def save_checkpoint(model: nn.Module, optimizer: Optimizer, checkpoint_dir: str | Path) -> None:
    """Save model and optimizer, each rank its own shards.

    The directory is written under another name and takes its own when it is whole. A save that dies
    leaves the previous one as it was, or with `.old` after its name, where `load_checkpoint` finds it.

    Args:
        model: sharded.
        optimizer: of its sharded parameters.
        checkpoint_dir: on a file system that all ranks see.

    Ordering:
        Collective on the default process group; the host waits.

    Raises:
        ConfigError: `checkpoint_dir` is something else than a checkpoint.
        UnsupportedError: a state that is neither a tensor nor what JSON can say.
        OSError: a file cannot be written. Every rank raises what one of them does.
    """
    target = Path(checkpoint_dir)
    partial = target.with_name(target.name + ".partial")
    with raised_by_all():
        state = {**_entries(model.state_dict()), **_optimizer_state(model, optimizer)}
        if dist.get_rank() == 0:
            _make_room(target, partial)
    save(state, storage_writer=FileSystemWriter(partial))
    with raised_by_all():
        mine = _list_files(partial)
    files: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(files, mine)
    with raised_by_all():
        if dist.get_rank() == 0:
            _write_manifest(partial, files)
            _replace(target, partial)


def _make_room(target: Path, partial: Path) -> None:
    """Make the directory to write to.

    Raises:
        ConfigError: what is to be replaced is no checkpoint, but may hold some.
    """
    is_used = any(target.iterdir()) if target.is_dir() else target.exists()
    if is_used and not _is_whole(target):
        msg = (
            f"{str(target)!r} must be a checkpoint, empty or new, got something else, which would be "
            f"lost; pass another directory, or remove it"
        )
        raise ConfigError(msg)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _replace(target: Path, partial: Path) -> None:
    """Let a whole directory take the place of the previous one.

    What bears the name `.old` may be the only checkpoint, until a whole one has the target's.
    """
    old = _old(target)
    if _is_whole(target):
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _old(target: Path) -> Path:
    """Return the name of the previous checkpoint while another takes its place."""
    return target.with_name(target.name + ".old")


def _is_whole(directory: Path) -> bool:
    return (directory / MANIFEST).is_file() and (directory / METADATA).is_file()


def _list_files(directory: Path) -> dict[str, Any]:
    """Return the size and checksum of every file that this rank wrote.

    Why the checksum in hexadecimal: what ranks exchange must have the same size whatever its value.
    """
    rank = dist.get_rank()
    return {
        path.name: (path.stat().st_size, f"{checksum(path):08x}")
        for path in sorted(directory.iterdir())
        if path.name.startswith(f"__{rank}_") or (rank == 0 and path.name == METADATA)
    }


def _write_manifest(directory: Path, parts: list[dict[str, Any]]) -> None:
    """Write what the ranks listed."""
    files = {
        name: [nbytes, int(digits, 16)] for part in parts for name, (nbytes, digits) in part.items()
    }
    text = json.dumps({"format": FORMAT, "files": files}, indent=1, sort_keys=True)
    (directory / MANIFEST).write_text(text)


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file, as the manifest has it."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(_READ_NBYTES):
            value = zlib.crc32(block, value)
    return value


# --- load ------------------------------------------------------------------------------------------


def load_checkpoint(
    model: nn.Module,
    optimizer: Optimizer,
    checkpoint_dir: str | Path,
    *,
    sync_model_weights: bool = True,
) -> None:
    """Load model and optimizer in place.

    Everything is checked and read before anything is written: while it is read, this rank's rows of
    the main weights exist twice.

    Args:
        model: sharded in any way; its names and shapes must be those of the saved one.
        optimizer: of the same class and the same parameters; its groups may be split otherwise.
        checkpoint_dir: what `save_checkpoint` wrote.
        sync_model_weights: have compute weights follow the loaded main weights at the next gather.

    Ordering:
        Collective on the default process group; the host waits.

    Raises:
        ConfigError: no checkpoint there, a damaged file, an entry that is missing, left over or of
            another shape or dtype, or an optimizer that does not fit. Every rank raises what one of
            them does.
        CheckpointException: a file cannot be read, on every rank.
    """
    with raised_by_all():
        directory = _find(Path(checkpoint_dir))
        _check_files(directory)
    with raised_by_all():
        reader = _PlainReader(directory)
        metadata = reader.read_metadata()
        state = model.state_dict()
        keys = _check_model(state, metadata, directory)
        texts = {key: _buffer_of(metadata, key) for key in (_CLASS, _OPTIONS, _VALUES)}
    load(texts, storage_reader=reader)
    with raised_by_all():
        name, options, values = map(_decode, texts.values())
        new_options = _fit_options(model, optimizer, name, options)
        optimizer_state = _targets(model, optimizer, metadata)
        read = {key: _target_of(name, state[name], metadata, key) for name, key in keys.items()}
    load({**read, **optimizer_state}, storage_reader=reader)
    for name, key in keys.items():
        _set_entry(model, name, state[name], key, read.pop(key))
    _set_state(model, optimizer, optimizer_state, values)
    for param_group, new in zip(optimizer.param_groups, new_options, strict=True):
        _set_options(param_group, new)
    if sync_model_weights:
        for group in _groups(model):
            group.mark_written()


def _find(target: Path) -> Path:
    """Return the directory to load: the previous one, if a save died while it took its place."""
    for directory in (target, _old(target)):
        if _is_whole(directory):
            return directory
    msg = (
        f"{str(target)!r} must hold a whole checkpoint, got no {MANIFEST} or no {METADATA} in it; "
        f"pass a directory that save_checkpoint wrote"
    )
    raise ConfigError(msg)


def _check_files(directory: Path) -> None:
    """Check every file against the manifest; ranks share the reading.

    Raises:
        ConfigError: a file is missing, truncated or changed.
    """
    problem = _file_problem(directory)
    if problem is not None:
        msg = (
            f"the checkpoint in {str(directory)!r} must be whole, got {problem}; load another one; "
            f"nothing was loaded"
        )
        raise ConfigError(msg)


def _file_problem(directory: Path) -> str | None:
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        files = dict(manifest["files"])
        version = manifest["format"]
    except (ValueError, KeyError, TypeError):
        return f"a {MANIFEST} that cannot be read"
    if version != FORMAT:
        return f"format {version}, where this version reads {FORMAT}"
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for number, (name, (nbytes, saved)) in enumerate(sorted(files.items())):
        path = directory / name
        if not path.is_file():
            return f"no file {name!r}"
        if path.stat().st_size != nbytes:
            return f"{path.stat().st_size} bytes in {name!r} instead of {nbytes}"
        if number % world_size == rank and checksum(path) != saved:
            return f"other contents in {name!r} than were saved"
    return None


class _PlainReader(FileSystemReader):
    """Reads checkpoints without running anything that their files say."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Return the metadata.

        Raises:
            ConfigError: the file holds something else than metadata.
        """
        path = Path(self.path) / METADATA
        try:
            with path.open("rb") as file:
                metadata = _PlainUnpickler(file).load()
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


def _member_of_enum(cls: object, name: str) -> Enum:
    """Stand in for `getattr`, by which some releases of Python 3.11 pickle the members of an enum."""
    if isinstance(cls, EnumMeta) and name in cls.__members__:
        member: Enum = cls[name]
        return member
    msg = f"{name!r} of {cls!r} is no part of checkpoint metadata"
    raise pickle.UnpicklingError(msg)


class _PlainUnpickler(pickle.Unpickler):
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


def _check_model(state: dict[str, Any], metadata: Metadata, directory: Path) -> dict[str, str]:
    """Return the key under which each entry of the model was saved.

    Raises:
        ConfigError: an entry is missing, left over, or of another shape or dtype.
    """
    saved = {
        key.removeprefix(prefix): key
        for key in metadata.state_dict_metadata
        for prefix in (_MODEL, _EXTRA)
        if key.startswith(prefix)
    }
    missing = [name for name, value in state.items() if name not in saved and not _is_empty(value)]
    extra = [name for name in saved if name not in state]
    for problem, names in (("lacks", missing), ("has, but the model lacks,", extra)):
        if names:
            listed = ", ".join(map(repr, names[:NAMES_MAX]))
            msg = (
                f"the checkpoint in {str(directory)!r} must have the model's entries, got one that "
                f"{problem} {len(names)}: {listed}; build the model that was saved; nothing was loaded"
            )
            raise ConfigError(msg, fqn=names[0])
    keys = {name: saved[name] for name in state if name in saved}
    for name, key in keys.items():
        if not is_extra_state(name):
            _check_entry(name, state[name], metadata.state_dict_metadata[key], directory)
    return keys


def _check_entry(
    name: str,
    value: Tensor,
    saved: TensorStorageMetadata | BytesStorageMetadata,
    directory: Path,
) -> None:
    got = tuple(saved.size) if isinstance(saved, TensorStorageMetadata) else None
    if got != tuple(value.shape):
        msg = (
            f"{name!r} in the checkpoint in {str(directory)!r} must have shape {tuple(value.shape)}, "
            f"got {got}; build the model that was saved; nothing was loaded"
        )
        raise ConfigError(msg, fqn=name)
    assert isinstance(saved, TensorStorageMetadata)
    if saved.properties.dtype != value.dtype:
        msg = (
            f"{name!r} in the checkpoint in {str(directory)!r} must have dtype {value.dtype}, got "
            f"{saved.properties.dtype}; load it into a model of that dtype (main_params_dtype of "
            f"MixedPrecisionPolicy), whose full_state_dict may be loaded into any; nothing was loaded"
        )
        raise ConfigError(msg, fqn=name)


def _target_of(name: str, value: Any, metadata: Metadata, key: str) -> Tensor:
    """Return a tensor that takes a saved entry, and shares no storage with the model."""
    return _buffer_of(metadata, key) if is_extra_state(name) else value.clone()


def _set_entry(model: nn.Module, name: str, value: Any, key: str, read: Tensor) -> None:
    """Put what was read in its place."""
    if is_extra_state(name):
        _set_extra(model, name, _decode(read) if key.startswith(_EXTRA) else read)
    elif isinstance(value, DTensor) and isinstance(read, DTensor):
        local_tensor(value).copy_(local_tensor(read))
    else:
        value.copy_(read)


def _set_extra(model: nn.Module, name: str, value: Any) -> None:
    """Hand a module what its `get_extra_state` gave."""
    model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)


# --- what is saved ---------------------------------------------------------------------------------


def _entries(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return a state dict as tensors: states of modules that are none, as JSON.

    Tensors without elements are left out: PyTorch saves shards, and they have none.
    """
    return {
        _MODEL + name if isinstance(value, Tensor) else _EXTRA + name: _as_tensor(name, value)
        for name, value in state.items()
        if not _is_empty(value)
    }


def _is_empty(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.numel()


def _as_tensor(name: str, value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else _encode(name, value)


def _encode(name: str, value: Any) -> Tensor:
    """Write a value as JSON, as a tensor of bytes."""
    try:
        text = json.dumps(value, sort_keys=True)
    except (TypeError, ValueError) as error:
        msg = (
            f"{name!r} must be a tensor or what JSON can say, got {value!r}; turn it into one of "
            f"these, or leave it out"
        )
        raise UnsupportedError(msg, fqn=name) from error
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _decode(tensor: Tensor) -> Any:
    return json.loads(bytes(tensor.tolist()).decode())


def _buffer_of(metadata: Metadata, key: str) -> Tensor:
    """Return an empty tensor that takes a saved value."""
    saved = metadata.state_dict_metadata.get(key)
    if not isinstance(saved, TensorStorageMetadata):
        msg = (
            f"the checkpoint must have {key!r}, got none; pass a directory that save_checkpoint "
            f"wrote; nothing was loaded"
        )
        raise ConfigError(msg)
    return torch.empty(saved.size, dtype=saved.properties.dtype)


def _optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's tensors by name and key, and all else as two JSON texts."""
    names = _names(model)
    state: dict[str, Any] = {}
    values: dict[str, dict[str, Any]] = {}
    for name, parameter in _held(optimizer, names):
        if not parameter.numel():
            continue  # as in `_entries`; the optimizer makes such a state anew
        describe_state(parameter, optimizer.state.get(parameter, {}))
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                state[f"optimizer.state.{name}.{key}"] = value
            else:
                values.setdefault(name, {})[key] = value
    options = {
        names[parameter]: _options_of(group)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter in names
    }
    texts = {_CLASS: type(optimizer).__name__, _OPTIONS: options, _VALUES: values}
    return {**state, **{key: _encode(key, value) for key, value in texts.items()}}


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    options = {key: value for key, value in group.items() if key != "params"}
    return {
        key: value.item() if isinstance(value, Tensor) else value for key, value in options.items()
    }


def _names(model: nn.Module) -> dict[Tensor, str]:
    """Return the first name of each parameter."""
    _require_sharded(model)
    return {parameter: name for name, parameter in model.named_parameters()}


def _require_sharded(model: nn.Module) -> None:
    for unit in _units(model):
        unit.require_sharded("a checkpoint")


def _held(optimizer: Optimizer, names: dict[Tensor, str]) -> Iterator[tuple[str, nn.Parameter]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                msg = (
                    f"the optimizer must hold parameters of the model, got one of shape "
                    f"{tuple(parameter.shape)} that is none; pass the model and the "
                    f"optimizer that belong together"
                )
                raise ConfigError(msg)
            yield names[parameter], parameter


def _targets(model: nn.Module, optimizer: Optimizer, metadata: Metadata) -> dict[str, Tensor]:
    """Return tensors that take the saved state of each parameter: sharded as it, or whole."""
    targets: dict[str, Tensor] = {}
    known = list(metadata.state_dict_metadata.items())
    for name, parameter in _held(optimizer, _names(model)):
        prefix = f"optimizer.state.{name}."
        for key, saved in known:
            short = key.removeprefix(prefix)
            if not key.startswith(prefix) or "." in short:
                continue
            assert isinstance(saved, TensorStorageMetadata)
            targets[key] = _target(parameter, saved)
    return targets


def _target(parameter: nn.Parameter, saved: TensorStorageMetadata) -> Tensor:
    owner = owner_of(parameter)
    dtype = saved.properties.dtype
    if owner is None or tuple(saved.size) != tuple(parameter.shape):
        return torch.empty(saved.size, dtype=dtype)
    group = living_group(owner)
    index = group.index_of(parameter)
    local = group.main_weight.get_tensor_view(index)
    return group.as_sharded(index, torch.empty_like(local, dtype=dtype))


def _fit_options(
    model: nn.Module, optimizer: Optimizer, name: str, options: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the options that each group is to have.

    Args:
        model: whose parameters the optimizer holds.
        optimizer: to be loaded.
        name: class of the saved one.
        options: saved with each parameter.

    Raises:
        ConfigError: the optimizer is not such a one.
    """
    got = type(optimizer).__name__
    if got != name:
        msg = (
            f"the optimizer must be of the class that was saved, {name}, got {got}; pass one of that "
            f"class; nothing was loaded"
        )
        raise ConfigError(msg)
    names = _names(model)
    held = [fqn for fqn, _ in _held(optimizer, names)]
    more = [fqn for fqn in held if fqn not in options]
    fewer = [fqn for fqn in options if fqn not in held]
    for problem, fqns in (("more", more), ("fewer", fewer)):
        if fqns:
            msg = (
                f"the optimizer must hold the parameters that were saved with it, got {len(fqns)} "
                f"{problem}: {', '.join(map(repr, fqns[:NAMES_MAX]))}; build it with the same "
                f"parameters; nothing was loaded"
            )
            raise ConfigError(msg, fqn=fqns[0])
    return [
        _common_options([names[each] for each in group["params"]], options, position)
        for position, group in enumerate(optimizer.param_groups)
    ]


def _common_options(
    fqns: list[str], options: dict[str, dict[str, Any]], position: int
) -> dict[str, Any]:
    """Return the options that all parameters of a group were saved with.

    Raises:
        ConfigError: there are several.
    """
    common = options[fqns[0]] if fqns else {}
    for fqn in fqns:
        for key in {**common, **options[fqn]}:
            if common.get(key) != options[fqn].get(key):
                msg = (
                    f"parameters of one optimizer group must have been saved with the same options, "
                    f"got another {key!r} for {fqn!r} than for {fqns[0]!r} in "
                    f"param_groups[{position}]; split the group as it was when it was saved; "
                    f"nothing was loaded"
                )
                raise ConfigError(msg, fqn=fqn)
    return common


def _set_state(
    model: nn.Module,
    optimizer: Optimizer,
    state: dict[str, Tensor],
    values: dict[str, dict[str, Any]],
) -> None:
    fresh: dict[Tensor, dict[str, Any]] = {}
    for name, parameter in _held(optimizer, _names(model)):
        prefix = f"optimizer.state.{name}."
        own = {
            key.removeprefix(prefix): value
            for key, value in state.items()
            if key.startswith(prefix) and "." not in key.removeprefix(prefix)
        }
        own.update(values.get(name, {}))
        if own:
            fresh[parameter] = own
    replacement = type(optimizer.state)(optimizer.state.default_factory)
    replacement.update(fresh)
    optimizer.state = replacement


def _set_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    for key, value in options.items():
        current = group.get(key)
        if isinstance(current, Tensor):
            current.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(current, tuple) else value


# --- whole models ----------------------------------------------------------------------------------


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the whole state dict on the CPU of rank 0, and an empty one elsewhere.

    No rank holds more than one unit whole on its device at a time. What a module's
    `get_extra_state` gives is rank 0's.

    Ordering:
        Collective on the meshes of all units; the host of rank 0 waits.
    """
    is_writer = dist.get_rank() == 0
    whole: dict[str, Any] = {}
    state = model.state_dict(keep_vars=True)
    cache: dict[int, Tensor] = {}
    gathered: ParameterGroup | None = None
    for name, value in _by_group(state):
        owner = owner_of(value)
        if not isinstance(value, Tensor):
            if is_writer:
                whole[name] = value
            continue
        if owner is None:
            tensor = value.detach()
        else:
            group = living_group(owner)
            if group is not gathered:
                gathered, buffer = group, group.gather_main_weight()
                cache = {i: buffer.get_tensor_view(i) for i in range(len(group.members))}
            tensor = cache[group.index_of(value)]
        if is_writer:
            whole[name] = tensor.cpu().clone()
    return {name: whole[name] for name in state if name in whole}


def _by_group(state: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the entries with those of one parameter group side by side."""
    groups: dict[Any, list[tuple[str, Any]]] = {}
    for name, value in state.items():
        owner = owner_of(value)
        groups.setdefault(owner and owner.group, []).append((name, value))
    return [entry for entries in groups.values() for entry in entries]


def load_full_state_dict(model: nn.Module, state_dict: dict[str, Any] | None) -> None:
    """Load a whole state dict that rank 0 alone holds; others get their rows of one at a time.

    Values are converted to the dtypes of the model, as `load_state_dict` does.

    Args:
        model: sharded.
        state_dict: on rank 0, every entry of the model; ignored elsewhere.

    Ordering:
        Collective on the default process group.

    Raises:
        ConfigError: on every rank: an entry is missing, left over, no whole tensor or of another
            shape.
    """
    with raised_by_all():
        state = model.state_dict(keep_vars=True)
        if dist.get_rank() == 0:
            _check_full(state, state_dict or {})
    with torch.no_grad():
        for name, value in state.items():
            source = state_dict[name] if dist.get_rank() == 0 and state_dict else None
            if is_extra_state(name):
                _load_extra(model, name, source)
            else:
                _load_entry(value, source)


def _check_full(state: dict[str, Tensor], full: dict[str, Any]) -> None:
    problem = _full_problem(state, full)
    if problem is not None:
        msg = (
            f"a full state dict must have the model's entries, got {problem}; pass what "
            f"full_state_dict returned for such a model; nothing was loaded"
        )
        raise ConfigError(msg)


def _full_problem(state: dict[str, Tensor], full: dict[str, Any]) -> str | None:
    missing = [name for name in state if name not in full]
    extra = [name for name in full if name not in state]
    if missing:
        return f"none for {', '.join(map(repr, missing[:NAMES_MAX]))}"
    if extra:
        return f"more: {', '.join(map(repr, extra[:NAMES_MAX]))}"
    for name, value in state.items():
        if is_extra_state(name):
            continue
        whole = full[name]
        if not isinstance(whole, Tensor) or isinstance(whole, DTensor):
            return f"{type(whole).__name__} for {name!r} instead of a whole tensor"
        if whole.is_meta or whole.layout != torch.strided:
            return f"layout {whole.layout} on {whole.device} for {name!r} instead of dense values"
        if tuple(whole.shape) != tuple(value.shape):
            return f"shape {tuple(whole.shape)} for {name!r} instead of {tuple(value.shape)}"
    return None


def _load_extra(model: nn.Module, name: str, source: Any) -> None:
    values = [source]
    dist.broadcast_object_list(values, src=0)
    _set_extra(model, name, values[0])


def _load_entry(value: Tensor, source: Tensor | None) -> None:
    device = value.device
    whole = torch.empty(value.shape, dtype=value.dtype, device=device)
    if source is not None:
        whole.copy_(source)
    dist.broadcast(whole, src=0)
    owner = owner_of(value)
    if owner is None:
        value.copy_(whole)
        return
    group = living_group(owner)
    group.main_weight.copy_from(group.index_of(value), whole)
    group.mark_written()


def export_safetensors(model: nn.Module, path: str | Path) -> None:
    """Write the whole model as one safetensors file on rank 0; tied names get their own copy.

    Raises:
        ConfigError: the package `safetensors` is not installed.
        UnsupportedError: a module's `get_extra_state` gives something else than a tensor.
    """
    with raised_by_all():
        try:
            from safetensors.torch import save_file
        except ImportError as error:
            msg = (
                "export_safetensors needs the package safetensors, got an environment without it; "
                "install fsdp-sim[safetensors]"
            )
            raise ConfigError(msg) from error
    state = full_state_dict(model)
    with raised_by_all():
        if dist.get_rank() == 0:
            _check_tensors(state)
            partial = Path(path).with_name(Path(path).name + ".partial")
            save_file({name: value.contiguous() for name, value in state.items()}, partial)
            partial.replace(path)


def _check_tensors(state: dict[str, Any]) -> None:
    for name, value in state.items():
        if not isinstance(value, Tensor):
            msg = (
                f"a safetensors file holds tensors alone, got a {type(value).__name__} for {name!r}; "
                f"use full_state_dict, or give the module a state of tensors"
            )
            raise UnsupportedError(msg, fqn=name)


def _units(model: nn.Module) -> list[ShardedUnit]:
    units = [each.fsdp_unit for each in model.modules() if isinstance(each, FsdpModule)]
    return list(dict.fromkeys(units))


def _groups(model: nn.Module) -> list[ParameterGroup]:
    return [group for unit in _units(model) for group in unit.groups]
