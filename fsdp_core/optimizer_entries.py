"""The entries of an optimizer in a checkpoint: its state by name of parameter, its options as JSON."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from fsdp_core.checkpoint_files import not_whole
from fsdp_core.checkpoint_reader import PlainReader
from fsdp_core.errors import ConfigError
from fsdp_core.json_tensors import decode, encode
from fsdp_core.model_entries import listed
from fsdp_core.parameter_group import describe_state, living_group, owner_of, parameters_held

_CLASS = "optimizer.class"
_OPTIONS = "optimizer.options"
_VALUES = "optimizer.values"
_TENSORS = "optimizer.tensors"
TEXTS = (_CLASS, _OPTIONS, _VALUES, _TENSORS)
"""Names of what is stored as JSON."""

_STATE = "optimizer.state."

Description = list[str | int]
"""Dtype and shape of a tensor."""


@dataclass(frozen=True)
class SavedOptimizer:
    """What a checkpoint says of an optimizer, its tensors apart.

    Attributes:
        name: of its class.
        options: of its groups, by name of parameter.
        values: of its state, those that are no tensors, by name of parameter and key.
        tensors: of its state, what each was, by name of parameter and key.
    """

    name: str
    options: dict[str, dict[str, Any]]
    values: dict[str, dict[str, Any]]
    tensors: dict[str, dict[str, Description]]


def _key(name: str, key: str) -> str:
    """Return the name under which a tensor of a parameter's state is saved."""
    return f"{_STATE}{name}.{key}"


# --- saved -----------------------------------------------------------------------------------------


def optimizer_entries(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's tensors by name and key, and all else as JSON."""
    names = _names(model)
    state: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    tensors: dict[str, dict[str, Description]] = {}
    for name, parameter in _held(optimizer, names):
        if not parameter.numel():
            continue  # as in `model_entries`; the optimizer makes such a state anew
        describe_state(parameter, optimizer.state.get(parameter, {}))
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                state[_key(name, key)] = value
                tensors.setdefault(name, {})[key] = _describe(value.dtype, value.shape)
            else:
                values.setdefault(name, {})[key] = value
    options = {
        names[parameter]: _options_of(group)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    said = (type(optimizer).__name__, options, values, tensors)
    return {**state, **{key: encode(key, value) for key, value in zip(TEXTS, said, strict=True)}}


def _describe(dtype: torch.dtype, shape: torch.Size) -> Description:
    return [str(dtype), *shape]


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    options = {key: value for key, value in group.items() if key != "params"}
    return {
        key: value.item() if isinstance(value, Tensor) else value for key, value in options.items()
    }


# --- loaded ----------------------------------------------------------------------------------------


def saved_optimizer(texts: dict[str, Tensor]) -> SavedOptimizer:
    """Return what the JSON of a checkpoint says.

    Raises:
        ConfigError: it is no JSON.
    """
    return SavedOptimizer(*(decode(key, texts[key]) for key in TEXTS))


def fit_options(
    model: nn.Module, optimizer: Optimizer, saved: SavedOptimizer
) -> list[dict[str, Any]]:
    """Return the options that each group is to have.

    Raises:
        ConfigError: the optimizer is not such a one.
    """
    got, options = type(optimizer).__name__, saved.options
    if got != saved.name:
        msg = (
            f"the optimizer must be of the class that was saved, {saved.name}, got {got}; pass one of "
            f"that class; nothing was loaded"
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
                f"{problem}: {listed(fqns)}; build it with the same parameters; nothing was loaded"
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


def optimizer_targets(
    model: nn.Module, optimizer: Optimizer, saved: SavedOptimizer, reader: PlainReader
) -> dict[str, Tensor]:
    """Return tensors that take the saved state of each parameter: sharded as it, or whole.

    Raises:
        ConfigError: an entry is missing, left over, or of another shape or dtype than was saved.
    """
    entries = reader.metadata.state_dict_metadata
    targets: dict[str, Tensor] = {}
    for name, parameter in _held(optimizer, _names(model)):
        for key, expected in saved.tensors.get(name, {}).items():
            entry = entries.get(_key(name, key))
            if not isinstance(entry, TensorStorageMetadata):
                raise not_whole(reader.directory, f"no tensor {_key(name, key)!r}")
            got = _describe(entry.properties.dtype, entry.size)
            if got != expected:
                problem = f"{got} for {_key(name, key)!r} instead of {expected}"
                raise not_whole(reader.directory, problem)
            device = _device_of(key, parameter, saved.options[name])
            targets[_key(name, key)] = _target(parameter, entry, device)
    extra = [key for key in entries if key.startswith(_STATE) and key not in targets]
    if extra:
        raise not_whole(
            reader.directory, f"{len(extra)} entries that nobody saved: {listed(extra)}"
        )
    return targets


def _device_of(key: str, parameter: Tensor, options: dict[str, Any]) -> torch.device:
    """Return where a tensor of a parameter's state has to be.

    Source: torch.optim.Optimizer.load_state_dict, torch 2.13, which keeps counters of steps on the
    CPU unless they are used on the device.
    """
    is_used_there = options.get("fused") or options.get("capturable")
    return torch.device("cpu") if key == "step" and not is_used_there else parameter.device


def _target(parameter: nn.Parameter, saved: TensorStorageMetadata, device: torch.device) -> Tensor:
    owner = owner_of(parameter)
    dtype = saved.properties.dtype
    if owner is None or saved.size != parameter.shape:
        return torch.empty(saved.size, dtype=dtype, device=device)
    group = living_group(owner)
    index = group.index_of(parameter)
    local = group.main_weight.get_tensor_view(index)
    return group.as_sharded(index, torch.empty_like(local, dtype=dtype))


def set_state(
    model: nn.Module, optimizer: Optimizer, saved: SavedOptimizer, read: dict[str, Tensor]
) -> None:
    """Give the optimizer the state that was read, in place of its own."""
    fresh: dict[Tensor, dict[str, Any]] = {}
    for name, parameter in _held(optimizer, _names(model)):
        tensors = {key: read[_key(name, key)] for key in saved.tensors.get(name, {})}
        own = {**tensors, **saved.values.get(name, {})}
        if own:
            fresh[parameter] = own
    replacement = type(optimizer.state)(optimizer.state.default_factory)
    replacement.update(fresh)
    optimizer.state = replacement


def set_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    """Give a group the options that it is to have."""
    for key, value in options.items():
        current = group.get(key)
        if isinstance(current, Tensor):
            current.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(current, tuple) else value


# --- both ------------------------------------------------------------------------------------------


def _names(model: nn.Module) -> dict[Tensor, str]:
    """Return the first name of each parameter."""
    return {parameter: name for name, parameter in model.named_parameters()}


def _held(optimizer: Optimizer, names: dict[Tensor, str]) -> Iterator[tuple[str, nn.Parameter]]:
    for parameter in parameters_held(optimizer):
        if parameter not in names:
            msg = (
                f"the optimizer must hold parameters of the model, got one of shape "
                f"{tuple(parameter.shape)} that is none; pass the model and the optimizer that belong "
                f"together"
            )
            raise ConfigError(msg)
        yield names[parameter], parameter
