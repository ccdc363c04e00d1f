"""Module and autograd hooks: they call the verbs of `unit.py`, and decide nothing."""

import sys
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial, wraps
from inspect import getattr_static, iscoroutinefunction, isgeneratorfunction, unwrap
from itertools import chain, filterfalse
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_core.errors import ConfigError, StateError
from fsdp_core.meta import own_modules
from fsdp_core.module import FsdpModule, unit_of
from fsdp_core.parameter_group import DELAYED_HOOK, living_group, owner_of
from fsdp_core.torch_private import (
    accumulation_of,
    base_of,
    is_assigning_load,
    is_made_since,
    local_tensor,
    mark_last,
    never_compiled,
)
from fsdp_core.uneven import loss_of_shards
from fsdp_core.unit import ShardedUnit
from fsdp_core.uses import Use

# How deep the walk over a module's output goes into objects that it does not know.
OUTPUT_DEPTH_MAX = 8

# How deep the walk over arguments and attributes goes into containers, up to which number of parts
# (a vocabulary is not walked in each forward), and which these are.
CONTAINER_DEPTH_MAX = 3
CONTAINER_PARTS_MAX = 1000
_CONTAINERS = (list, tuple, dict, set, deque)
_HOLDERS = (Tensor, *_CONTAINERS)

# A module and those below it, weakly: a hook must not keep them alive.
Inside = tuple["weakref.ref[nn.Module]", ...]

# Attributes that are no output of a forward.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

# What cannot hold an output's tensor, or must not be looked into.
_OPAQUE = (type(None), bool, int, float, complex, str, bytes, type, nn.Module, ModuleType)

# What PyTorch's error says when an operator gets a shard and a whole tensor.
_MIXED = "mixed torch.Tensor and DTensor"

# On such an error: a note says what it means.
_EXPLAINED = "_fsdp_core_explained"

# On a method: it was registered.
_GATHERS = "_fsdp_core_gathers"

# On an output tensor: its node, and the calls that backward enters through it, outer ones first.
_USES = "_fsdp_core_uses"


def install_hooks(unit: ShardedUnit, modules: Sequence[nn.Module]) -> None:
    """Install the hooks of a unit: on its modules, and on its trainable parameters."""
    for module in modules:
        module.register_load_state_dict_pre_hook(_before_load)
        module.register_state_dict_pre_hook(_before_save)
        module.register_state_dict_post_hook(_after_save)
        if unit.policy.register_hooks:
            module.register_forward_pre_hook(_before_forward, prepend=True)
            after = partial(_after_forward, _inside(module))
            mark_last(after)
            module.register_forward_hook(after, always_call=True, with_kwargs=True)
    unit.weights.watch = partial(_watch_gradient, unit.ref)
    for index, member in enumerate(unit.members):
        if member.full.requires_grad:
            _watch_gradient(unit.ref, index)


def _watch_gradient(unit: "weakref.ref[ShardedUnit]", index: int) -> None:
    """Have the unit told of each gradient of a parameter, once it is accumulated."""
    living = unit()
    assert living is not None
    member = living.members[index]
    if member.is_watched:
        return
    member.is_watched = True
    hook = partial(_after_gradient, unit, index)
    if member.is_delayed:
        owner: Any = member.slots[0].owner()
        getattr(owner, DELAYED_HOOK)(partial(hook, member.full))
    else:
        member.full.register_post_accumulate_grad_hook(hook)
    # The node is kept: PyTorch makes another one, without the hook, where nobody holds it.
    member.accumulation = accumulation_of(member.sharded)
    member.accumulation.register_prehook(partial(_before_accumulation, unit, member.fqn))


@never_compiled
def _before_forward(module: nn.Module, _args: Any) -> None:
    unit_of(module).pre_forward(module)


