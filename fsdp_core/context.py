"""FsdpContext, PrefetchOrder: streams, roots, names, orders, completion.

What concerns several units is decided here; what concerns one, in `module.py`. A context knows
units only through the small protocol `Unit`.
"""

import warnings
import weakref
from collections.abc import Container, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from fsdp_core import device as accelerator
from fsdp_core.agreement import agree_on_events
from fsdp_core.collectives import MeshAxes
from fsdp_core.device import Stream
from fsdp_core.errors import ConfigError, ConfigTypeError, StateError, UnsupportedError, check_type
from fsdp_core.execution_order import ExecutionEvent, ExecutionOrder
from fsdp_core.phase import Phase
from fsdp_core.runtime_policy import RuntimePolicy
from fsdp_core.torch_private import current_graph_task, in_graph_task, queue_backward_callback

# Events that the message about a diverging pass repeats.
LAST_EVENTS = 4


Error = TypeVar("Error", bound=Exception)


class PrefetchOrder(Enum):
    """Where the order of prefetches comes from.

    REGISTRATION  units run in the order of the module tree; a deviation is followed, with a warning
    RECORDED      the first pass is recorded and repeated; a deviation is an error
    """

    REGISTRATION = "registration"
    RECORDED = "recorded"


class Unit(Protocol):
    """What a context needs of a unit.

    Attributes:
        ref: the unit, weakly.
        fqn: names of its modules relative to their roots.
        name: how messages and ranges call it: by its fqn, and by its root's number where the
            context has several roots.
        modules: its modules, weakly.
        enclosing: the units whose forward called this one, at its last use in backward.
        full_numel: elements of its whole parameters.
        axes: the mesh that its parameters lie on.
        notes_events: its hooks note when it enters a phase.
    """

    ref: "weakref.ref[Any]"
    fqn: str
    name: str
    modules: tuple["weakref.ref[nn.Module]", ...]
    enclosing: tuple["weakref.ref[Any]", ...]
    full_numel: int
    axes: MeshAxes

    @property
    def notes_events(self) -> bool:
        """Whether its hooks note when it enters a phase."""

    def prefetch(self) -> None:
        """Gather the weights early, if they are not there."""

    def leave_section(self) -> None:
        """Reshard: backward has moved on; complete the unit if no use of it is still to come."""

    def take_gradients(self) -> None:
        """Open, if full gradients are there that no backward pass of autograd brought."""

    def complete(self) -> None:
        """Complete whatever is open: the backward pass is over."""

    def finish_window(self) -> None:
        """Bring gradients into optimizer placements: the last microbatch is over."""

    @property
    def has_gradient_hooks(self) -> bool:
        """Whether users hooked the sharded gradients."""

    def forget_hidden_uses(self) -> None:
        """Note that no graph is left that could recompute a call."""

    def run_gradient_hooks(self) -> None:
        """Call what users registered on the sharded parameters."""

    def release_gradients(self) -> None:
        """Give the memory of gradients back that were dropped."""

    def retry(self) -> None:
        """Complete if only an open unit inside this one was waited for."""

    def end_forward(self, *, sweep: bool) -> None:
        """Reshard what an outermost forward has left over."""

    def come_to_rest(self) -> None:
        """Reshard if nobody uses the weights."""

    def reset(self) -> None:
        """Drop every trace of a broken pass."""

    def parameters_without_grad(self) -> Iterable[str]:
        """Return the names of trainable parameters without a sharded gradient."""


@dataclass
class ContextStats:
    """What a context has done since its construction.

    Attributes:
        steps: completions of a backward pass.
        gathers: all-gathers issued; a unit of several dtypes counts several.
        reductions: gradient reductions issued, one for each group and window.
        prefetches: units gathered early.
        used_prefetches: of these, how many were then used.
        unused_prefetches: of these, how many were resharded without a use.
        on_demand_gathers: units gathered when they were needed.
        full_nbytes: bytes of full weights now.
        peak_full_nbytes: the highest value of `full_nbytes`.
    """

    steps: int = 0
    gathers: int = 0
    reductions: int = 0
    prefetches: int = 0
    used_prefetches: int = 0
    unused_prefetches: int = 0
    on_demand_gathers: int = 0
    full_nbytes: int = 0
    peak_full_nbytes: int = 0


