"""fully_shard_optimizer: step on this rank's shards as plain flat tensors, never on DTensors.

At rest an optimizer looks as PyTorch made it: its groups hold the sharded parameters, and its state
is keyed by them and holds DTensors, so schedulers, state dicts and checkpoints see nothing unusual.
For the time of `step` the groups hold plain parameters over the same storage instead: one for each
run of shards that lie side by side in a unit's buffer and belong to one optimizer group.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_core.errors import ConfigError, ConfigTypeError, StateError, UnsupportedError
from fsdp_core.module import complete_groups, of_other_rows, refuse_closure
from fsdp_core.parameter_group import (
    ParameterGroup,
    describe_state,
    is_whole,
    living_group,
    owner_of,
    parameters_held,
)
from fsdp_core.plain_optimizer import WHOLE_TENSORS, not_elementwise
from fsdp_core.torch_private import local_tensor, version_of
from fsdp_core.uneven import is_described
from fsdp_core.unit import ShardedUnit

# Their update of an element depends on that element alone, so that flat shards give the same bits.
_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)

# What cannot work on shards, and what to use instead.
_REFUSED = {
    **{cls.__name__: said for cls, said in WHOLE_TENSORS.items()},
    "LBFGS": ("it calls the model back during a step", "AdamW"),
    "SparseAdam": ("it needs sparse gradients, which are reduced as dense ones", "AdamW"),
}


@dataclass(frozen=True, slots=True)
class _Part:
    """One parameter's shard inside a run.

    Attributes:
        parameter: the sharded parameter.
        index: its index in the parameter group.
        offset: its first element in the run; -1 if this rank holds nothing of it.
        local: this rank's rows.
    """

    parameter: nn.Parameter
    index: int
    offset: int
    local: Tensor


@dataclass(slots=True)
class _Run:
    """Shards of one parameter group and one optimizer group that lie side by side.

    Attributes:
        group: the parameter group.
        parts: the parameters; those of which this rank holds nothing ride along.
        start: the first element of the run in this rank's range of the group.
        plain: what is stepped, flat, over the same storage.
        shown: the state that users see DTensors over; most steps leave its tensors the same.
        shared: the tensors of that state of which users were given one for all parts.
        versions: how often each of these was written, by its key.
    """

    group: ParameterGroup
    parts: tuple[_Part, ...]
    start: int
    plain: nn.Parameter
    shown: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, Tensor] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)


def fully_shard_optimizer(
    optimizer: Optimizer, *, precision_aware: bool = False, elementwise: bool | None = None
) -> Optimizer:
    """Make an optimizer of sharded parameters step on local shards, in place.

    Build the optimizer after sharding. Loading its state dict, adding groups and schedulers work
    as before.

    Args:
        optimizer: built from the parameters of sharded modules.
        precision_aware: it takes gradients of another dtype than the weights' itself; otherwise
            they are cast for the step.
        elementwise: True: an optimizer of a class not known here updates each element by itself.

    Returns:
        The same optimizer.

    Raises:
        ConfigError: it holds a parameter that is not a sharded one.
        UnsupportedError: it cannot work on shards, or nobody says that it can.
    """
    _check_class(optimizer, elementwise=elementwise)
    cls = type(optimizer)
    runs = _build_runs(optimizer)
    for parameter in parameters_held(optimizer):
        describe_state(parameter, optimizer.state.get(parameter, {}))
    optimizer.__class__ = _sharded_class(cls)
    assert isinstance(optimizer, _ShardedOptimizer)
    optimizer.fsdp_step = _LocalStep(optimizer, runs, precision_aware=precision_aware)
    return optimizer


def _check_class(optimizer: object, *, elementwise: bool | None) -> None:
    if not isinstance(optimizer, Optimizer):
        msg = (
            f"fully_shard_optimizer needs a torch.optim.Optimizer, got {optimizer!r}; pass one that "
            f"was built after fully_shard"
        )
        raise ConfigTypeError(msg)
    name = type(optimizer).__name__
    if hasattr(optimizer, "fsdp_step"):
        msg = (
            f"an optimizer is made sharded once, got a {name} that is already; drop the second call"
        )
        raise ConfigError(msg)
    if "step" in vars(optimizer):
        msg = (
            f"an optimizer is made sharded before others change its step, got a {name} whose step "
            f"was replaced (by a learning-rate scheduler, say), which would go past the shards; call "
            f"fully_shard_optimizer first"
        )
        raise ConfigError(msg)
    if name in _REFUSED:
        raise not_elementwise(name, *_REFUSED[name])
    if elementwise is False or (elementwise is None and type(optimizer) not in _ELEMENTWISE):
        msg = (
            f"an optimizer of shards must update each element by itself, got {name}; if it does, "
            f"pass elementwise=True"
        )
        raise UnsupportedError(msg)


_sharded_classes: dict[type[Optimizer], type[Optimizer]] = {}


def _sharded_class(cls: type[Optimizer]) -> type[Optimizer]:
    """Return the subclass of `cls` that steps on shards; one for each class, made once."""
    if cls not in _sharded_classes:
        _sharded_classes[cls] = type(
            cls.__name__, (_ShardedOptimizer, cls), {"__module__": cls.__module__}
        )
    return _sharded_classes[cls]


class _ShardedOptimizer(Optimizer):
    """What `fully_shard_optimizer` adds to an optimizer's class."""

    fsdp_step: "_LocalStep"

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update this rank's shards.

        Raises:
            UnsupportedError: a closure is given: its gradients would come too late.
            StateError: some gradient is still to come.
        """
        refuse_closure(closure)
        adapter = self.fsdp_step
        adapter.begin(self)
        try:
            super().step()
        finally:
            adapter.end(self)


class _LocalStep:
    """Swaps an optimizer between what users see and what a step works on."""

    def __init__(
        self, optimizer: Optimizer, runs: list[list[_Run]], *, precision_aware: bool
    ) -> None:
        self._precision_aware = precision_aware
        self._runs = runs
        self._seen = _held(optimizer)
        self._public_state: Any = None
        self._given: list[object] = []
        self._public_params: list[list[nn.Parameter]] = []
        self._local_state: defaultdict[Tensor, Any] = defaultdict(dict)
        self._state_is_wrapped = False

    def begin(self, optimizer: Optimizer) -> None:
        """Put the plain parameters in, with their gradients and their state."""
        held = _held(optimizer)
        if not _is_same(held, self._seen):
            self._runs = _build_runs(optimizer)
            self._seen = held
            self._public_state = None
        self._split_mixed()
        complete_groups(run.group for runs in self._runs for run in runs)
        self._check_shared(optimizer.state)
        if optimizer.state is not self._public_state or self._was_edited(optimizer.state):
            self._take_state(optimizer.state)
        self._public_params = [group["params"] for group in optimizer.param_groups]
        grads = [[self._local_grad(run) for run in runs] for runs in self._runs]
        # Nothing raises from here on: a step that cannot be made leaves the optimizer as it was.
        for group, runs, of_runs in zip(optimizer.param_groups, self._runs, grads, strict=True):
            # Some fused kernels lose what is pending where the last tensor they meet is empty
            # (TransformerEngine#3207), so empty ones come first.
            group["params"] = sorted((run.plain for run in runs), key=_has_elements)
            for run, grad in zip(runs, of_runs, strict=True):
                self._set_grad(run.plain, grad)
        self._public_state = optimizer.state
        optimizer.state = self._local_state

    def end(self, optimizer: Optimizer) -> None:
        """Put everything back as users see it."""
        for group, params in zip(optimizer.param_groups, self._public_params, strict=True):
            group["params"] = params
        optimizer.state = self._public_state
        self._add_states(optimizer)
        for runs in self._runs:
            for run in runs:
                run.plain.grad = None
                run.group.mark_written()
                self._show_state(run)
                run.versions = {key: version_of(value) for key, value in run.shared.items()}
        self._given = _contents(self._public_state)

    # -- gradients ---------------------------------------------------------------------------

    def _split_mixed(self) -> None:
        """Step parameters one by one where only some of a run have gradients of their buffer."""
        for runs in self._runs:
            for run in tuple(runs):
                if not _is_uniform(run):
                    _split(runs, run)
                    self._public_state = None

    def _local_grad(self, run: _Run) -> Tensor | None:
        """Return the gradient of a run, flat; None if it has none.

        Raises:
            StateError: a user's has other rows than the parameter has here.
        """
        first = run.parts[0]
        grad = first.parameter.grad
        if grad is None:
            return None
        bound = run.group.bound_grads
        if bound and grad is bound[first.index]:
            # Made anew: a view that is kept would keep the memory of gradients that were dropped.
            return run.group.final_grad.flat.narrow(0, run.start, run.plain.numel())
        local = local_tensor(grad) if isinstance(grad, DTensor) else grad
        if local.shape != first.local.shape:
            raise of_other_rows("the gradient", grad, run.group, first.index)
        return local.reshape(-1)

    def _set_grad(self, plain: nn.Parameter, grad: Tensor | None) -> None:
        if grad is not None and grad.dtype != plain.dtype:
            if self._precision_aware:
                plain.grad_dtype = grad.dtype
            else:
                grad = grad.to(plain.dtype)
        plain.grad = grad

    # -- state -------------------------------------------------------------------------------

    def _check_shared(self, public: Any) -> None:
        """Check that nobody wrote in place what several parameters share, a count of steps, say.

        Raises:
            StateError: somebody did, so nobody knows for which of them.
        """
        for runs in self._runs:
            for run in runs:
                for key, value in run.shared.items():
                    if version_of(value) == run.versions[key]:
                        continue
                    states = [public.get(part.parameter, {}) for part in run.parts]
                    sharing = [each for each in states if each.get(key) is value]
                    if len(sharing) > 1:
                        raise _written_in_place(key, run)

    def _was_edited(self, public: Any) -> bool:
        """Whether users have added, replaced or removed some state since the last step."""
        contents = _contents(public)
        return len(contents) != len(self._given) or not all(map(is_, contents, self._given))

    def _take_state(self, public: Any) -> None:
        """Build the state of the plain parameters from what users see, which they have changed.

        Raises:
            StateError: a tensor of it has other rows than the parameter has here.
        """
        for runs in self._runs:
            for run in runs:
                _check_rows(run, public)
        self._local_state = defaultdict(dict)
        for runs in self._runs:
            for run in tuple(runs):
                if not _has_one_state(run, public):
                    _split(runs, run)
        for runs in self._runs:
            for run in runs:
                run.shown, run.shared = {}, {}
                if any(public.get(part.parameter) for part in run.parts):
                    self._local_state[run.plain] = _pack_state(run, public)
        self._public_state = public

    def _add_states(self, optimizer: Optimizer) -> None:
        """Let users see that parameters have a state now, in the order of the groups.

        Why in order: runs differ from rank to rank, and whoever gathers all states in a loop needs
        the same order everywhere.
        """
        new = dict.fromkeys(
            part.parameter
            for runs in self._runs
            for run in runs
            if not run.shown and self._local_state.get(run.plain)
            for part in run.parts
            if part.parameter not in self._public_state
        )
        if not new:
            return
        for parameter in parameters_held(optimizer):
            if parameter in new:
                self._public_state[parameter] = {}

    def _show_state(self, run: _Run) -> None:
        """Let users see a run's state: DTensors over its parts, each made once."""
        state = self._local_state.get(run.plain)
        if not state or _is_shown(run, state):
            return
        for part in run.parts:
            shown = self._public_state[part.parameter]
            for key, value in state.items():
                if not _is_sharded_value(value, run):
                    shown[key] = value
                elif key not in shown or not _shares_storage(shown[key], value):
                    shown[key] = _wrap_part(run.group, part, value)
        run.shown, run.shared = dict(state), _shared_by_parts(run, state)


