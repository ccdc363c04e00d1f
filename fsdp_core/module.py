"""FsdpModule, ShardedUnit: what a unit does around its forward and backward.

One `ShardedUnit` is shared by the modules of one `fully_shard` call. Its verbs are called by
`hooks.py`, by the context, or by whoever drives the unit by hand.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from fsdp_core import device as accelerator
from fsdp_core.collectives import MeshAxes
from fsdp_core.context import Call, FsdpContext
from fsdp_core.device import Event, Stream
from fsdp_core.errors import StateError, StateValueError, UnsupportedError
from fsdp_core.parameter_group import (
    ParameterGroup,
    living_group,
    owner_of,
    trainable_among,
    without_model,
)
from fsdp_core.phase import Phase, check_phase_change
from fsdp_core.schedule_policy import SchedulePolicy
from fsdp_core.torch_private import (
    current_graph_task,
    flat_weights_of,
    has_reentrant_checkpoint,
    in_graph_task,
    next_node_number,
    post_accumulate_hooks,
    version_of,
)

Direction = Literal["forward", "backward", "none"]


@dataclass(frozen=True, slots=True)
class Resharded:
    """The full weights do not exist."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """The full weights were gathered, and no stream was put behind that yet.

    Attributes:
        event: recorded on the all-gather stream behind the gathers; None where events are stubs.
        early: gathered as a prefetch.
    """

    event: Event
    early: bool


@dataclass(frozen=True, slots=True)
class Unsharded:
    """The full weights are readable on a stream.

    Attributes:
        event: as in `Gathered`.
        stream: the one that was put behind it.
    """

    event: Event
    stream: Stream


Weights = Resharded | Gathered | Unsharded
_RESHARDED = Resharded()


@dataclass(slots=True, weakref_slot=True, eq=False)
class Use:
    """One forward call whose outputs are part of an autograd graph.

    Attributes:
        module: the unit's module that was called, weakly: the graph must not keep a model alive.
        enclosing: the units whose forward this call was made in.
        first_node: number that the first autograd node of the call got.
        is_recomputed: the call was made inside a backward pass.
        graph_task: the backward pass that has entered it last.
        recomputes: part of it is recomputed in a backward pass of its own (reentrant
            checkpointing), whose gradients come apart from the others.
    """

    module: "weakref.ref[nn.Module]"
    enclosing: tuple["weakref.ref[Any]", ...]
    first_node: int
    is_recomputed: bool
    graph_task: int = -1
    recomputes: bool = False


@dataclass(slots=True)
class Window:
    """The one countdown: what a unit has got of the gradients that complete it.

    Attributes:
        fired: for each parameter, whether a gradient came.
        expected: gradients that complete the window.
        declared: `expected` was declared, and counts every gradient; otherwise each trainable
            parameter counts once, however often it is used.
        count: how many came.
        entered: uses that backward has entered.
        graph_task: the backward pass that entered the last one.
        nested: some gradients come in a backward pass inside the one that entered the unit
            (reentrant checkpointing), so more may come until that one moves on.
        reduced: the gradients were reduced; frozen weights may still be needed.
    """

    fired: bytearray
    expected: int
    declared: bool
    count: int = 0
    entered: int = 0
    graph_task: int = -1
    nested: bool = False
    reduced: bool = False

    @property
    def is_full(self) -> bool:
        """Whether all expected gradients have come."""
        return self.count >= self.expected

    def add(self, index: int) -> bool:
        """Count one gradient, and return whether all expected ones have come."""
        if self.declared or not self.fired[index]:
            self.count += 1
        self.fired[index] = 1
        return self.count >= self.expected


class ShardedUnit:
    """One or several modules whose parameters are gathered and reduced together.

    Attributes:
        ref: this unit, weakly.
        context: what it shares with other units.
        modules: its modules, weakly: they hold the unit.
        axes: the mesh that its parameters lie on.
        groups: its parameters, one group for each dtype and trainability.
        members: all of its parameters.
        policy: how it is scheduled.
        phase: what it is doing.
        fqn: names of its modules relative to their roots, once the context is finalized.
        name: how messages and ranges call it; see the `Unit` of `context.py`.
        enclosing: see `Use`; of the last use that backward entered.
        full_numel: elements of its whole parameters.
        callbacks: called with the first module when a backward of the unit is over.
        watch: installs the gradient hook of a parameter that becomes trainable.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        axes: MeshAxes,
        groups: Sequence[ParameterGroup],
        context: FsdpContext,
        policy: SchedulePolicy,
    ) -> None:
        self.ref: weakref.ref[ShardedUnit] = weakref.ref(self)
        self.context = context
        self.modules = tuple(weakref.ref(module) for module in modules)
        self.axes = axes
        self.groups = tuple(groups)
        self.policy = policy
        self.phase = Phase.RESTING
        self.fqn = ""
        self.name = "<root>"
        self.enclosing: tuple[weakref.ref[Any], ...] = ()
        self.full_numel = sum(group.full_numel for group in groups)
        self.members = [member for group in self.groups for member in group.members]
        self.callbacks: list[Callable[[nn.Module], None]] = []
        self.watch: Callable[[ShardedUnit, int], None]
        for group in self.groups:
            group.unit = self.ref
        self._transient = [group for group in self.groups if not group.keeps_full]
        self._stores = any(group.stores for group in self.groups)
        self._transient_nbytes = sum(group.full_nbytes for group in self._transient)
        self._swaps = [
            (slot.registry, slot.name, member.sharded, member.full)
            for member in self.members
            for slot in member.slots
        ]
        self._pairs = [(member.sharded, member.full) for member in self.members]
        self._fulls = [member.full for member in self.members]
        losing = [group for group in self.groups if not group.keeps_writes]
        self._dropped = [member.full for group in losing for member in group.members]
        self._dropped_fqns = [member.fqn for group in losing for member in group.members]
        self._dropped_versions = list(map(version_of, self._dropped))
        self._labels: dict[str, str] = {}
        # State of the weights, and of the modules' registries.
        self._weights: Weights = _RESHARDED
        self._holds_full = False
        self._holders = 0
        # State of forwards.
        self._calls = 0
        self._ran: list[nn.Module] = []
        self._callers: dict[weakref.ref[Any], None] = {}
        self._uses: list[weakref.ref[Use]] = []
        self._hidden_uses = 0
        self._recomputes: dict[int, bool] = {}
        # State of backward.
        self._has_frozen = any(not member.full.requires_grad for member in self.members)
        self._has_delayed = any(member.is_delayed for member in self.members)
        self._window = self._new_window()
        self._scope: AbstractContextManager[Any] | None = None

    @property
    def notes_events(self) -> bool:
        """Whether its hooks note when it enters a phase."""
        return self.policy.register_hooks

    def _label(self, operation: str) -> str:
        label = self._labels.get(operation)
        if label is None:
            label = self._labels[operation] = f"{operation} {self.name}"
        return label

    def _change_phase(self, phase: Phase) -> None:
        self._check_phase_change(phase)
        self.phase = phase

    def _check_phase_change(self, phase: Phase) -> None:
        try:
            check_phase_change(self.fqn, self.phase, phase)
        except StateError as error:
            raise self.context.located(error) from None

    # -- weights -----------------------------------------------------------------------------

    @property
    def is_unsharded(self) -> bool:
        """Whether the full weights exist or are being gathered."""
        return self._weights is not _RESHARDED

    def _gather(self, *, early: bool) -> None:
        """Issue the gathers of all groups.

        Ordering:
            On the all-gather stream, which must be behind the last writes of the main weights.
        """
        context = self.context
        stream = context.allgather_stream
        gathers = 0
        try:
            with accelerator.annotate(self._label("unshard")):
                # Full weights belong to the pool of the stream that gathers and frees them.
                with accelerator.on_stream(stream):
                    for group in self.groups:
                        gathers += group.unshard()
                event = accelerator.record_event(stream)
        except BaseException:
            # Edge 2: what was begun has no event yet, and reads main weights.
            accelerator.wait_stream(context.current_stream(), stream)
            self._release()
            raise
        self._weights = Gathered(event, early)
        context.stats.gathers += gathers
        if gathers and not early:
            context.stats.on_demand_gathers += 1
        context.note_unsharded(self, self._transient_nbytes)

    @property
    def _is_stale(self) -> bool:
        """Whether the main weights were written since they were last gathered."""
        return any(group.is_stale for group in self.groups)

    def prefetch(self) -> None:
        """Gather the weights early, if they are not there and backward may use them.

        Ordering:
            Within a forward the all-gather stream is behind the last writes of the weights.
        """
        if self._weights is not _RESHARDED or not self.groups:
            return
        if in_graph_task():
            if self._is_stale:
                return
        elif not self.context.calls and self._is_stale:
            # Edge 1: driven by hand, this may be the first gather behind the writes of the weights.
            accelerator.wait_stream(self.context.allgather_stream, self.context.current_stream())
        self._gather(early=True)
        self.context.stats.prefetches += 1

    def _demand(self) -> None:
        """Have the full weights in the modules, readable on the current stream."""
        if not self.groups:
            return
        stream = self.context.current_stream()
        weights = self._weights
        if isinstance(weights, Resharded):
            self._gather(early=False)
            weights = self._weights
        if not (isinstance(weights, Unsharded) and weights.stream == stream):
            assert not isinstance(weights, Resharded)
            # Edge 2: compute needs this unit's weights, not what the stream was given later.
            accelerator.wait_event(stream, weights.event)
            if isinstance(weights, Gathered) and weights.early:
                self.context.stats.used_prefetches += 1
            self._weights = Unsharded(weights.event, stream)
        self._register_full()

    def _register_full(self) -> None:
        if self._holds_full:
            return
        for registry, name, sharded, _ in self._swaps:
            if registry.get(name) is not sharded:
                raise self._replaced(registry, name)
        for sharded, full in self._pairs:
            if full.requires_grad is not sharded.requires_grad:
                self._follow_trainability()
                break
        for registry, name, _, full in self._swaps:
            registry[name] = full
        self._holds_full = True

    def _replaced(self, registry: dict[str, nn.Parameter | None], name: str) -> StateError:
        """Say that somebody put another object where a module holds a sharded parameter."""
        fqn = next(
            slot.fqn
            for member in self.members
            for slot in member.slots
            if slot.registry is registry and slot.name == name
        )
        msg = (
            f"the parameters of unit {self.name!r} must be those that fully_shard put there, got "
            f"another object for {fqn!r} (by assignment, or torch.func.functional_call); copy values "
            f"into the sharded parameter, under torch.no_grad()"
        )
        return self.context.located(StateError(msg, fqn=self.fqn))

    def _check_unwritten(self) -> None:
        """Check that nobody wrote full weights that are dropped.

        Raises:
            StateError: somebody did.
        """
        versions = list(map(version_of, self._dropped))
        if versions == self._dropped_versions:
            return
        each = zip(self._dropped_fqns, self._dropped_versions, versions, strict=True)
        written = [fqn for fqn, before, now in each if now != before]
        self._dropped_versions = versions
        msg = (
            f"full weights must not be written, got a write of {written} of unit {self.name!r}, "
            f"which is lost when they are freed; write the sharded parameters between passes, under "
            f"torch.no_grad()"
        )
        raise self.context.located(StateError(msg, fqn=self.fqn))

    def _register_sharded(self) -> None:
        if not self._holds_full:
            return
        for registry, name, sharded, full in self._swaps:
            registry[name] = sharded
            if sharded.requires_grad is not full.requires_grad:
                sharded.requires_grad_(full.requires_grad)
        self._holds_full = False

    def _follow_trainability(self) -> None:
        """Freeze or unfreeze full parameters as their sharded ones were."""
        for index, (sharded, full) in enumerate(self._pairs):
            if sharded.requires_grad and not full.requires_grad:
                full.requires_grad_(True)  # noqa: FBT003 - PyTorch's own signature
                self.watch(self, index)
            elif full.requires_grad and not sharded.requires_grad:
                full.requires_grad_(False)  # noqa: FBT003 - PyTorch's own signature
        self._has_frozen = any(not full.requires_grad for _, full in self._pairs)

    def _drop_stale(self) -> None:
        """Give weights up that were gathered before the main weights were last written."""
        if self._weights is not _RESHARDED and self._is_stale:
            self._reshard()
            # Edge 1: the gather that follows reads what this stream wrote.
            accelerator.wait_stream(self.context.allgather_stream, self.context.current_stream())

    def _reshard(self) -> None:
        """Put the sharded parameters back and free the full weights."""
        self._register_sharded()
        self._free()

    def _free(self) -> None:
        """Free the full weights."""
        weights = self._weights
        if isinstance(weights, Resharded):
            return
        context = self.context
        if isinstance(weights, Gathered) and self._stores:
            # Edge 2: what was gathered stays, for uses that will not ask again.
            accelerator.wait_event(context.current_stream(), weights.event)
        if self._transient:
            with accelerator.annotate(self._label("reshard")):
                if isinstance(weights, Unsharded):
                    # Edge 3: the memory may be reused at once, so its readers must be done.
                    accelerator.wait_stream(context.allgather_stream, context.current_stream())
                elif not self._stores:
                    # Edge 2: the gather has read the main weights, which may be written next.
                    accelerator.wait_event(context.current_stream(), weights.event)
                self._release()
            context.stats.unused_prefetches += isinstance(weights, Gathered) and weights.early
        self._weights = _RESHARDED
        context.note_resharded(self, self._transient_nbytes)

    def _release(self) -> None:
        """Give the full weights back to the pool that they came from, whatever stream is current."""
        for group in self._transient:
            group.reshard()

    @contextmanager
    def hidden_parameters(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Take the parameters out of the modules while `nn.Module._apply` goes through these.

        Why: it replaces each parameter's contents, which would part it from the buffers.

        Raises:
            StateError: `fn` changes device or dtype.
        """
        for group in self.groups:
            before = group.main_weight.flat[:0]
            after = fn(before)
            if (after.dtype, after.device) != (before.dtype, before.device):
                msg = (
                    f"sharded parameters keep their device and dtype, got a conversion of unit "
                    f"{self.name!r} from {before.dtype} on {before.device} to {after.dtype} on "
                    f"{after.device}; convert before fully_shard, or use MixedPrecisionPolicy"
                )
                raise self.context.located(StateError(msg, fqn=self.fqn))
        held = [(registry, name, registry[name]) for registry, name, _, _ in self._swaps]
        flat = [(owner, flat_weights_of(owner)) for owner in self._owners()]
        for registry, name, _ in held:
            registry[name] = None
        try:
            yield
        finally:
            for registry, name, parameter in held:
                registry[name] = parameter
            for owner, weights in flat:
                vars(owner).update(weights)

    def _owners(self) -> list[nn.Module]:
        """Return the modules that hold the unit's parameters, each once."""
        owners = [slot.owner() for member in self.members for slot in member.slots]
        return list(dict.fromkeys(owner for owner in owners if owner is not None))

    # -- driven by hand ----------------------------------------------------------------------

    def unshard(self) -> None:
        """Have the full weights in the modules, for a caller who drives the unit by hand."""
        self.context.ensure_finalized()
        if self._is_stale:
            if self.phase is Phase.RESTING:
                self._reshard()
            # Edge 1: the gather reads what this stream wrote since the last one.
            accelerator.wait_stream(self.context.allgather_stream, self.context.current_stream())
        self._demand()
        if not self.policy.register_hooks:
            self._holders += 1

    def reshard(self) -> None:
        """Free the full weights, for a caller who drives the unit by hand.

        Without hooks, users are counted: the last of as many calls as those of `unshard` frees.

        Raises:
            StateError: the unit's forward or backward is running.
        """
        if self._holders:
            self._holders -= 1
        busy = self.phase is not Phase.RESTING if self.policy.register_hooks else self._calls
        if busy:
            msg = (
                f"a unit must be RESTING to be resharded by hand, got {self.phase.name} for "
                f"{self.name!r}; it is resharded when that has ended"
            )
            raise self.context.located(StateError(msg, fqn=self.fqn))
        if not self._holders:
            self._reshard()
            self._check_unwritten()

    def require_sharded(self, what: str) -> None:
        """Have the sharded parameters in the modules, for something that must see them.

        Raises:
            StateError: the full ones are in use.
        """
        if not self._holds_full and self._weights is _RESHARDED:
            return
        if self.phase is not Phase.RESTING or self._holders:
            msg = (
                f"{what} needs the sharded parameters, got the full ones of unit {self.name!r} in "
                f"use ({self.phase.name}); do it between passes, after reshard()"
            )
            raise self.context.located(StateError(msg, fqn=self.fqn))
        self._reshard()
        self._check_unwritten()

    def prefetch_successors(self, module: nn.Module, phase: Phase) -> None:
        """Gather the units early that follow `module`, within this unit's budget for the direction."""
        forward = phase is Phase.FORWARD
        policy = self.policy
        numel_max = policy.forward_prefetch_size if forward else policy.backward_prefetch_size
        self.context.prefetch(module, phase, numel_max)

    # -- forward -----------------------------------------------------------------------------

    def pre_forward(self, module: nn.Module) -> None:
        """Gather the weights that `module` is about to use, and prefetch those behind them.

        Raises:
            StateError: the context is not finalized, the unit is in its forward already, or its
                backward waits for delayed gradients.
        """
        context = self.context
        context.ensure_finalized(module)
        recomputing = in_graph_task()
        if recomputing:
            context.begin_recomputation(module)
        elif not context.calls:
            context.begin_forward()
        self._check_entry(module, recomputing=recomputing)
        if not recomputing and context.evaluating:
            context.note_evaluated(module)
        elif not recomputing:
            context.note(module, Phase.FORWARD)
        self._begin_call(module, recomputing=recomputing)
        if not recomputing:
            self._drop_stale()
        self._demand()
        if not recomputing:
            self.prefetch_successors(module, Phase.FORWARD)

    def _check_entry(self, module: nn.Module, *, recomputing: bool) -> None:
        entered_twice = any(call.module is module for call in self.context.calls)
        if entered_twice or (self.phase is Phase.BACKWARD and not recomputing):
            self._check_phase_change(Phase.FORWARD)

    def _begin_call(self, module: nn.Module, *, recomputing: bool) -> None:
        if self.phase is Phase.RESTING:
            self._change_phase(Phase.FORWARD)
        scope = accelerator.annotate(self._label("recompute" if recomputing else "forward"))
        scope.__enter__()
        calls = self.context.calls
        if calls and calls[-1].unit is not self:
            for call in calls:
                self._callers[call.unit.ref] = None
        start = next_node_number()
        calls.append(Call(self, module, recomputing, scope, sys.exception(), start))
        self._calls += 1

    def post_forward(self, module: nn.Module) -> Use | None:
        """End a forward, which may have raised.

        Returns:
            What backward has to enter through the outputs; None if there is nothing.
        """
        context = self.context
        if not context.calls or context.calls[-1].module is not module:
            return None  # pre_forward itself raised, before it began anything
        call = context.calls.pop()
        failed = sys.exception() is not call.exception
        self._calls -= 1
        if self.phase is Phase.FORWARD and not self._calls:
            self._change_phase(Phase.RESTING)
        if not self._calls and self.phase is Phase.RESTING:
            self._leave_forward(call, failed=failed)
        call.scope.__exit__(None, None, None)
        evaluating = context.evaluating
        if not call.recomputing and not context.calls:
            context.end_forward(failed=failed)
        if failed:
            return None
        self._check_unwritten()
        if evaluating:
            return None
        if not torch.is_grad_enabled():
            self._note_hidden_use(call)
            return None
        enclosing = self._enclosing_of(call)
        return Use(weakref.ref(module), enclosing, call.first_node, call.recomputing)

    def _note_hidden_use(self, call: Call) -> None:
        """Count a call without a graph in a forward with one: it may be recomputed with one."""
        if not call.recomputing:
            self._hidden_uses += 1
            self.context.note_hidden_use(self)

    def forget_hidden_uses(self) -> None:
        """Note that no graph is left that could recompute a call."""
        self._hidden_uses = 0

    def _outstanding_uses(self) -> int:
        """Return how many calls backward has still to enter, as far as their graphs live."""
        self._uses = [ref for ref in self._uses if ref() is not None]
        return len(self._uses) + self._hidden_uses

    def _leave_forward(self, call: Call, *, failed: bool) -> None:
        """Reshard, unless the weights are needed again at once.

        A recomputed forward is followed by its backward, unless it is one that will be recomputed
        again (gradients disabled). A unit of several modules waits for all of them to run.
        """
        if call.recomputing:
            if not torch.is_grad_enabled():
                self._reshard()
            return
        if failed:
            self._reshard()
            return
        self._ran.append(call.module)
        waits = self.context.calls and any(ref() not in self._ran for ref in self.modules)
        if self.policy.reshard_after_forward and not waits:
            self._reshard()
        if not waits:
            self._ran.clear()

    def _enclosing_of(self, call: Call) -> tuple["weakref.ref[Any]", ...]:
        """Return the units that backward must not have left when it enters this call.

        A recomputed call does not see the forward that it was first made in, so it counts every
        unit that ever called this one.
        """
        if call.recomputing:
            return tuple(self._callers)
        return tuple(each.unit.ref for each in self.context.calls if each.unit is not self)

    def end_with(self, use: Use, outputs: Sequence[torch.Tensor]) -> None:
        """Note which outputs of a forward backward can enter.

        Why the count of nodes: it tells forwards that took other ways apart, so that a graph is
        looked at once for each way.
        """
        graph = bool(outputs)
        if graph:
            self._uses.append(weakref.ref(use))
        nodes = next_node_number() - use.first_node
        if graph and nodes not in self._recomputes:
            self._recomputes[nodes] = has_reentrant_checkpoint(outputs, use.first_node)
        use.recomputes = self._recomputes.get(nodes, False)
        if self.context.calls or in_graph_task():
            return
        if graph:
            self.context.note_graph(use)
        else:
            self.context.sweep()

    def end_forward(self, *, sweep: bool) -> None:
        """Reshard what an outermost forward has left over.

        Args:
            sweep: nothing follows that could use an early gather.

        Ordering:
            The current stream is put behind a gather that stays, since the caller may write weights.
        """
        if self.phase is not Phase.RESTING:
            return
        unused = sweep and isinstance(self._weights, Gathered)
        if self._ran or unused:
            self._ran.clear()
            if unused or self.policy.reshard_after_forward:
                self.come_to_rest()
        self.await_gather()

    def come_to_rest(self) -> None:
        """Reshard if nobody uses the weights."""
        if self.phase is Phase.RESTING and not self._holders:
            self._ran.clear()
            self._reshard()

    # -- backward ----------------------------------------------------------------------------

    def _new_window(self) -> Window:
        fired = bytearray(len(self.members))
        declared = self.policy.grad_accumulation_count
        if declared is not None:
            return Window(fired, declared, declared=True)
        return Window(fired, trainable_among(self._fulls), declared=False)

    def pre_backward(self, module: nn.Module, use: Use) -> None:
        """Gather the weights that backward needs for one call of `module`, once.

        Raises:
            StateError: the weights were written since the call, or the backward is to have a
                backward itself.
        """
        task = current_graph_task()
        if use.graph_task == task:
            return
        # Hooks run with gradients enabled exactly where the backward is recorded.
        if torch.is_grad_enabled() and self._transient:
            msg = (
                f"a backward through unit {self.name!r} must not be recorded, got "
                f"create_graph=True: its weights are freed before a second backward could read "
                f"them; use a parameter placement of Replicate(), which keeps them"
            )
            raise self.context.located(StateError(msg, fqn=self.fqn))
        if self._is_stale:
            msg = (
                f"a backward must find the weights that its forward used, got unit {self.name!r} "
                f"whose weights were written in between (a loaded state dict, an optimizer's step); "
                f"run the forward again"
            )
            raise self.context.located(StateError(msg, fqn=self.fqn))
        use.graph_task = task
        context = self.context
        context.begin_backward()
        context.leave_sections(self, use.enclosing)
        context.note(module, Phase.BACKWARD)
        self.enclosing = use.enclosing
        self._open()
        self._enter(use)
        self._window.graph_task = task
        self._window.nested |= use.recomputes
        self._demand()
        self.prefetch_successors(module, Phase.BACKWARD)

    def _enter(self, use: Use) -> None:
        """Take a call from those that are still to come."""
        self._window.entered += 1
        reference = weakref.ref(use)
        if reference in self._uses:
            self._uses.remove(reference)
        if use.is_recomputed:
            self._hidden_uses = max(0, self._hidden_uses - 1)

    def _open(self) -> None:
        if self.phase is Phase.BACKWARD:
            return
        self._change_phase(Phase.BACKWARD)
        if not self._window.count:
            self._window = self._new_window()
        self.context.open_unit(self)
        self._scope = accelerator.annotate(self._label("backward"))
        self._scope.__enter__()

    @property
    def _has_full_gradients(self) -> bool:
        """Whether gradients wait to be reduced."""
        return any(full.grad is not None for _, full in self._pairs)

    def take_gradients(self) -> None:
        """Open, if full gradients are there that no backward pass of autograd brought."""
        if self.phase is Phase.RESTING and self._has_full_gradients:
            self._open()

    def gradient_ready(self, index: int) -> None:
        """Count a gradient of one parameter, which has been accumulated."""
        context = self.context
        if self.phase is not Phase.BACKWARD:
            context.begin_backward()
            self._open()
        window = self._window
        is_full = window.add(index)
        task = current_graph_task()
        if task not in (-1, context.graph_task):
            more_uses = self._outstanding_uses() > 0
            window.nested |= window.entered > 0 and (more_uses or task != window.graph_task)
        if is_full:
            self.retry()

    def retry(self) -> None:
        """Complete if all gradients have come and no unit inside this one is open."""
        window = self._window
        if not window.is_full or window.nested or window.reduced or not any(window.fired):
            return
        if self.phase is Phase.BACKWARD and not self.context.encloses_open_unit(self):
            self._finish_gradients()

    def _finish_gradients(self) -> None:
        """Reduce; close the unit unless frozen weights may still be read in this backward pass."""
        is_over = not (self._has_frozen and in_graph_task())
        if is_over:
            self._leave_weights()
        self._reduce()
        if is_over:
            self._close()

    def leave_section(self) -> None:
        """Reshard: backward has moved on; complete the unit if no use of it is still to come.

        What was gathered early since its last use stays, for the one that is still to come.
        """
        if self._calls or not self.policy.register_hooks:
            return
        if not self._outstanding_uses():
            self.complete()
        elif not isinstance(self._weights, Gathered):
            self._leave_weights()

    def complete(self) -> None:
        """Complete what is open: backward brings no more gradients.

        A window whose declared gradients have not all come stays as it is, and so does a unit
        that waits for delayed ones, in its phase too.
        """
        self._expect_delayed_alone()
        self._leave_weights()
        window = self._window
        if window.declared and not window.is_full:
            self._close()
        elif self._has_delayed and not window.is_full:
            window.nested = False  # delayed gradients come in no backward pass
            self.context.close_unit(self)
        else:
            # Where no parameter was used, another rank may have used one: zeros take part.
            if self._has_full_gradients or (window.entered and not window.reduced):
                self._reduce()
            self._close()

    def _expect_delayed_alone(self) -> None:
        """Wait for delayed gradients alone: no others that are missing will come."""
        window = self._window
        if self._has_delayed and not window.declared:
            missing = sum(
                member.is_delayed and member.full.requires_grad and not fired
                for member, fired in zip(self.members, window.fired, strict=True)
            )
            window.expected = window.count + missing

    def _leave_weights(self) -> None:
        """Free the full weights; parameters stay full where delayed gradients will be put."""
        if self._holders:
            return
        if self._has_delayed and not self._window.is_full:
            self._free()
        else:
            self._reshard()

    def _reduce(self) -> None:
        """Reduce the gradients that have come; missing ones count as zeros."""
        context = self.context
        context.validate_grad_sync(self)
        self._window.reduced = True
        groups = [group for group in self.groups if group.is_trainable]
        if not groups:
            return
        current, inner = context.current_stream(), context.inner_reduction_stream
        with accelerator.annotate(self._label("reduce_gradients")), torch.no_grad():
            # Partial gradients belong to the pool of the stream that reduces and frees them.
            with accelerator.on_stream(inner):
                for group in groups:
                    group.allocate_gradients()
            # Edge 5: that memory may still be read by an earlier reduction.
            accelerator.wait_stream(current, inner)
            self._adopt_gradients(groups)
            for group in groups:
                group.copy_in()
            # Edge 6: the reduction reads what was copied.
            accelerator.wait_stream(inner, current)
            outer = context.outer_reduction_stream
            if outer is not inner and any(g.finished_in == context.stats.steps for g in groups):
                # Edge 9, backwards: it adds to what was finished earlier in this pass.
                accelerator.wait_stream(inner, outer)
            # Reductions run beside the backward of the units in front.
            with accelerator.on_stream(inner):
                for group in groups:
                    group.reduce()
            if context.is_last_microbatch:
                self._finish_groups(groups)
            else:
                for group in groups:
                    group.bind(is_over=False)
                context.note_unfinished(self)
        context.stats.reductions += len(groups)
        context.note_reduced(self)

    def finish_window(self) -> None:
        """Bring gradients into optimizer placements: the last microbatch is over.

        Where delayed ones are still to come, their reduction does it.
        """
        if self.phase is Phase.BACKWARD:
            return
        groups = [group for group in self.groups if group.awaits_finish]
        with accelerator.annotate(self._label("reduce_gradients")), torch.no_grad():
            if any(group.foreign_gradients() for group in groups):
                current, inner = self.context.current_stream(), self.context.inner_reduction_stream
                # Edge 7: somebody replaced what this stream wrote.
                accelerator.wait_stream(current, inner)
                self._adopt_gradients(groups)
                # Edge 6: the reduction reads what was copied.
                accelerator.wait_stream(inner, current)
            self._finish_groups(groups)

    def _adopt_gradients(self, groups: Sequence[ParameterGroup]) -> None:
        """Add to what users made of gradients, not to what these were.

        Ordering:
            Runs on the current stream, which must be behind the inner reductions.

        Raises:
            StateError: a gradient has other rows than the one that it replaces.
        """
        context = self.context
        for group in groups:
            foreign = group.foreign_gradients()
            if foreign:
                # Edge 7: the outer reduction may have written what they take the place of.
                accelerator.wait_stream(context.current_stream(), context.outer_reduction_stream)
            for index in foreign:
                if not group.adopt_gradient(index):
                    fqn = group.members[index].fqn
                    msg = (
                        f"a gradient must have the rows of the one that it replaces, got other ones "
                        f"for {fqn!r} of unit {self.name!r}; compute it from that one"
                    )
                    raise context.located(StateError(msg, fqn=self._full_name(fqn)))

    def _finish_groups(self, groups: Sequence[ParameterGroup]) -> None:
        apart = [group for group in groups if group.finishes_apart]
        if apart:
            self._finish_apart(apart)
        for group in groups:
            group.bind(is_over=True)

    def _finish_apart(self, groups: Sequence[ParameterGroup]) -> None:
        """Run the reductions that end a window, which may have a stream of their own."""
        context = self.context
        outer = context.outer_reduction_stream
        if outer is not context.inner_reduction_stream:
            # Edge 9: the outer reduction reads the result of the inner one.
            accelerator.wait_stream(outer, context.inner_reduction_stream)
        with accelerator.on_stream(outer):
            for group in groups:
                group.finish_window()
                if outer is not context.inner_reduction_stream:
                    group.finished_in = context.stats.steps

    def _close(self) -> None:
        """End the unit's backward: it rests, and the units around it may go on."""
        window = self._window
        if window.is_full or not window.declared:
            self._window = self._new_window()
        else:
            window.entered = 0
        self._change_phase(Phase.RESTING)
        if self._scope is not None:
            self._scope.__exit__(None, None, None)
            self._scope = None
        self.context.close_unit(self)
        for callback in tuple(self.callbacks):
            module = self.modules[0]()
            assert module is not None
            callback(module)

    def release_gradients(self) -> None:
        """Give the memory of dropped gradients back; see `ParameterGroup.release_gradients`."""
        for group in self.groups:
            group.release_gradients()

    def await_gather(self) -> None:
        """Put the current stream behind a gather that nobody waited for: it reads main weights.

        Ordering:
            Main weights may be written on the current stream from now on.
        """
        weights = self._weights
        if isinstance(weights, Gathered):
            with accelerator.annotate(self._label("await_gather")):
                # Edge 2: the gather may still read what is about to be written.
                accelerator.wait_event(self.context.current_stream(), weights.event)

    def check_complete(self) -> None:
        """Check that all gradients of the unit's window have come.

        Raises:
            StateError: some are still to come.
        """
        window = self._window
        if window.declared and 0 < window.count < window.expected:
            trainable = [member.fqn for member in self.members if member.full.requires_grad]
            missing = self._without_gradient()
            whose = f", none yet for {missing}" if missing else f" of {trainable}"
            msg = (
                f"a window of gradients must be whole when it is used, got unit {self.name!r} "
                f"mid-flight with {window.count}/{window.expected} gradients{whose}; run the "
                f"backwards that are missing, or declare another grad_accumulation_count"
            )
            raise self.context.located(StateValueError(msg, fqn=self.fqn))
        if any(group.awaits_finish for group in self.groups):
            msg = (
                f"the gradients of unit {self.name!r} must be complete when they are used, got none "
                f"from a last microbatch; run that backward inside microbatch(context, is_last=True)"
            )
            raise self.context.located(StateError(msg, fqn=self.fqn))
        if self.phase is Phase.BACKWARD:
            missing = self._without_gradient()
            msg = (
                f"all gradients of unit {self.name!r} must have come before they are used, got "
                f"none yet for {missing}; finish its backward first"
            )
            raise self.context.located(StateError(msg, fqn=self.fqn))
        if self._has_full_gradients:
            held = [member.fqn for member in self.members if member.full.grad is not None]
            msg = (
                f"the gradients of unit {self.name!r} must be reduced before they are used, got "
                f"unreduced ones for {held}; end a backward that is driven by hand with "
                f"context.post_backward()"
            )
            raise self.context.located(StateError(msg, fqn=self.fqn))

    def _without_gradient(self) -> list[str]:
        """Return the trainable parameters that have got no gradient in this window yet."""
        return [
            member.fqn
            for index, member in enumerate(self.members)
            if member.full.requires_grad and not self._window.fired[index]
        ]

    # -- recovery ----------------------------------------------------------------------------

    def reset(self) -> None:
        """Drop every trace of a broken pass: weights, window, gradients, phase."""
        self._reshard()
        self._calls = 0
        self._holders = 0
        self._uses.clear()
        self._hidden_uses = 0
        self._ran.clear()
        self._window = self._new_window()
        self._scope = None
        self.phase = Phase.RESTING
        for group in self.groups:
            group.drop_gradients()

    @property
    def has_gradient_hooks(self) -> bool:
        """Whether users hooked the sharded gradients."""
        return any(post_accumulate_hooks(sharded) for sharded, _ in self._pairs)

    def run_gradient_hooks(self) -> None:
        """Call what users registered on the sharded parameters, on their reduced gradients.

        Ordering:
            Requires that the current stream is behind the reductions.
        """
        for sharded, _ in self._pairs:
            if sharded.grad is not None:
                for hook in post_accumulate_hooks(sharded):
                    hook(sharded)

    def _full_name(self, fqn: str) -> str:
        """Return the name of a parameter relative to the unit's root."""
        return f"{self.fqn}.{fqn}" if self.fqn else fqn

    def parameters_without_grad(self) -> list[str]:
        """Return the names of trainable parameters without a sharded gradient."""
        return [
            self._full_name(member.fqn)
            for member in self.members
            if member.sharded.requires_grad and member.sharded.grad is None
        ]


def unit_of(module: nn.Module) -> ShardedUnit:
    """Return the unit that a sharded module is part of."""
    unit: ShardedUnit = module.__dict__["fsdp_unit"]
    return unit


def complete_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Check that the gradients of sharded parameters are complete, for something that uses them.

    Ordering:
        The current stream is put behind reductions that nobody waited for yet.

    Raises:
        StateError: some are still to come.
    """
    owners = [owner for parameter in parameters if (owner := owner_of(parameter)) is not None]
    complete_groups(living_group(owner) for owner in owners)


def refuse_closure(closure: object) -> None:
    """Check that a step was given no closure: the gradients that it makes would come too late.

    Raises:
        UnsupportedError: it was given one.
    """
    if closure is not None:
        msg = (
            "step must be called without a closure, got one, which would run inside the sharded step; "
            "call it before"
        )
        raise UnsupportedError(msg)


def complete_groups(groups: Iterable[ParameterGroup]) -> None:
    """Check that the gradients of parameter groups are complete; see `complete_gradients`."""
    units: dict[ShardedUnit, None] = {}
    for group in groups:
        unit = group.unit()
        if not isinstance(unit, ShardedUnit):
            raise without_model(group.members[0].fqn)
        units[unit] = None
    for unit in units:
        unit.context.check_backward_ended()
        unit.check_complete()
        unit.await_gather()
        if unit.context.has_unwaited_reductions:
            unit.context.finish_grad_sync()


class FsdpModule:
    """What `fully_shard` adds to a module's class."""

    fsdp_unit: ShardedUnit

    @property
    def context(self) -> FsdpContext:
        """The context that the unit belongs to."""
        return self.fsdp_unit.context

    @property
    def phase(self) -> Phase:
        """What the unit is doing."""
        return self.fsdp_unit.phase

    def unshard(self, prefetch: Direction = "none", *, recurse: bool = False) -> None:
        """Have the full weights in the module, readable on the current stream.

        Args:
            prefetch: also gather the units early that follow in this direction.
            recurse: also those of all units below, without prefetches.

        Ordering:
            Waits for the gather on the current stream, not on the host. Units that are gathered
            early are waited for when they are used, so nobody may write their weights before that.
        """
        for unit in self._units_below(recurse=recurse):
            unit.unshard()
        if prefetch != "none":
            assert isinstance(self, nn.Module)
            self.fsdp_unit.prefetch_successors(self, Phase(prefetch))

    def reshard(self, *, recurse: bool = False) -> None:
        """Free the full weights, if nobody uses them.

        Args:
            recurse: also those of all units below.

        Raises:
            StateError: the unit's forward or backward is running.
        """
        for unit in self._units_below(recurse=recurse):
            unit.reshard()

    def _units_below(self, *, recurse: bool) -> list[ShardedUnit]:
        if not recurse:
            return [self.fsdp_unit]
        assert isinstance(self, nn.Module)
        units = [each.fsdp_unit for each in self.modules() if isinstance(each, FsdpModule)]
        return list(dict.fromkeys(units))

    def register_post_backward_hook(self, callback: Callable[[nn.Module], None]) -> None:
        """Have `callback` called with the unit's first module when a backward of it is over."""
        unit = self.fsdp_unit
        if unit.policy.register_hooks or any(group.is_trainable for group in unit.groups):
            unit.callbacks.append(callback)
            return
        # Nothing of the unit takes part in backward, so its module has to tell.
        assert isinstance(self, nn.Module)
        self.register_full_backward_hook(lambda module, _inputs, _outputs: callback(module))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:  # noqa: FBT001, FBT002 - the signature of nn.Module
        """Move or convert what is not sharded; sharded parameters must stay as they are.

        Raises:
            StateError: the change would give sharded parameters another device or dtype.
        """
        with self.fsdp_unit.hidden_parameters(fn):
            return super()._apply(fn, recurse)  # type: ignore[misc]

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Refuse: a copy would share streams and buffers with the original.

        Raises:
            StateError: always.
        """
        msg = (
            f"a sharded {type(self).__name__} cannot be copied or pickled; build a second model, "
            f"shard it and load_state_dict the first one's state, or copy the model before sharding"
        )
        raise self.context.located(StateError(msg, fqn=self.fsdp_unit.fqn))