@dataclass(slots=True)
class Call:
    """One forward in progress.

    Attributes:
        unit: the unit.
        module: which of its modules runs.
        recomputing: it runs inside a backward pass.
        scope: the open annotation.
        exception: what was being handled when it began.
        first_node: number that the first autograd node of the call gets.
    """

    unit: Unit
    module: nn.Module
    recomputing: bool
    scope: AbstractContextManager[Any]
    exception: BaseException | None
    first_node: int


class FsdpContext:
    """What the units of a training program share: streams, order of prefetches, completion.

    It holds no module: deleting a model frees all of it while the context lives.

    Attributes:
        device: where units compute.
        runtime_policy: the switches.
        allgather_stream: gathers, and the memory of full weights.
        inner_reduction_stream: gradient reductions, and the memory of gradient buffers.
        outer_reduction_stream: the reduction that ends a window; the inner stream itself unless
            `overlap_outer_communication`.
        is_last_microbatch: whether a backward ends a window; set by `microbatch`.
        use_symmetric_memory: as in the policy.
        caller_managed_grad_sync: as in the policy.
        execution_order: the events of one pass, and where this one is.
        stats: what was done so far.
        calls: forwards in progress, outermost first.
        evaluating: the outermost forward was entered with gradients disabled.
        graph_task: the backward pass that the context completes.
        has_unwaited_reductions: no stream was put behind the last reductions yet.
        parameter_to_owner: the rank that owns each whole parameter; None once finalized.
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        runtime_policy: RuntimePolicy | None = None,
        parameter_to_owner: dict[nn.Parameter, int] | None = None,
        prefetch_order: PrefetchOrder = PrefetchOrder.REGISTRATION,
    ) -> None:
        self.device = _resolve_device(device)
        self.runtime_policy = policy = RuntimePolicy() if runtime_policy is None else runtime_policy
        check_type("runtime_policy", policy, RuntimePolicy)
        check_type("parameter_to_owner", parameter_to_owner or {}, dict)
        check_type("prefetch_order", prefetch_order, PrefetchOrder)
        if policy.use_symmetric_memory:
            msg = "use_symmetric_memory is not built, got True; leave it False"
            raise UnsupportedError(msg)
        self.prefetch_order = prefetch_order
        self._recording = prefetch_order is PrefetchOrder.RECORDED
        self.allgather_stream: Stream = accelerator.new_stream(self.device)
        self.inner_reduction_stream: Stream = (
            accelerator.new_stream(self.device)
            if policy.overlap_allgather_reduction
            else self.allgather_stream
        )
        self.outer_reduction_stream: Stream = (
            accelerator.new_stream(self.device)
            if policy.overlap_outer_communication
            else self.inner_reduction_stream
        )
        self.is_last_microbatch = True
        self.use_symmetric_memory = policy.use_symmetric_memory
        self.caller_managed_grad_sync = policy.caller_managed_grad_sync
        self.execution_order = ExecutionOrder()
        self.stats = ContextStats()
        self.calls: list[Call] = []
        self.evaluating = False
        self.graph_task = -1
        self.has_unwaited_reductions = False
        self.parameter_to_owner = parameter_to_owner
        self._roots: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
        self._module_names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        # Index of each module's event in the registration order; empty under RECORDED.
        self._positions: dict[Phase, WeakKeyDictionary[nn.Module, int]] = {}
        self._post_backward_hook_registered = False
        self._registered: dict[nn.Module, Unit] = {}
        self._finalized = False
        self._forward_start = 0
        self._graphs = 0
        self._live_graphs: list[weakref.ref[Any]] = []
        self._hidden: dict[weakref.ref[Unit], None] = {}
        self._units: list[weakref.ref[Unit]] = []
        self._unsharded: dict[weakref.ref[Unit], None] = {}
        self._open: list[Unit] = []
        self._unfinished: dict[weakref.ref[Unit], None] = {}
        self._reduced: dict[weakref.ref[Unit], None] = {}
        self._evaluated: dict[weakref.ref[nn.Module], None] = {}
        self._gathers_are_joined = False
        self._deviation: tuple[str, str] | None = None
        self._deviation_before: tuple[str, str] | None = None

    # -- construction ------------------------------------------------------------------------

    @property
    def is_finalized(self) -> bool:
        """Whether the construction scope has ended."""
        return self._finalized

    @property
    def is_recording_execution_order(self) -> bool:
        """Whether the present pass is the one that later passes must repeat."""
        return self._recording

    def register_module(self, module: nn.Module, unit: Unit) -> None:
        """Add a module of a unit: the last act of a successful `fully_shard`.

        Raises:
            StateError: the construction scope has ended.
        """
        if self._finalized:
            msg = (
                "units must be registered inside the construction scope, got one after it ended; "
                "shard all modules before leaving it"
            )
            raise StateError(msg)
        self._registered[module] = unit

    def abandon(self) -> None:
        """Let go of the units of a construction scope that raised: they can never run."""
        self._registered.clear()

    def finalize(self) -> None:
        """Derive roots, names and both orders from the module trees; ends construction.

        Raises:
            StateError: called a second time.
        """
        if self._finalized:
            msg = "a context is finalized once, when its construction scope ends; got a second call"
            raise StateError(msg)
        children: dict[nn.Module, None] = {}
        for module in self._registered:
            _collect_fsdp_children(module, self._registered, children)
        roots = [module for module in self._registered if module not in children]
        self._roots.update(dict.fromkeys(roots))
        forward: dict[nn.Module, int] = {}
        for number, root in enumerate(roots):
            self._name_modules(root, number, forward)
        backward: dict[nn.Module, None] = {}
        for root in reversed(roots):
            _collect_backward_order(root, self._registered, backward)
        self._name_units(forward)
        if not self._recording:
            self._fill_order(Phase.FORWARD, forward)
            self._fill_order(Phase.BACKWARD, backward)
        self._registered.clear()
        self.parameter_to_owner = None
        self._finalized = True

    def _name_modules(self, root: nn.Module, number: int, order: dict[nn.Module, int]) -> None:
        for name, module in root.named_modules():
            if module in self._registered and module not in order:
                order[module] = number
                self._module_names[module] = name

    def _name_units(self, roots: dict[nn.Module, int]) -> None:
        """Tell each unit the names of its modules, given the number of each module's root."""
        units = dict.fromkeys(self._registered.values())
        for unit in units:
            modules = [module for ref in unit.modules if (module := ref()) is not None]
            unit.fqn = "+".join(self._module_names[module] for module in modules)
            unit.name = unit.fqn or "<root>"
            if len(self._roots) > 1:
                unit.name += f" (root {roots[modules[0]]})"
            self._units.append(unit.ref)

    def _fill_order(self, phase: Phase, modules: Iterable[nn.Module]) -> None:
        positions = self._positions[phase] = WeakKeyDictionary()
        for module in modules:
            positions[module] = len(self.execution_order)
            self.execution_order.append(ExecutionEvent(module, phase))

    def is_root(self, module: nn.Module) -> bool:
        """Whether no unit of this context lies above a module's; False before `finalize`."""
        return module in self._roots

    def module_name(self, module: nn.Module) -> str:
        """Return a unit's path relative to its root; a root's is empty.

        Raises:
            StateError: before `finalize`, or the module is no unit of this context.
        """
        self.ensure_finalized()
        name = self._module_names.get(module)
        if name is None:
            msg = (
                f"module_name needs a unit of this context, got a {type(module).__name__}; pass a "
                f"module that was sharded inside its scope"
            )
            raise self.located(StateError(msg))
        return name

    def ensure_finalized(self, called: nn.Module | None = None) -> None:
        """Check that construction has ended, before `called` may run.

        Raises:
            StateError: the construction scope is still open, or was left by an exception.
        """
        if not self._finalized:
            what = "one" if called is None else type(called).__name__
            msg = (
                "a unit must not run inside the construction scope, or after one that raised, got a "
                f"call of {what}; leave `with fully_shard_context()` first"
            )
            raise self.located(StateError(msg))

    def ensure_has_model(self) -> None:
        """Check that some unit lives, for calls that would otherwise do nothing, silently.

        Raises:
            StateError: all models that were sharded in the scope are gone.
        """
        if self._units and all(ref() is None for ref in self._units):
            msg = (
                "a context must not be used when its model is gone, got a call after that; shard the "
                "new model inside a new fully_shard_context()"
            )
            raise self.located(StateError(msg))

    # -- forward -----------------------------------------------------------------------------

    def current_stream(self) -> Stream:
        """Return the stream that computes now."""
        return accelerator.current_stream(self.device)

    def begin_forward(self) -> None:
        """Begin an outermost forward outside any backward pass.

        Ordering:
            The all-gather stream is put behind the current one, so behind the last writes of the
            weights.
        """
        if self._is_broken_off:
            warnings.warn(
                "the last backward pass of this FsdpContext did not end; the context was reset "
                "and all its gradients were dropped, since part of them may be missing",
                stacklevel=2,
            )
            self.reset()
        self.evaluating = not torch.is_grad_enabled()
        self._forward_start = self._pass_length()
        self._join_gathers()
        if not self.evaluating and not self.has_unwaited_reductions:
            # Edge 4 comes before the reduction stream allocates again.
            for unit in self._living(self._units):
                unit.release_gradients()

    def _join_gathers(self) -> None:
        # Edge 1: gathers read weights that the optimizer or an initialiser wrote on this stream.
        accelerator.wait_stream(self.allgather_stream, self.current_stream())
        self._gathers_are_joined = True

    def begin_recomputation(self, module: nn.Module) -> None:
        """Begin a forward inside a backward pass: it may be the first that this pass enters.

        Ordering:
            For a root, the all-gather stream is put behind the current one.
        """
        self.begin_backward()
        if self.is_root(module):
            # Edge 1: a capture that begins here must hold the gather that follows.
            accelerator.wait_stream(self.allgather_stream, self.current_stream())

    def end_forward(self, *, failed: bool) -> None:
        """End an outermost forward: what is left over from it comes to rest.

        Prefetches of a training forward stay: backward may use them, and completion ends them.
        """
        for unit in self._living(self._unsharded):
            unit.end_forward(sweep=failed or self.evaluating)
        if failed and not self.evaluating:
            self._rewind(self._forward_start)
        self.evaluating = False

    def sweep(self) -> None:
        """Bring unused prefetches to rest: no backward will come that could use them."""
        for unit in self._living(self._unsharded):
            unit.end_forward(sweep=True)

    def _pass_length(self) -> int:
        """Return how many events this pass has had."""
        return len(self.execution_order) if self._recording else self.execution_order.position

    def _rewind(self, length: int) -> None:
        """Take back all events of this pass but the first `length`."""
        if self._recording:
            self.execution_order.truncate(length)
        else:
            self.execution_order.move_to(length)

    def note(self, module: nn.Module, phase: Phase) -> None:
        """Note that a unit's module enters a phase: the cursor moves behind this event.

        Raises:
            StateError: the recorded pass has another event here.
        """
        if self._recording:
            self.execution_order.append(ExecutionEvent(module, phase))
        elif self.execution_order.consume(module, phase):
            return
        elif self.prefetch_order is PrefetchOrder.RECORDED:
            raise self._divergence(ExecutionEvent(module, phase))
        else:
            self._move_cursor(module, phase)

    def note_evaluated(self, module: nn.Module) -> None:
        """Note that a module ran without gradients: it may be recomputed in this pass' backward."""
        self._evaluated[weakref.ref(module)] = None

    def _divergence(self, event: ExecutionEvent) -> StateError:
        """Say how an event differs from the recorded one."""
        order = self.execution_order
        position, unit = order.position, self._unit_of(event.module)
        if position == 0 and event.phase is Phase.BACKWARD:
            msg = (
                f"step {self.stats.steps}: RECORDED needs one backward call per pass, got another "
                f"one that enters unit {unit.name!r}; add the losses, or use REGISTRATION"
            )
            return self.located(StateError(msg, fqn=unit.fqn))
        expected = order.peek()
        before = [order.peek(-offset) for offset in range(min(position, LAST_EVENTS), 0, -1)]
        hint = "call context.reset() and repeat the recorded pass, or use REGISTRATION"
        if event.phase is Phase.FORWARD:
            hint += "; run validation under torch.no_grad()"
        msg = (
            f"step {self.stats.steps}: a pass must repeat the recorded one, got "
            f"{self._describe(event)} at position {position} of {len(order)}, expected "
            f"{self._describe(expected)}; before it came "
            f"[{', '.join(self._describe(each) for each in before)}]; {hint}"
        )
        return self.located(StateError(msg, fqn=unit.fqn))

    def _describe(self, event: ExecutionEvent | None) -> str:
        if event is None:
            return "the end"
        unit = self._unit_of(event.module)
        of_module = f" (module {self._module_names[event.module]!r})" if unit.modules[1:] else ""
        return f"{unit.name}{of_module} {event.phase.value}"

    def _move_cursor(self, module: nn.Module, phase: Phase) -> None:
        """Follow a module that was called out of order; warn once for each change of order."""
        order, unit = self.execution_order, self._unit_of(module)
        position = self._positions[phase][module]
        if order.position == position + 1:
            return  # once more, right behind its own event: nothing else was passed over
        # A backward whose forward came before an earlier backward begins where it is, too.
        restarts = not order.position if phase is Phase.BACKWARD else not self.calls
        while (expected := order.peek()) and self._is_passed_over(expected, position):
            order.move_to(order.position + 1)
        if order.position == position:
            expected = None
        if expected is not None and not restarts and self._deviation is None:
            name = self._unit_of(expected.module).name
            self._deviation = (f"{name}, {expected.phase}", f"{unit.name}, {phase}")
            if self._deviation != self._deviation_before:
                warnings.warn(
                    f"step {self.stats.steps}: unit {name!r} was expected to enter its "
                    f"{expected.phase.value} next, got the {phase.value} of "
                    f"{unit.name!r}; prefetches follow registration order, so some are "
                    f"wasted (PrefetchOrder.RECORDED follows the order of the first pass)",
                    stacklevel=2,
                )
        order.move_to(position + 1)

    def _is_passed_over(self, event: ExecutionEvent, position: int) -> bool:
        """Whether nothing is wasted where this event does not come before the one at `position`.

        Nobody says when a unit without hooks runs, or that every module of a unit of several does;
        backward passes by a unit that returns its input untouched; and a reentrant checkpoint runs
        the forward without gradients.
        """
        if self.execution_order.position == position:
            return False
        unit = self._unit_of(event.module)
        has_run = event.phase is Phase.FORWARD and weakref.ref(event.module) in self._evaluated
        is_awaited = unit.notes_events and unit.full_numel and len(unit.modules) == 1
        return has_run or not is_awaited

    def prefetch(self, module: nn.Module, phase: Phase, numel_max: int | None) -> None:
        """Gather the units early that follow in the order, within a budget.

        Args:
            module: of the unit that runs now, whose own further events are passed over.
            phase: the direction; units of the other one are never gathered early.
            numel_max: the budget in elements; None: one unit.
        """
        if self._recording or (self.evaluating and not self._positions):
            return
        order, unit = self.execution_order, self._unit_of(module)
        offset = self._positions[phase][module] + 1 - order.position if self._positions else 0
        numel = 0
        while numel_max is None or numel < numel_max:
            event = order.peek(offset)
            if event is None or event.phase is not phase:
                return
            offset += 1
            successor = self._unit_of(event.module)
            if successor is unit:
                continue
            if self.evaluating and self.is_root(event.module):
                return
            successor.prefetch()
            if numel_max is None:
                return
            numel += successor.full_numel

    @staticmethod
    def _unit_of(module: nn.Module) -> Unit:
        unit: Unit = module.__dict__["fsdp_unit"]
        return unit

    def note_unsharded(self, unit: Unit, nbytes: int) -> None:
        """Count a unit whose full weights exist from now on."""
        self._unsharded[unit.ref] = None
        self.stats.full_nbytes += nbytes
        self.stats.peak_full_nbytes = max(self.stats.peak_full_nbytes, self.stats.full_nbytes)

    def note_resharded(self, unit: Unit, nbytes: int) -> None:
        """Count a unit whose full weights are gone."""
        del self._unsharded[unit.ref]
        self.stats.full_nbytes -= nbytes

    @staticmethod
    def _living(refs: Iterable["weakref.ref[Unit]"]) -> list[Unit]:
        """Return the units behind weak references, in order, that still live."""
        return [unit for ref in tuple(refs) if (unit := ref()) is not None]

    # -- backward ----------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Register the completion of this backward pass, once."""
        if not self._post_backward_hook_registered:
            self.register_post_backward_hook()

    def register_post_backward_hook(self) -> None:
        """Have `post_backward` called when the running backward pass ends.

        Ordering:
            The reduction stream is put behind the current one, which is how it joins a CUDA graph
            capture.

        Raises:
            StateError: no backward pass is running.
        """
        if not in_graph_task():
            msg = (
                "register_post_backward_hook needs a running backward pass, got a call outside one; "
                "drive a backward by hand with context.post_backward() at its end"
            )
            raise self.located(StateError(msg))
        queue_backward_callback(self.post_backward)
        self._note_backward()

    def _note_backward(self) -> None:
        self._post_backward_hook_registered = True
        self.graph_task = current_graph_task()
        if not self._gathers_are_joined:
            # No forward came since the last backward, behind which weights may have been written.
            self._join_gathers()
        # Edge 4: the first memory that the reduction stream takes must lie inside a capture.
        accelerator.wait_stream(self.inner_reduction_stream, self.current_stream())

    def open_unit(self, unit: Unit) -> None:
        """Note that a unit's backward has begun."""
        self._open.append(unit)

    def close_unit(self, unit: Unit) -> None:
        """Note that a unit's backward is over; units around it may have waited for that."""
        if unit in self._open:
            self._open.remove(unit)
        for other in reversed(tuple(self._open)):
            other.retry()

    def encloses_open_unit(self, unit: Unit) -> bool:
        """Whether a unit that was called inside `unit` is still open."""
        return any(unit.ref in other.enclosing for other in self._open)

    def leave_sections(self, unit: Unit, enclosing: tuple["weakref.ref[Any]", ...]) -> None:
        """Backward enters `unit`: it has left every open unit that does not enclose it.

        Why that holds: the engine runs nodes in the reverse order of their making, so what a
        unit's forward made runs in one piece.
        """
        for other in tuple(self._open):
            if other is not unit and other.ref not in enclosing and other in self._open:
                other.leave_section()

    def validate_grad_sync(self, unit: Unit | None = None) -> None:
        """Check that somebody will order the current stream after a reduction issued now.

        Raises:
            StateError: no completion is pending and the caller does not manage it.
        """
        if not self.caller_managed_grad_sync and not self._post_backward_hook_registered:
            of_unit = "" if unit is None else f" of unit {unit.name!r}"
            msg = (
                f"a reduction must be issued inside a backward pass, got one{of_unit} after its end, "
                f"which nobody would wait for; use RuntimePolicy(caller_managed_grad_sync=True) and "
                f"call context.finish_grad_sync() behind the last gradient"
            )
            raise self.located(StateError(msg, fqn=None if unit is None else unit.fqn))

    def note_reduced(self, unit: Unit) -> None:
        """Note that a reduction of a unit was issued in this pass."""
        self.has_unwaited_reductions = True
        self._reduced[unit.ref] = None

    def _run_gradient_hooks(self) -> None:
        """Call users' hooks of sharded gradients, each once for a backward pass.

        Ordering:
            The current stream is behind the reductions, if there is a hook at all.
        """
        hooked = [unit for unit in self._living(self._reduced) if unit.has_gradient_hooks]
        self._reduced.clear()
        if hooked and self.has_unwaited_reductions:
            self.finish_grad_sync()
        for unit in hooked:
            unit.run_gradient_hooks()

    def note_unfinished(self, unit: Unit) -> None:
        """Note that a unit has gradients which the last microbatch will complete."""
        self._unfinished[unit.ref] = None

    def begin_microbatch(self) -> tuple[int, int]:
        """Return how many forwards with a graph, and how many completions, there were so far."""
        return self._graphs, self.stats.steps

    def end_microbatch(self, seen: tuple[int, int]) -> None:
        """End a microbatch; complete the window if it is the last and had no backward.

        Args:
            seen: what `begin_microbatch` returned.

        Raises:
            StateError: it had a forward, but no backward.
        """
        graphs, steps = seen
        if self.stats.steps > steps or self._post_backward_hook_registered:
            return
        if self._graphs > graphs:
            msg = (
                "the backward of a microbatch must run inside its scope, which is where the last "
                "one is told from the others, got a scope around a forward alone; put both inside"
            )
            raise self.located(StateError(msg))
        if self.is_last_microbatch:
            self._finish_windows()
            if not self.caller_managed_grad_sync:
                self.finish_grad_sync()

    def _finish_windows(self) -> None:
        """Complete all gradients of the window, also those that its last microbatch did not use."""
        for unit in self._living(self._unfinished):
            unit.finish_window()
        self._unfinished.clear()

    def note_graph(self, use: object) -> None:
        """Note that an outermost forward gave something that backward can enter."""
        self._graphs += 1
        self._live_graphs.append(weakref.ref(use))

    def note_hidden_use(self, unit: Unit) -> None:
        """Note that a unit was called where a graph's backward may call it again."""
        self._hidden[unit.ref] = None

    def _forget_hidden_uses(self) -> None:
        """Let go of calls that no graph can recompute any more."""
        self._live_graphs = [ref for ref in self._live_graphs if _is_unentered(ref())]
        if not self._live_graphs:
            for unit in self._living(self._hidden):
                unit.forget_hidden_uses()
            self._hidden.clear()

    def check_backward_ended(self) -> None:
        """Check that no backward pass broke off: some of its gradients would be missing.

        Raises:
            StateError: the last one raised, or was driven by hand and not ended.
        """
        if self._is_broken_off:
            msg = (
                "a backward pass must end before its gradients are used, got one that raised, or that "
                "was driven by hand without context.post_backward(); call context.reset(), which drops "
                "all gradients, and repeat the step"
            )
            raise self.located(StateError(msg))

    @property
    def _is_broken_off(self) -> bool:
        """Whether a backward pass began that neither runs now nor has ended."""
        return self._post_backward_hook_registered and not in_graph_task()

    def finish_grad_sync(self) -> None:
        """Put the current stream behind all reductions so far.

        Where the caller manages that, prefetches that nobody has used are brought to rest too.

        Ordering:
            Call it behind the last producer of gradients and before the first reader or writer
            of `.grad`. The host does not wait.
        """
        with accelerator.annotate("complete"):
            # Edge 7: the optimizer reads what the reduction streams wrote.
            accelerator.wait_stream(self.current_stream(), self.inner_reduction_stream)
            if self.outer_reduction_stream is not self.inner_reduction_stream:
                # Edge 7: the same, for the reduction that ends a window.
                accelerator.wait_stream(self.current_stream(), self.outer_reduction_stream)
            if self.caller_managed_grad_sync:
                self.sweep()  # of a forward without a backward, which nothing has swept since
        self.has_unwaited_reductions = False

    def post_backward(self) -> None:
        """Complete a backward pass: called by autograd, or by whoever drives one by hand.

        By hand means that the caller computed gradients (`torch.autograd.grad`) and put them on
        the full parameters, so that no hook has told of them.

        Ordering:
            After the last microbatch the current stream is behind every reduction, unless the
            caller manages that.

        Raises:
            StateError: driven by hand, and the model is gone.
        """
        if not self._post_backward_hook_registered:
            self.ensure_has_model()
            self._note_backward()
            for unit in self._living(self._units):
                unit.take_gradients()
        self._run_delayed_post_backward_callbacks()
        if self.is_last_microbatch:
            self._finish_windows()
        for unit in self._living(self._unsharded):
            unit.come_to_rest()
        if self.is_last_microbatch and not self.caller_managed_grad_sync:
            self.finish_grad_sync()
        self._post_backward_hook_registered = False
        self._run_gradient_hooks()
        self._forget_hidden_uses()
        self._deviation_before, self._deviation = self._deviation, None
        self.stats.steps += 1
        self._end_pass()

    def _end_pass(self) -> None:
        """Freeze the recorded pass, or check that it was repeated to its end.

        Raises:
            StateError: ranks ran different passes, or this one ended early.
        """
        self._evaluated.clear()
        self._gathers_are_joined = False
        order = self.execution_order
        if self._recording:
            if len(order):
                self._freeze()
            return
        ended, expected = order.position, order.peek()
        order.move_to(0)
        if self.prefetch_order is PrefetchOrder.RECORDED and ended not in (0, len(order)):
            msg = (
                f"step {self.stats.steps - 1}: a pass must repeat the recorded one, got its end at "
                f"position {ended} of {len(order)}, expected {self._describe(expected)}; use "
                f"REGISTRATION if passes differ"
            )
            raise self.located(StateError(msg))

    def _freeze(self) -> None:
        """End recording, once the ranks have agreed that they ran the same pass."""
        events = list(self.execution_order)
        roots = list(self._roots)
        described = [
            (self._root_index(event.module, roots), self._describe(event)) for event in events
        ]
        meshes: dict[tuple[Any, ...], MeshAxes] = {}
        for unit in self._living(self._units):
            meshes.setdefault(unit.axes.process_groups, unit.axes)
        try:
            for axes in meshes.values():
                mine = [
                    each
                    for each, event in zip(described, events, strict=True)
                    if self._unit_of(event.module).axes.process_groups == axes.process_groups
                ]
                agree_on_events(mine, axes)
        except StateError:
            self.execution_order.truncate(0)
            raise
        self._recording = False

    @staticmethod
    def _root_index(module: nn.Module, roots: list[nn.Module]) -> int:
        return next(i for i, root in enumerate(roots) if module in root.modules())

    def _run_delayed_post_backward_callbacks(self) -> None:
        """Complete every unit that is still open, inner ones before those around them."""
        for unit in reversed(tuple(self._open)):
            if unit in self._open:
                unit.complete()

    # -- errors and recovery -----------------------------------------------------------------

    def located(self, error: Error) -> Error:
        """Say in a note on which rank and in which step something went wrong."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        window = "" if self.is_last_microbatch else ", not in the last microbatch of its window"
        error.add_note(f"on rank {rank}, in step {self.stats.steps}{window}")
        return error

    def reset(self) -> None:
        """Bring everything to rest after a pass that broke, and drop all gradients.

        Why all: a window that was partly reduced cannot be told from a whole one.

        Ordering:
            The current stream is put behind all streams of the context.
        """
        self.calls.clear()
        self._open.clear()
        self._unfinished.clear()
        self._evaluated.clear()
        self._reduced.clear()
        self.evaluating = False
        for unit in self._living(self._units):
            unit.reset()
        self.finish_grad_sync()
        self._post_backward_hook_registered = False
        self._rewind(0)
        self._deviation = None

    def parameters_without_grad(self) -> list[str]:
        """Return the names of all trainable parameters that have no gradient now."""
        return [
            name for unit in self._living(self._units) for name in unit.parameters_without_grad()
        ]


def _is_unentered(use: Any) -> bool:
    """Whether a call's graph lives and no backward pass has entered it yet."""
    return use is not None and use.graph_task == -1