def _has_elements(plain: Tensor) -> bool:
    return plain.numel() > 0


def _held(optimizer: Optimizer) -> list[list[nn.Parameter]]:
    """Return what the groups hold, for comparison."""
    return [list(group["params"]) for group in optimizer.param_groups]


def _is_same(held: list[list[nn.Parameter]], seen: list[list[nn.Parameter]]) -> bool:
    """Whether the groups hold the very parameters that were seen."""
    return list(map(len, held)) == list(map(len, seen)) and all(
        mine is theirs
        for group, other in zip(held, seen, strict=True)
        for mine, theirs in zip(group, other, strict=True)
    )


# --- runs ------------------------------------------------------------------------------------------


def _build_runs(optimizer: Optimizer) -> list[list[_Run]]:
    return [
        _runs_of_group(group["params"], position)
        for position, group in enumerate(optimizer.param_groups)
    ]


def _runs_of_group(parameters: Sequence[nn.Parameter], position: int) -> list[_Run]:
    """Split the parameters of one optimizer group into runs, in order of first appearance."""
    by_group: dict[ParameterGroup, list[_Part]] = {}
    for number, parameter in enumerate(parameters):
        if isinstance(parameter, nn.Parameter) and is_whole(parameter):
            continue
        group, index = _find(parameter, position, number)
        local = group.main_weight.get_tensor_view(index)
        offset = int(local.storage_offset()) if local.numel() else -1
        by_group.setdefault(group, []).append(_Part(parameter, index, offset, local))
    runs: list[_Run] = []
    for group, parts in by_group.items():
        held = sorted((part for part in parts if part.offset >= 0), key=lambda part: part.offset)
        empty = [part for part in parts if part.offset < 0]
        chains = _chains(held) or [[]]
        chains[0] = chains[0] + empty
        runs.extend(_make_run(group, chain) for chain in chains)
    return runs


