"""fully_shard, fully_shard_context, microbatch: the entry points."""

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_core.agreement import agree_on_owners
from fsdp_core.collectives import MeshAxes
from fsdp_core.context import FsdpContext
from fsdp_core.errors import (
    ConfigError,
    ConfigTypeError,
    StateError,
    UnsupportedError,
    check_type,
)
from fsdp_core.grad_scaling import watch_scalers
from fsdp_core.hooks import guarded_methods, install_hooks
from fsdp_core.meta import own_modules, real_parameters
from fsdp_core.mixed_precision import MixedPrecisionPolicy
from fsdp_core.module import FsdpModule
from fsdp_core.parameter_group import (
    DELAYED_HOOK,
    GroupSpec,
    Member,
    ParameterGroup,
    Slot,
    living_group,
    mark_whole,
    owner_of,
)
from fsdp_core.placement import Placements, TensorAtomic
from fsdp_core.plain_optimizer import watch_optimizers
from fsdp_core.prefetcher import PrefetchOrder
from fsdp_core.runtime_policy import RuntimePolicy
from fsdp_core.schedule_policy import SchedulePolicy
from fsdp_core.torch_private import parameters_of
from fsdp_core.unit import ShardedUnit

# What a sharded module has besides its own attributes.
_ADDED_NAMES = ("context", "phase", "unshard", "reshard", "register_post_backward_hook")

_active: ContextVar[FsdpContext | None] = ContextVar("fsdp_core_context", default=None)

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

# Keywords of earlier versions of this interface, and what says the same now.
_RENAMED = {
    "use_symmetric_memory": "runtime_policy=RuntimePolicy(use_symmetric_memory=...)",
    "unify_communication_stream": "runtime_policy=RuntimePolicy(overlap_allgather_reduction=...), "
    "which is its opposite",
}


@contextmanager
def fully_shard_context(
    device: torch.device | str | None = None,
    runtime_policy: RuntimePolicy | None = None,
    parameter_to_owner: dict[nn.Parameter, int] | None = None,
    prefetch_order: PrefetchOrder = PrefetchOrder.REGISTRATION,
    **renamed: Any,
) -> Iterator[FsdpContext]:
    """Open the scope in which units are built; leaving it makes them ready to run.

    Args:
        device: where units compute; None: the current CUDA device, or CPU where there is none.
        runtime_policy: how streams are used.
        parameter_to_owner: for units with TensorAtomic placement, the rank inside the unit's mesh
            that holds each parameter.
        prefetch_order: where the order of prefetches comes from.
        renamed: refused; says what a keyword of an earlier interface is called now.

    Yields:
        The context that all units built inside share.

    Raises:
        StateError: inside another scope.
        ConfigError: a keyword of an earlier interface.
    """
    for name in renamed:
        if name not in _RENAMED:
            msg = f"fully_shard_context() got an unexpected keyword argument {name!r}"
            raise TypeError(msg)
        msg = f"{name} is said by {_RENAMED[name]} now, got {name}={renamed[name]!r}; use that"
        raise ConfigError(msg)
    if _active.get() is not None:
        msg = (
            "fully_shard_context must not be opened inside another one, got a second one; leave the "
            "first one before"
        )
        raise StateError(msg)
    context = FsdpContext(device, runtime_policy, parameter_to_owner, prefetch_order)
    token = _active.set(context)
    try:
        yield context
    except BaseException:
        context.abandon()
        raise
    else:
        context.finalize()
    finally:
        _active.reset(token)


@contextmanager
def microbatch(context: FsdpContext, is_last: bool) -> Iterator[None]:  # noqa: FBT001
    """Say whether the backward inside is the last of a window of gradient accumulation.

    Needed where gradients keep a partial axis (no-shard, ZeRO-1, HSDP, HFSDP): it is reduced after
    the last microbatch only. The backward must run inside the scope.

    Raises:
        ConfigError: an argument of the wrong type.
        StateError: the context is not finalized, its model is gone, or the scope had a forward whose
            backward is still to come: that one would be taken for a last microbatch or not by mistake.
    """
    check_type("context", context, FsdpContext)
    check_type("is_last", is_last, bool)
    context.ensure_finalized()
    context.ensure_has_model()
    before = context.is_last_microbatch
    context.is_last_microbatch = is_last
    seen = context.begin_microbatch()
    try:
        yield
        context.end_microbatch(seen)
    finally:
        context.is_last_microbatch = before