def _resolve_device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return accelerator.default_device()
    resolved: object = device
    if isinstance(device, str):
        with suppress(RuntimeError):  # no name of a device, and refused below
            resolved = torch.device(device)
    if not isinstance(resolved, torch.device):  # PyTorch would take 7 for the eighth GPU
        msg = f"a context needs a cpu or cuda device, got {device!r}"
        raise ConfigTypeError(msg)
    if resolved.type not in ("cpu", "cuda"):
        msg = f"a context needs a cpu or cuda device, got {device}"
        raise ConfigError(msg)
    accelerator.check_is_there(resolved)
    return accelerator.default_device(resolved.type) if resolved.index is None else resolved


def _collect_fsdp_children(
    module: nn.Module, registered_modules: Container[nn.Module], children: dict[nn.Module, None]
) -> None:
    """Collect the nearest registered descendants of a module, not looking inside them."""
    for child in module.children():
        if child in registered_modules:
            children[child] = None
        else:
            _collect_fsdp_children(child, registered_modules, children)


def _collect_backward_order(
    module: nn.Module, registered_modules: Container[nn.Module], order: dict[nn.Module, None]
) -> None:
    """Collect the order in which backward enters units: outer before inner, last before first.

    Why not the forward order reversed: the outputs of an outer unit get their gradients before
    those of the units inside it.
    """
    if module in registered_modules:
        order.setdefault(module, None)
    for child in reversed(tuple(module.children())):
        _collect_backward_order(child, registered_modules, order)