def _find(parameter: object, position: int, number: int) -> tuple[ParameterGroup, int]:
    """Return where a parameter lies.

    Raises:
        ConfigTypeError: not a parameter.
        ConfigError: not the sharded parameter of a unit.
    """
    if not isinstance(parameter, nn.Parameter):
        msg = (
            f"param_groups[{position}] must hold parameters, got {type(parameter).__name__}; pass "
            f"those of the model"
        )
        raise ConfigTypeError(msg)
    owner = owner_of(parameter)
    if owner is None:
        msg = (
            f"an optimizer of shards must hold sharded parameters only, got one of shape "
            f"{tuple(parameter.shape)} in param_groups[{position}], number {number}, that belongs "
            f"to no unit; shard the module that holds it"
        )
        raise ConfigError(msg)
    group = living_group(owner)
    for index, member in enumerate(group.members):
        if member.sharded is parameter:
            return group, index
    fqn = group.full_name(owner.fqn)
    msg = (
        f"an optimizer of shards must hold sharded parameters, got the full {fqn!r} in "
        f"param_groups[{position}]; build the optimizer after fully_shard, outside any forward"
    )
    raise ConfigError(msg, fqn=fqn)


def _chains(parts: Sequence[_Part]) -> list[list[_Part]]:
    """Split parts sorted by offset where they do not lie side by side."""
    chains: list[list[_Part]] = []
    end = -1
    for part in parts:
        if part.offset != end:
            chains.append([])
        chains[-1].append(part)
        end = part.offset + part.local.numel()
    return chains


