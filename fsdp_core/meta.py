"""Parameters on the meta device: made real and initialised, each module once, before sharding.

Order: a unit is initialised whole on every rank, with the shapes that its modules were written for,
and sharded then. So a seed gives the numbers that it gives without the meta device, and ranks must
start from the same seed. No more than one unit is whole at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_core.errors import ConfigError
from fsdp_core.torch_private import buffers_of, forget_weak_references, parameters_of

Reset = Callable[[], Any]


def own_modules(modules: Sequence[nn.Module], *, inner_first: bool = False) -> dict[nn.Module, str]:
    """Return the modules of a unit and those below that are part of no unit yet.

    Returns:
        Each module once, with its name relative to the unit's module that it was found in; outer
        ones before those in them, as PyTorch's own walk, or the other way round.
    """
    found: dict[nn.Module, str] = {}
    visited: dict[nn.Module, None] = {}
    for module in modules:
        _visit(module, "", found, visited, inner_first)
    return found


def _visit(
    module: nn.Module,
    prefix: str,
    found: dict[nn.Module, str],
    visited: dict[nn.Module, None],
    inner_first: bool,  # noqa: FBT001
) -> None:
    """Add a module and those below it to `found`.

    Why not inside its caller: a function that calls itself through its own scope is a cycle, which
    would keep the modules alive until a garbage collection.
    """
    if module in visited:
        return
    visited[module] = None
    if not inner_first:
        found[module] = prefix
    for name, child in module.named_children():
        if "fsdp_unit" not in vars(child):
            _visit(child, f"{prefix}.{name}" if prefix else name, found, visited, inner_first)
    if inner_first:
        found[module] = prefix


@contextmanager
def real_parameters(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Make what a unit has on the meta device real, and call each such module's own reset.

    Inner modules come first, so that a module's reset may go over what those below it did. What a
    `ParameterList` or `ParameterDict` holds is initialised by the module that it is in. If the body
    raises, everything is on the meta device again.

    Raises:
        ConfigError: a module without `reset_parameters` has something on the meta device.
    """
    own = own_modules(modules, inner_first=True)
    unreal = [module for module in own if _meta_names(module)]
    resets = _resets_of(unreal, own)
    undo: list[Callable[[], None]] = []
    try:
        for module in unreal:
            _make_real(module, device, undo)
        for reset in resets:
            with torch.no_grad():
                reset()
        yield
    except BaseException:
        for each in reversed(undo):
            each()
        raise


def _meta_names(module: nn.Module) -> list[str]:
    """Return the names of a module's own parameters and buffers on the meta device."""
    held = {**parameters_of(module), **buffers_of(module)}
    return [name for name, tensor in held.items() if tensor is not None and tensor.is_meta]


def _resets_of(unreal: Sequence[nn.Module], own: dict[nn.Module, str]) -> list[Reset]:
    """Return what initialises these modules of a unit, each once, inner ones first.

    Raises:
        ConfigError: nothing initialises one of them.
    """
    holders = {child: module for module in own for child in module.children()}
    found: dict[nn.Module, Reset] = {}
    for module in unreal:
        is_list = isinstance(module, (nn.ParameterList, nn.ParameterDict))
        holder = holders.get(module, module) if is_list else module
        reset = _reset_of(holder)
        if reset is None:
            raise _without_reset(module, own[module])
        found[holder] = reset
    return [found[module] for module in own if module in found]


def _reset_of(module: nn.Module) -> Reset | None:
    """Return a module's own reset, under either name that PyTorch's modules use."""
    reset: Reset | None = getattr(module, "reset_parameters", None)
    return reset or getattr(module, "_reset_parameters", None)


def _without_reset(module: nn.Module, prefix: str) -> ConfigError:
    name = _meta_names(module)[0]
    fqn = f"{prefix}.{name}" if prefix else name
    msg = (
        f"parameters on the meta device need a reset_parameters of their module, got {fqn!r} of a "
        f"{type(module).__name__}, which has none; add one, or build it on a real device"
    )
    return ConfigError(msg, fqn=fqn)


def _make_real(module: nn.Module, device: torch.device, undo: list[Callable[[], None]]) -> None:
    forget_weak_references(module)
    for parameter in parameters_of(module).values():
        if parameter is not None and parameter.is_meta:
            meta = torch.empty_like(parameter)
            _swap_in(parameter, torch.empty_like(parameter, device=device))
            undo.append(partial(_swap_in, parameter, meta))
    buffers = buffers_of(module)
    for name, buffer in tuple(buffers.items()):
        if buffer is not None and buffer.is_meta:
            buffers[name] = torch.empty_like(buffer, device=device)
            undo.append(partial(buffers.__setitem__, name, buffer))


def _swap_in(parameter: nn.Parameter, contents: Tensor) -> None:
    """Give a parameter other contents; it stays the same object, with its attributes.

    Why not `.data`: a tensor on the meta device takes no data of another kind.
    """
    attributes = dict(vars(parameter))
    other = nn.Parameter(contents, requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, other)
    vars(parameter).update(attributes)
