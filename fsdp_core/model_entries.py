"""The entries of a model in a checkpoint: which there must be, and what is done with one."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from fsdp_core.checkpoint_reader import PlainReader
from fsdp_core.errors import ConfigError
from fsdp_core.json_tensors import decode, encode
from fsdp_core.torch_private import is_extra_state, local_tensor

_NAMES_MAX = 4

# What comes before the name of an entry: a tensor, or what is stored as JSON.
_MODEL = "model."
_EXTRA = "extra."


def model_entries(state: dict[str, Any]) -> dict[str, Tensor]:
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
    return value if isinstance(value, Tensor) else encode(name, value)


def check_model(state: dict[str, Any], reader: PlainReader) -> dict[str, str]:
    """Return the key under which each entry of the model was saved.

    Raises:
        ConfigError: an entry is missing, left over, or of another shape or dtype.
    """
    saved = {
        key.removeprefix(prefix): key
        for key in reader.metadata.state_dict_metadata
        for prefix in (_MODEL, _EXTRA)
        if key.startswith(prefix)
    }
    missing = [name for name, value in state.items() if name not in saved and not _is_empty(value)]
    extra = [name for name in saved if name not in state]
    for problem, names in (("lacks", missing), ("has, but the model lacks,", extra)):
        if names:
            msg = (
                f"the checkpoint in {str(reader.directory)!r} must have the model's entries, got one "
                f"that {problem} {len(names)}: {listed(names)}; build the model that was saved; nothing was loaded"
            )
            raise ConfigError(msg, fqn=names[0])
    keys = {name: saved[name] for name in state if name in saved}
    for name, key in keys.items():
        if not is_extra_state(name):
            _check_entry(name, state[name], key, reader)
    return keys


def listed(names: Sequence[str]) -> str:
    """Return as many names as one message repeats."""
    return ", ".join(map(repr, names[:_NAMES_MAX]))


def _check_entry(name: str, value: Tensor, key: str, reader: PlainReader) -> None:
    saved = reader.metadata.state_dict_metadata[key]
    got = tuple(saved.size) if isinstance(saved, TensorStorageMetadata) else None
    if got != tuple(value.shape):
        msg = (
            f"{name!r} in the checkpoint in {str(reader.directory)!r} must have shape "
            f"{tuple(value.shape)}, got {got}; build the model that was saved; nothing was loaded"
        )
        raise ConfigError(msg, fqn=name)
    assert isinstance(saved, TensorStorageMetadata)
    if saved.properties.dtype != value.dtype:
        msg = (
            f"{name!r} in the checkpoint in {str(reader.directory)!r} must have dtype {value.dtype}, "
            f"got {saved.properties.dtype}; load it into a model of that dtype (main_params_dtype of "
            f"MixedPrecisionPolicy), whose full_state_dict may be loaded into any; nothing was loaded"
        )
        raise ConfigError(msg, fqn=name)


def model_target(name: str, value: Any, key: str, reader: PlainReader) -> Tensor:
    """Return a tensor that takes a saved entry, and shares no storage with the model."""
    if not is_extra_state(name):
        target: Tensor = value.clone()
        return target
    return reader.target_of(key, value.device if isinstance(value, Tensor) else "cpu")


def decode_entry(key: str, read: Tensor) -> Any:
    """Return what an entry says that was read: a tensor, or what its JSON says.

    Raises:
        ConfigError: there is no JSON in it.
    """
    return decode(key, read) if key.startswith(_EXTRA) else read


def set_entry(model: nn.Module, name: str, value: Any, read: Any) -> None:
    """Put what was read in its place."""
    if is_extra_state(name):
        set_extra(model, name, read)
    elif isinstance(value, DTensor) and isinstance(read, DTensor):
        local_tensor(value).copy_(local_tensor(read))
    else:
        value.copy_(read)


def set_extra(model: nn.Module, name: str, value: Any) -> None:
    """Hand a module what its `get_extra_state` gave."""
    model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