def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    mesh: DeviceMesh,
    placements: Placements,
    mixed_precision_policy: MixedPrecisionPolicy | None = None,
    grad_divisor: float = 1,
    *,
    schedule_policy: SchedulePolicy | None = None,
) -> None:
    """Make a module (or several, as one unit) sharded, in place.

    Everything is built before anything is swapped: a call that raises leaves the module as it was.

    Args:
        module: its parameters, and those of its submodules that are no units yet, become one
            unit; so units are built from the inside out.
        mesh: the data-parallel mesh.
        placements: where parameters, gradients and optimizer state live on it.
        mixed_precision_policy: the dtypes.
        grad_divisor: divides gradients on top of the mean over the mesh (expert parallelism).
        schedule_policy: prefetch budgets, hooks, expected gradients.

    Raises:
        StateError: outside a `fully_shard_context`.
        ConfigError: a module, mesh or parameter that cannot be sharded so.
    """
    context = _active.get()
    if context is None:
        msg = (
            "fully_shard must be called inside `with fully_shard_context()`, got a call outside; "
            "open one around the calls for all units"
        )
        raise StateError(msg)
    modules = _check_modules(module)
    _check_divisor(grad_divisor)
    for each in modules:
        _check_tree(each, context)
    axes = _check_mesh(mesh, placements, context)
    precision = mixed_precision_policy or MixedPrecisionPolicy()
    check_type("mixed_precision_policy", precision, MixedPrecisionPolicy)
    policy = schedule_policy or SchedulePolicy()
    _check_policy(policy, context)
    members, whole = _collect_members(modules, context)
    _check_blocks(members, placements)
    _check_expectations(members, policy)
    if members and policy.register_hooks:
        _check_forwards(modules)
    classes = [_sharded_class(type(each)) for each in modules]
    spec = GroupSpec(
        axes=axes,
        placements=placements,
        precision=precision,
        grad_divisor=grad_divisor,
        owners=_owners(members, placements, context, axes),
    )
    with real_parameters(modules, context.device):
        groups = [ParameterGroup(each, spec) for each in _group_members(members)]
        for group in groups:
            group.commit()
    for parameter in whole:
        parameter.data = parameter.data.to(context.device)
        mark_whole(parameter)
    unit = ShardedUnit(modules, axes, groups, context, policy)
    for each, cls in zip(modules, classes, strict=True):
        each.__class__ = cls
        assert isinstance(each, FsdpModule)
        each.fsdp_unit = unit
    install_hooks(unit, modules)
    watch_optimizers()
    watch_scalers()
    for each in modules:
        context.register_module(each, unit)