@never_compiled
def _after_forward(
    inside: Inside, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    unit = unit_of(module)
    use = unit.post_forward(module)
    returned = list(tensors_of(output))
    unit.check_returned(output, returned)
    if use is None:
        _explain_mixed(module, sys.exception())
        return
    found = chain(returned, _tensors_beside(inside, (args, kwargs)))
    made = (_made_by(tensor, use.first_node) for tensor in found)
    entries = list(dict.fromkeys(tensor for tensor in made if tensor is not None))
    for tensor in entries:
        _enter_through(tensor, use)
    unit.end_with(use, entries)


def _explain_mixed(module: nn.Module, error: BaseException | None) -> None:
    """Say in a note what PyTorch's error about shards means, where a forward raised it."""
    if error is None or _MIXED not in str(error) or hasattr(error, _EXPLAINED):
        return
    setattr(error, _EXPLAINED, True)
    error.add_note(
        f"the forward of unit {unit_of(module).name!r} must use full weights, got sharded ones: those "
        f"of another unit, which has them full in its own forward alone; shard both modules in one "
        f"call, fully_shard([first, second], ...), or call the other one"
    )


def _made_by(tensor: Tensor, first_node: int) -> Tensor | None:
    """Return what backward passes when it enters a call through this output; None: it does not.

    Why by nodes: an input that is handed on untouched has none of this call's, one that was
    written in place has. Why the base of a view: an operator in place on a view, later, takes the
    view's own node out of the graph, and leaves the base's.
    """
    base = base_of(tensor)
    if base is not None and is_made_since(base, first_node):
        return base
    return tensor if is_made_since(tensor, first_node) else None


def _enter_through(tensor: Tensor, use: Use) -> None:
    """Have backward enter a call when this output gets its gradient.

    Why one list for a tensor: where a unit returns what a unit inside it returned, backward must
    enter the outer one first, but PyTorch runs hooks in the order of their registration. The list
    holds for the node that made the tensor: one rewritten in place since then has another.
    """
    node, uses = getattr(tensor, _USES, (None, None))
    if uses is not None and node is tensor.grad_fn:
        uses.insert(0, use)
        return
    uses = [use]
    setattr(tensor, _USES, (tensor.grad_fn, uses))
    tensor.register_hook(partial(_before_backward, uses))


@never_compiled
def _before_backward(uses: list[Use], _grad: Tensor) -> None:
    for use in uses:
        module = use.module()
        if module is None:
            msg = (
                "a model must live until its backward passes are over, got one that was deleted; "
                "keep a reference to it"
            )
            raise StateError(msg)
        unit_of(module).pre_backward(module, use)


@never_compiled
def _after_gradient(unit: "weakref.ref[ShardedUnit]", index: int, _parameter: Tensor) -> None:
    living = unit()
    if living is not None:
        living.gradient_ready(index)


@never_compiled
def _before_accumulation(unit: "weakref.ref[ShardedUnit]", fqn: str, _grads: Any) -> None:
    living = unit()
    if living is None:
        raise loss_of_shards(fqn)
    raise living.context.located(loss_of_shards(living.identity.full_name(fqn), living.name))


def _before_load(
    module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *_: Any
) -> None:
    unit = unit_of(module)
    if is_assigning_load(local_metadata):
        msg = (
            f"load_state_dict must copy into the parameters of a unit, got assign=True for unit "
            f"{unit.name!r}; use assign=False"
        )
        raise unit.context.located(StateError(msg, fqn=unit.fqn))
    unit.require_sharded("loading a state dict")
    for name, parameter in module.named_parameters(prefix.rstrip("."), remove_duplicate=False):
        value = state_dict.get(name)
        if isinstance(parameter, DTensor) and owner_of(parameter) and isinstance(value, Tensor):
            problem = _problem_of(name, value, parameter)
            if problem:
                raise unit.context.located(StateError(problem, fqn=name))


def _problem_of(name: str, value: Tensor, parameter: DTensor) -> str | None:
    """Return what is wrong with an entry of a state dict for a sharded parameter."""
    mine = local_tensor(parameter)
    if not isinstance(value, DTensor):
        return (
            f"load_state_dict must be given sharded entries, got a whole one for {name!r}; use "
            f"fsdp_core.full_state.load_full_state_dict"
        )
    if value.shape == parameter.shape and local_tensor(value).shape != mine.shape:
        return (
            f"load_state_dict must be given the rows that the unit holds, {tuple(mine.shape)} of "
            f"{name!r} on this rank, got {tuple(local_tensor(value).shape)}; use "
            f"fsdp_core.full_state.load_full_state_dict, or load_checkpoint"
        )
    return None


def _before_save(module: nn.Module, *_: Any) -> None:
    unit_of(module).require_sharded("taking a state dict")


def _inside(module: nn.Module) -> Inside:
    """Return a module and those below it that are of no unit inside it, weakly."""
    return tuple(weakref.ref(each) for each in own_modules([module]))


def _tensors_beside(inside: Inside, arguments: Any) -> Iterator[Tensor]:
    """Iterate over the tensors that a forward may have left elsewhere than in what it returned.

    A loss beside the output, say, in a list that was passed in or an attribute of a module:
    backward may enter through it first. Tensors from before the call are among them.
    """
    yield from _contained(arguments, CONTAINER_DEPTH_MAX)
    for reference in inside:
        module = reference()
        held = {} if module is None else vars(module)
        for name in filterfalse(_OF_EVERY_MODULE.__contains__, held):
            if isinstance(held[name], _HOLDERS):
                yield from _contained(held[name], CONTAINER_DEPTH_MAX)


def _contained(value: Any, depth: int) -> Iterator[Tensor]:
    """Yield a tensor, or those in nested containers.

    Why no others: objects that are not returned (a configuration, a cache) can be large, and would
    be walked in each forward.
    """
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, _CONTAINERS) and len(value) <= CONTAINER_PARTS_MAX:
        for part in value.values() if isinstance(value, dict) else value:
            yield from _contained(part, depth - 1)


