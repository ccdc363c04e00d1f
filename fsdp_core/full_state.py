"""A whole model on rank 0: full state dicts, in and out, and safetensors."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_core.agreement import raised_by_all
from fsdp_core.errors import ConfigError, UnsupportedError
from fsdp_core.model_entries import listed, set_extra
from fsdp_core.module import require_whole_model
from fsdp_core.parameter_group import ParameterGroup, living_group, owner_of
from fsdp_core.torch_private import is_extra_state


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the whole state dict on the CPU of rank 0, and an empty one elsewhere.

    No rank holds more than one parameter group whole on its device at a time. What a module's
    `get_extra_state` gives is rank 0's.

    Ordering:
        Collective on the default process group; the host waits.

    Raises:
        UnsupportedError: on every rank: a unit is on some ranks only.
    """
    with raised_by_all():
        require_whole_model(model, "a full state dict")
    state = model.state_dict(keep_vars=True)
    groups: dict[ParameterGroup | None, dict[str, Any]] = {}
    for name, value in state.items():
        owner = owner_of(value)
        group = None if owner is None else living_group(owner)
        groups.setdefault(group, {})[name] = value
    whole: dict[str, Any] = {}
    for group, entries in groups.items():
        whole.update(_copies_of(entries, group))
    return {name: whole[name] for name in state if name in whole}


def _copies_of(entries: dict[str, Any], group: ParameterGroup | None) -> dict[str, Any]:
    """Return copies of whole entries on rank 0; what was gathered for them is freed on return."""
    gathered = None if group is None else group.gather_main_weight()
    if dist.get_rank() != 0:
        return {}
    copies: dict[str, Any] = {}
    for name, value in entries.items():
        if group is not None and gathered is not None:
            value = gathered.get_tensor_view(group.index_of(value))
        is_tensor = isinstance(value, Tensor)
        copies[name] = value.detach().to("cpu", copy=True) if is_tensor else value
    return copies


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
        UnsupportedError: a unit is on some ranks only.
    """
    with raised_by_all():
        require_whole_model(model, "a full state dict")
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
        return f"none for {listed(missing)}"
    if extra:
        return f"more: {listed(extra)}"
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
    set_extra(model, name, values[0])


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
        UnsupportedError: a module's `get_extra_state` gives something else than a tensor, or a unit
            is on some ranks only.
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