def _check_modules(module: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    candidates: Any = [module] if isinstance(module, nn.Module) else module
    modules: list[nn.Module] = list(candidates) if isinstance(candidates, Iterable) else []
    if not modules or not all(isinstance(each, nn.Module) for each in modules):
        msg = (
            f"fully_shard needs a module or a sequence of modules, got {module!r}; pass at least "
            f"one"
        )
        raise ConfigTypeError(msg)
    for each in modules:
        if isinstance(each, FsdpModule):
            msg = (
                f"a module is sharded once, got a {type(each).__name__} that is a unit already; "
                f"drop the second call"
            )
            raise ConfigError(msg)
        taken = [name for name in _ADDED_NAMES if hasattr(each, name)]
        if taken:
            msg = (
                f"fully_shard adds {', '.join(_ADDED_NAMES)} to a module, got a "
                f"{type(each).__name__} that has {taken[0]!r} already; rename it"
            )
            raise ConfigError(msg)
    return list(dict.fromkeys(modules))


def _check_forwards(modules: Sequence[nn.Module]) -> None:
    """Refuse containers that nobody calls: their parameters would never be gathered."""
    for each in modules:
        if isinstance(each, _CONTAINERS) and type(each).forward is nn.Module.forward:
            msg = (
                f"a unit with parameters needs a forward that gathers them, got a "
                f"{type(each).__name__}, which is never called; shard what is in it, in one call: "
                f"fully_shard([first, second], ...)"
            )
            raise ConfigError(msg)


def _check_policy(policy: SchedulePolicy, context: FsdpContext) -> None:
    check_type("schedule_policy", policy, SchedulePolicy)
    if not policy.register_hooks and context.prefetch_order is PrefetchOrder.RECORDED:
        msg = (
            "PrefetchOrder.RECORDED needs the hooks of every unit, got register_hooks=False; use "
            "REGISTRATION"
        )
        raise ConfigError(msg)


def _check_divisor(grad_divisor: float) -> None:
    is_number = isinstance(grad_divisor, (int, float)) and not isinstance(grad_divisor, bool)
    if not is_number or not math.isfinite(grad_divisor) or grad_divisor <= 0:
        msg = (
            f"grad_divisor must be a finite positive number, got {grad_divisor!r}; pass 1 to divide "
            f"by the mesh's size alone"
        )
        raise ConfigError(msg)


def _check_tree(module: nn.Module, context: FsdpContext) -> None:
    for name, child in module.named_modules():
        if isinstance(child, FsdpModule) and child.context is not context:
            msg = (
                f"all units below a unit must be of its context, got {name!r} of another one; "
                f"shard the whole model inside one `with fully_shard_context()`"
            )
            raise ConfigError(msg, fqn=name)


def _check_mesh(mesh: DeviceMesh, placements: Placements, context: FsdpContext) -> MeshAxes:
    check_type("mesh", mesh, DeviceMesh)
    check_type("placements", placements, Placements)
    if mesh.device_type != context.device.type:
        msg = (
            f"the mesh must be on the context's device type {context.device.type!r}, got "
            f"{mesh.device_type!r}; pass device= to fully_shard_context or build another mesh"
        )
        raise ConfigError(msg)
    placements.check_mesh(mesh.ndim, mesh.mesh_dim_names)
    return MeshAxes.of(mesh)


def _collect_members(
    modules: Sequence[nn.Module], context: FsdpContext
) -> tuple[list[Member], list[nn.Parameter]]:
    """Find every place that holds a parameter, in the modules and below, not inside units.

    Returns:
        The parameters to shard, and those that stay whole.
    """
    members: dict[nn.Parameter, Member] = {}
    whole: dict[nn.Parameter, None] = {}
    for module, prefix in own_modules(modules).items():
        for key, parameter in parameters_of(module).items():
            if parameter is None:
                continue
            name = f"{prefix}.{key}" if prefix else key
            if _stays_whole(parameter):
                whole[parameter] = None
                continue
            _check_parameter(name, parameter, type(modules[0]).__name__, context)
            member = members.setdefault(parameter, Member(parameter, []))
            member.slots.append(Slot(weakref.ref(module), parameters_of(module), key, name))
    return list(members.values()), list(whole)


def _owners(
    members: Sequence[Member], placements: Placements, context: FsdpContext, axes: MeshAxes
) -> dict[nn.Parameter, int] | None:
    """Return the owners of a unit's parameters, checked on all ranks, where tensors stay whole."""
    if not any(isinstance(kind, TensorAtomic) for kind in placements.kinds):
        return None
    said: dict[nn.Parameter, Any] = dict(context.parameter_to_owner or {})
    agree_on_owners([(member.fqn, said.get(member.full)) for member in members], axes)
    return {member.full: said[member.full] for member in members}


def _check_blocks(members: Sequence[Member], placements: Placements) -> None:
    """Check that the rows of each parameter make whole blocks, where these must stay together."""
    block_size = placements.block_size
    for member in members:
        shape = tuple(member.full.shape)
        if shape[0] % block_size:
            msg = (
                f"parameter {member.fqn!r} must have a number of rows divisible by {block_size}, as "
                f"its BlockAtomic placements ask, got shape {shape}; pad it, or use RowAtomic"
            )
            raise ConfigError(msg, fqn=member.fqn)


def _check_expectations(members: Sequence[Member], policy: SchedulePolicy) -> None:
    """Check that the gradients that a unit is to wait for can come."""
    count = policy.grad_accumulation_count
    if count and not any(member.full.requires_grad for member in members):
        msg = (
            f"grad_accumulation_count needs a trainable parameter in the unit, got {count} and none; "
            f"leave it out"
        )
        raise ConfigError(msg)
    for member in members:
        if member.is_delayed and len(member.slots) > 1:
            names = [f"{slot.fqn!r} of a {type(slot.owner()).__name__}" for slot in member.slots]
            msg = (
                f"a parameter with a delayed gradient must have one place, got "
                f"{' and '.join(names)}; untie them, or do not delay"
            )
            raise ConfigError(msg, fqn=member.fqn)
        if member.is_delayed and not hasattr(member.slots[0].owner(), DELAYED_HOOK):
            msg = (
                f"a module with a delayed gradient must have {DELAYED_HOOK}, got a "
                f"{type(member.slots[0].owner()).__name__} without it; add it, or do not delay"
            )
            raise ConfigError(msg, fqn=member.fqn)


def _stays_whole(parameter: nn.Parameter) -> bool:
    """Whether a parameter is kept on every rank as it is: one of integers.

    It is frozen: PyTorch lets no tensor of integers require a gradient.
    """
    return not parameter.dtype.is_floating_point and not parameter.dtype.is_complex


def _check_parameter(
    fqn: str, parameter: nn.Parameter, class_name: str, context: FsdpContext
) -> None:
    owner = owner_of(parameter)
    if owner is not None:
        unit = living_group(owner).unit()
        first = None if unit is None else unit.modules[0]()
        if unit is not None and unit.context is not context:
            remedy = (
                "that unit is of another context; shard the whole model inside one `with "
                "fully_shard_context()`"
            )
        elif isinstance(parameter, DTensor):
            remedy = "shard inner modules before those around them"
        else:
            remedy = (
                "shard the modules that share it in one call: fully_shard([first, second], ...)"
            )
        msg = (
            f"a parameter belongs to one unit, got {fqn!r} of {class_name}, which is {owner.fqn!r} "
            f"of the unit {type(first).__name__} already; {remedy}"
        )
        raise ConfigError(msg, fqn=fqn)
    if isinstance(parameter, nn.UninitializedParameter):
        msg = (
            f"parameter {fqn!r} must have a shape, got an uninitialised one of {class_name}; call the "
            f"lazy module once before fully_shard"
        )
        raise ConfigError(msg, fqn=fqn)
    if parameter.dim() == 0:
        msg = f"parameter {fqn!r} must have at least one dim, got a scalar; reshape it to (1,)"
        raise ConfigError(msg, fqn=fqn)
    if 0 in parameter.shape[1:]:
        msg = (
            f"parameter {fqn!r} must have rows with elements, got shape {tuple(parameter.shape)}; use "
            f"a shape of (0,), or leave it out"
        )
        raise ConfigError(msg, fqn=fqn)
    if not parameter.dtype.is_floating_point:
        msg = (
            f"parameter {fqn!r} must have a real floating dtype, got {parameter.dtype}; register its "
            f"real and imaginary parts as two parameters, and torch.complex() them in the forward"
        )
        raise UnsupportedError(msg, fqn=fqn)


def _group_members(members: Sequence[Member]) -> list[list[Member]]:
    """Split by dtype and trainability, in order of first appearance."""
    groups: dict[tuple[torch.dtype, bool], list[Member]] = {}
    for member in members:
        groups.setdefault((member.full.dtype, member.full.requires_grad), []).append(member)
    return list(groups.values())


# Weak on both sides: a parametrized module has a class of its own, which holds the module.
_sharded_classes: weakref.WeakKeyDictionary[type, weakref.ref[type]] = weakref.WeakKeyDictionary()


def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of `cls` that is a unit; one for each class, as long as it is used.

    Raises:
        ConfigTypeError: the class cannot have a subclass.
    """
    made = _sharded_classes.get(cls)
    sharded = None if made is None else made()
    if sharded is None:
        names = {"__module__": cls.__module__, **guarded_methods(cls)}
        try:
            sharded = type(f"Fsdp{cls.__name__}", (FsdpModule, cls), names)
        except TypeError as error:
            msg = (
                f"fully_shard makes a subclass of a module's class, got {cls.__name__}, which cannot "
                f"have one without more ado: {error}; give its __init_subclass__ defaults"
            )
            raise ConfigTypeError(msg) from error
        _sharded_classes[cls] = weakref.ref(sharded)
    return sharded