def _make_run(group: ParameterGroup, parts: Sequence[_Part]) -> _Run:
    """Make a run of parts that lie side by side, followed by empty ones."""
    held = [part for part in parts if part.offset >= 0]
    numel = sum(part.local.numel() for part in held)
    start = held[0].offset if held else 0
    based = tuple(
        _Part(
            part.parameter, part.index, part.offset - start if part.offset >= 0 else -1, part.local
        )
        for part in parts
    )
    flat = group.main_weight.flat
    base = start - flat.storage_offset() if held else 0
    plain = nn.Parameter(flat.detach().narrow(0, base, numel))
    return _Run(group, based, int(base), plain)


def _split(runs: list[_Run], run: _Run) -> None:
    """Step the parameters of a run one by one from now on."""
    at = runs.index(run)
    runs[at : at + 1] = [_make_run(run.group, [_unbased(part)]) for part in run.parts]


def _unbased(part: _Part) -> _Part:
    """Return a part with its place in the buffer instead of that in a run."""
    if part.offset < 0:
        return part
    return replace(part, offset=int(part.local.storage_offset()))


def _is_uniform(run: _Run) -> bool:
    """Whether all parts have the gradients of their buffer, or none has any."""
    grads = [part.parameter.grad for part in run.parts]
    if all(grad is None for grad in grads):
        return True
    bound = run.group.bound_grads
    return bool(bound) and all(map(is_, grads, [bound[part.index] for part in run.parts]))