def tensors_of(output: Any) -> Iterator[Tensor]:
    """Iterate over the tensors in whatever a module returns.

    Containers, dataclasses and objects of unknown classes are looked into: a tensor that is
    missed would enter backward without its unit's weights.
    """
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for each in output:
            yield from tensors_of(each)
    elif output is not None:
        yield from _tensors_in(output, OUTPUT_DEPTH_MAX, {})


def _tensors_in(value: Any, depth: int, seen: dict[int, Any]) -> Iterator[Tensor]:
    """Yield the tensors in a value, each once; `seen` holds what was met, by identity."""
    if depth == 0 or id(value) in seen or isinstance(value, _OPAQUE):
        return
    seen[id(value)] = value
    if isinstance(value, Tensor):
        yield value
        return
    for part in _parts_of(value):
        yield from _tensors_in(part, depth - 1, seen)


def _parts_of(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (Sequence, Set, deque)):
        yield from value
    yield from getattr(value, "__dict__", {}).values()
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(value, name, None)


def _after_save(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, _local_metadata: Any
) -> None:
    """Describe the rows that each sharded tensor of a state dict holds, for checkpoints."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = owner_of(parameter)
        value = state_dict.get(prefix + name)
        if owner is not None and isinstance(value, DTensor):
            group = living_group(owner)
            group.describe(group.index_of(parameter), value)


def guarded_methods(cls: type[nn.Module]) -> dict[str, Any]:
    """Return a class' own public methods, so that using shards by mistake says what to do.

    Why: a method other than `forward` sees the sharded parameters unless it is registered, and
    PyTorch's error then speaks of operators, not of the method.
    """
    names = {}
    for base in reversed(cls.__mro__[: cls.__mro__.index(nn.Module)]):
        for name, value in vars(base).items():
            if isinstance(value, FunctionType) and not name.startswith("_") and name != "forward":
                names[name] = _guarded(value)
    return names


def _guarded(method: Any) -> Any:
    @wraps(method)
    def guarded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except RuntimeError as error:
            if _MIXED not in str(error) or isinstance(error, StateError):
                raise
            unit = unit_of(self)
            msg = (
                f"a method that uses sharded parameters must be registered, got "
                f"{type(self).__name__}.{method.__name__} of unit {unit.name!r}; call "
                f"register_forward_method(module, {method.__name__!r}) once"
            )
            raise unit.context.located(StateError(msg, fqn=unit.fqn)) from error

    return guarded


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let a method other than `forward` gather the unit's weights as `forward` does.

    Raises:
        ConfigError: the module is no unit, or its class has no such method, or it is a generator.
    """
    method = getattr(module, name, None)
    if not isinstance(module, FsdpModule) or not callable(method):
        msg = (
            f"register_forward_method needs a sharded module and the name of one of its methods, "
            f"got {type(module).__name__} and {name!r}; shard the module first, and check the name"
        )
        raise ConfigError(msg)
    function = getattr_static(type(module), name, None)
    is_own = name not in vars(module) or hasattr(vars(module)[name], _GATHERS)
    if not isinstance(function, FunctionType) or not is_own:
        msg = (
            f"register_forward_method needs a method that the module's class defines with `def` and "
            f"that takes self, got {name!r} of {type(module).__name__}, which is another kind of "
            f"attribute; register one that calls it"
        )
        raise ConfigError(msg)
    if isgeneratorfunction(own := unwrap(function)) or iscoroutinefunction(own):
        msg = (
            f"a method that gathers weights must have used them when it returns, got the generator or "
            f"coroutine {name!r}; register the method that it calls for each of its results"
        )
        raise ConfigError(msg)
    # Weak: a bound method in the module's own dict would be a cycle, and outlive `del model`.
    reference, inside = weakref.ref(module), _inside(module)

    @wraps(function)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        living = reference()
        assert living is not None
        if unit_of(living).serves(living):
            return function(living, *args, **kwargs)
        _before_forward(living, args)
        output = None
        try:
            output = function(living, *args, **kwargs)
        finally:
            _after_forward(inside, living, args, kwargs, output)
        return output

    setattr(gathered, _GATHERS, True)
    setattr(module, name, gathered)
