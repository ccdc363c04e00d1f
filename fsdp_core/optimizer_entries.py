"""The entries of an optimizer in a checkpoint: its state by name of parameter, its options as JSON."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from fsdp_core.errors import ConfigError
from fsdp_core.json_tensors import encode
from fsdp_core.model_entries import NAMES_MAX
from fsdp_core.module import units_in
from fsdp_core.parameter_group import describe_state, living_group, owner_of

CLASS = "optimizer.class"
OPTIONS = "optimizer.options"
VALUES = "optimizer.values"


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
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
    texts = {CLASS: type(optimizer).__name__, OPTIONS: options, VALUES: values}
    return {**state, **{key: encode(key, value) for key, value in texts.items()}}


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    options = {key: value for key, value in group.items() if key != "params"}
    return {
        key: value.item() if isinstance(value, Tensor) else value for key, value in options.items()
    }


def fit_options(
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


def targets_of(model: nn.Module, optimizer: Optimizer, metadata: Metadata) -> dict[str, Tensor]:
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


def set_state(
    model: nn.Module,
    optimizer: Optimizer,
    state: dict[str, Tensor],
    values: dict[str, dict[str, Any]],
) -> None:
    """Give the optimizer the state that was read, in place of its own."""
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


def set_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    """Give a group the options that it is to have."""
    for key, value in options.items():
        current = group.get(key)
        if isinstance(current, Tensor):
            current.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(current, tuple) else value


def _names(model: nn.Module) -> dict[Tensor, str]:
    """Return the first name of each parameter."""
    _require_sharded(model)
    return {parameter: name for name, parameter in model.named_parameters()}


def _require_sharded(model: nn.Module) -> None:
    for unit in units_in(model):
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