def _has_one_state(run: _Run, public: Any) -> bool:
    """Whether the parts of a run have been stepped alike, so that one state serves them all."""
    states = [public.get(part.parameter) for part in run.parts]
    if not any(states):
        return True
    return all(states) and all(
        state.keys() == states[0].keys() and _scalars(state) == _scalars(states[0])
        for state in states
    )


def _shared_by_parts(run: _Run, state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a run's state of which users are given one for all parts."""
    if len(run.parts) == 1:
        return {}
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and not _is_sharded_value(value, run)
    }


def _written_in_place(key: str, run: _Run) -> StateError:
    """Say that a tensor which parameters share was written."""
    names = [run.group.full_name(run.group.members[part.index].fqn) for part in run.parts]
    msg = (
        f"the state {key!r} that parameters share must not be written in place, got a write of that of "
        f"{names}; assign another tensor to optimizer.state[parameter][{key!r}] of each that you mean"
    )
    unit = run.group.unit()
    assert isinstance(unit, ShardedUnit)
    return unit.context.located(StateError(msg, fqn=unit.fqn))


def _check_rows(run: _Run, public: Any) -> None:
    """Refuse state that does not lie as its parameter does on this rank.

    Raises:
        StateError: a tensor has other rows.
    """
    for part in run.parts:
        for key, value in public.get(part.parameter, {}).items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                continue
            if isinstance(value, DTensor):
                shape = local_tensor(value).shape
                is_right = shape == part.local.shape
            else:
                shape = value.shape  # others are what the parameter has as a whole, a history, say
                is_right = shape not in (part.local.shape, part.parameter.shape)
            if not is_right:
                raise of_other_rows(f"the state {key!r}", value, run.group, part.index)


def _scalars(state: dict[str, Any]) -> dict[str, Any]:
    """Return what a parameter's state has beside sharded tensors, as plain values."""
    return {
        key: value.tolist() if isinstance(value, Tensor) else value
        for key, value in state.items()
        if not isinstance(value, DTensor)
    }


# --- state -----------------------------------------------------------------------------------------


def _contents(state: Any) -> list[object]:
    """Return all that a state holds, flat, to be compared by identity."""
    states = list(state.values())
    values = chain.from_iterable(map(methodcaller("values"), states))
    return [*state, *chain.from_iterable(states), *values]


def _is_shown(run: _Run, state: dict[str, Any]) -> bool:
    """Whether users see every value of a run's state already, and no value was replaced since."""
    return len(state) == len(run.shown) and all(
        run.shown.get(key) is value for key, value in state.items()
    )


def _is_sharded_value(value: object, run: _Run) -> bool:
    """Whether a value of a run's state has one element for each of the run's."""
    return isinstance(value, Tensor) and value.shape == run.plain.shape and value.dim() == 1


def _shares_storage(shown: object, value: Tensor) -> bool:
    if not (isinstance(shown, DTensor) and is_described(shown)):
        return False  # a user's own, or what an optimizer made when it was built
    local = local_tensor(shown)
    same = local.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    return local.numel() == 0 or same


def _wrap_part(group: ParameterGroup, part: _Part, value: Tensor) -> DTensor:
    if part.offset < 0:
        local = value.new_empty(part.local.shape)
    else:
        local = value.narrow(0, part.offset, part.local.numel()).view(part.local.shape)
    return group.as_sharded(part.index, local)


def _pack_state(run: _Run, public: Any) -> dict[str, Any]:
    """Build a run's state from that of its parts."""
    states = [public[part.parameter] for part in run.parts]
    packed: dict[str, Any] = {}
    for key, value in states[0].items():
        if not isinstance(value, DTensor):
            # A copy: a step counter that parameters share would be counted up by each of them.
            packed[key] = value.clone() if isinstance(value, Tensor) else value
            continue
        flat = torch.zeros_like(run.plain, dtype=value.dtype, requires_grad=False)
        for part, state in zip(run.parts, states, strict=True):
            if part.offset >= 0:
                target = flat.narrow(0, part.offset, part.local.numel())
                target.copy_(local_tensor(state[key]).reshape(-1))
        packed[key] = flat.detach()
    return packed
