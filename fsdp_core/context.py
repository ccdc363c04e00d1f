"""FsdpContext: streams of a training program, and the beginning and end of its passes.

What concerns several units is decided here; what concerns one, in `unit.py`. A context knows
units only through the small protocol `Unit`.
"""

import warnings
import weakref
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from fsdp_core import device as accelerator
from fsdp_core.context_stats import ContextStats
from fsdp_core.device import Stream
from fsdp_core.errors import StateError, UnsupportedError, check_type
from fsdp_core.execution_order import ExecutionOrder
from fsdp_core.identity import Identity
from fsdp_core.module_tree import ModuleTree, living
from fsdp_core.module_tree import _collect_backward_order as _collect_backward_order
from fsdp_core.module_tree import _collect_fsdp_children as _collect_fsdp_children
from fsdp_core.open_units import OpenUnits
from fsdp_core.phase import Phase
from fsdp_core.prefetcher import Prefetcher, PrefetchOrder
from fsdp_core.runtime_policy import RuntimePolicy
from fsdp_core.torch_private import current_graph_task, in_graph_task, queue_backward_callback
from fsdp_core.unit_protocol import Call, Unit
from fsdp_core.uses import LiveGraphs

Error = TypeVar("Error", bound=Exception)


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
        stats: what was done so far.
        calls: forwards in progress, outermost first.
        calls_begun: how many there were so far.
        open_units: units whose backward is not over.
        graphs: outermost forwards whose backward is still to come.
        evaluating: the outermost forward was entered with gradients disabled.
        graph_task: the backward pass that the context completes.
        trainability_changes: how often a unit has found parameters frozen or unfrozen.
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
        self.device = accelerator.resolve_device(device)
        self.runtime_policy = policy = RuntimePolicy() if runtime_policy is None else runtime_policy
        check_type("runtime_policy", policy, RuntimePolicy)
        check_type("parameter_to_owner", parameter_to_owner or {}, dict)
        check_type("prefetch_order", prefetch_order, PrefetchOrder)
        if policy.use_symmetric_memory:
            msg = "use_symmetric_memory is not built, got True; leave it False"
            raise UnsupportedError(msg)
        self.prefetch_order = prefetch_order
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
        self.stats = ContextStats()
        self.calls: list[Call] = []
        self.calls_begun = 0
        self.open_units = OpenUnits()
        self.graphs = LiveGraphs()
        self.evaluating = False
        self.graph_task = -1
        self.trainability_changes = 0
        self.has_unwaited_reductions = False
        self.parameter_to_owner = parameter_to_owner
        self._tree = ModuleTree()
        self._roots = self._tree.roots
        self._module_names = self._tree.names
        self._prefetcher = Prefetcher(prefetch_order, self._tree)
        self._registered: dict[nn.Module, Unit] = {}
        self._finalized = False
        self._post_backward_hook_registered = False
        self._forward_start = 0
        self._gathers_are_joined = False
        self._unsharded: dict[weakref.ref[Any], None] = {}
        self._unfinished: dict[weakref.ref[Any], None] = {}
        self._reduced: dict[weakref.ref[Any], None] = {}
        self._reduced_late: dict[weakref.ref[Any], None] = {}

    # -- construction ------------------------------------------------------------------------

    @property
    def is_finalized(self) -> bool:
        """Whether the construction scope has ended."""
        return self._finalized

    @property
    def is_recording_execution_order(self) -> bool:
        """Whether the present pass is the one that later passes must repeat."""
        return self._prefetcher.is_recording

    @property
    def execution_order(self) -> ExecutionOrder:
        """The events of one pass, and where this one is."""
        return self._prefetcher.execution_order

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
            msg = (
                "a context is finalized once, when its construction scope ends, got a second call; "
                "leave it to `with fully_shard_context()`"
            )
            raise StateError(msg)
        forward, backward = self._tree.derive(self._registered)
        self._prefetcher.follow_registration(forward, backward)
        self._registered.clear()
        self.parameter_to_owner = None
        self._finalized = True

    @property
    def roots(self) -> list[nn.Module]:
        """The living modules with no unit above them."""
        return list(self._roots)

    def is_root(self, module: nn.Module) -> bool:
        """Whether no unit of this context lies above a module's; False before `finalize`."""
        return module in self._tree.roots

    def module_name(self, module: nn.Module) -> str:
        """Return a unit's path relative to its root; a root's is empty.

        Raises:
            StateError: before `finalize`, or the module is no unit of this context.
        """
        self.ensure_finalized()
        name = self._tree.names.get(module)
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
        units = self._tree.units
        if units and all(ref() is None for ref in units):
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
        self._forward_start = self._prefetcher.length
        self._join_gathers()
        if not self.evaluating and not self.has_unwaited_reductions:
            # Edge 4 comes before the reduction stream allocates again.
            for unit in living(self._tree.units):
                unit.gradients.release()

    def _join_gathers(self) -> None:
        # Edge 1: gathers read weights that the optimizer or an initialiser wrote on this stream.
        accelerator.wait_stream(self.allgather_stream, self.current_stream())
        self._gathers_are_joined = True

    def end_forward(self, *, failed: bool) -> None:
        """End an outermost forward: what is left over from it comes to rest.

        Prefetches of a training forward stay: backward may use them, and completion ends them.
        """
        for unit in living(self._unsharded):
            unit.end_forward(sweep=failed or self.evaluating)
        if failed and not self.evaluating:
            self._prefetcher.rewind(self._forward_start)
        self.evaluating = False

    def sweep(self) -> None:
        """Bring unused prefetches to rest: no backward will come that could use them."""
        for unit in living(self._unsharded):
            unit.end_forward(sweep=True)

    def note(self, module: nn.Module, phase: Phase) -> None:
        """Note that a unit's module enters a phase, outside any recomputation.

        Raises:
            StateError: the recorded pass has another event here.
        """
        if self.evaluating and phase is Phase.FORWARD:
            self._prefetcher.note_evaluated(module)
            return
        try:
            self._prefetcher.note(module, phase, self.stats.steps, nested=bool(self.calls))
        except StateError as error:
            raise self.located(error) from None

    def prefetch(self, module: nn.Module, phase: Phase, numel_max: int | None) -> None:
        """Gather the units early that follow in the order; see `Prefetcher.prefetch`."""
        self._prefetcher.prefetch(module, phase, numel_max, evaluating=self.evaluating)

    def note_unsharded(self, unit: "weakref.ref[Any]", nbytes: int) -> None:
        """Count a unit whose full weights exist from now on."""
        self._unsharded[unit] = None
        self.stats.full_nbytes += nbytes
        self.stats.peak_full_nbytes = max(self.stats.peak_full_nbytes, self.stats.full_nbytes)

    def note_resharded(self, unit: "weakref.ref[Any]", nbytes: int) -> None:
        """Count a unit whose full weights are gone."""
        del self._unsharded[unit]
        self.stats.full_nbytes -= nbytes

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
        one_use = [self]  # autograd's threads may hold a callback longer than the backward lasts
        queue_backward_callback(lambda: one_use.pop().post_backward())
        self._note_backward()

    def _note_backward(self) -> None:
        self._post_backward_hook_registered = True
        self.graph_task = current_graph_task()
        if not self._gathers_are_joined:
            # No forward came since the last backward, behind which weights may have been written.
            self._join_gathers()
        # Edge 4: the first memory that the reduction stream takes must lie inside a capture.
        accelerator.wait_stream(self.inner_reduction_stream, self.current_stream())

    def validate_grad_sync(self, unit: Identity | None = None) -> None:
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

    def note_reduced(self, unit: "weakref.ref[Any]") -> None:
        """Note that a reduction of a unit was issued: in this pass, or behind it for a delayed gradient."""
        self.has_unwaited_reductions = True
        noted = self._reduced if self._post_backward_hook_registered else self._reduced_late
        noted[unit] = None

    def was_reduced(self, unit: "weakref.ref[Any]") -> bool:
        """Return whether a reduction of a unit was issued in this pass."""
        return unit in self._reduced

    def _run_gradient_hooks(self) -> None:
        """Call users' hooks of sharded gradients, each once for a backward pass.

        Ordering:
            The current stream is behind the reductions, if there is a hook at all.
        """
        reduced = living(self._reduced_late | self._reduced)
        hooked = [each for unit in reduced if (each := unit.gradients).have_hooks]
        self._reduced.clear()
        self._reduced_late.clear()
        if hooked and self.has_unwaited_reductions:
            self.finish_grad_sync()
        for gradients in hooked:
            gradients.run_hooks()

    def note_unfinished(self, unit: "weakref.ref[Any]") -> None:
        """Note that a unit has gradients which the last microbatch will complete."""
        self._unfinished[unit] = None

    def begin_microbatch(self) -> tuple[int, int]:
        """Return how many forwards with a graph, and how many completions, there were so far."""
        return self.graphs.count, self.stats.steps

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
        if self.graphs.count > graphs:
            msg = (
                "the backward of a microbatch must run inside its scope, which is where the last "
                "one is told from the others, got a scope around a forward alone; put both inside"
            )
            raise self.located(StateError(msg))
        self.sweep()
        if self.is_last_microbatch:
            self._finish_windows()
            if not self.caller_managed_grad_sync:
                self.finish_grad_sync()

    def _finish_windows(self) -> None:
        """Complete all gradients of the window, also those that its last microbatch did not use."""
        for unit in living(self._unfinished):
            unit.finish_window()
        self._unfinished.clear()

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
            for unit in living(self._tree.units):
                unit.take_gradients()
        self._run_delayed_post_backward_callbacks()
        if self.is_last_microbatch:
            self._finish_windows()
        for unit in living(self._unsharded):
            unit.come_to_rest()
        if self.is_last_microbatch and not self.caller_managed_grad_sync:
            self.finish_grad_sync()
        self._post_backward_hook_registered = False
        self._run_gradient_hooks()
        self.graphs.forget_hidden()
        self._gathers_are_joined = False
        self.stats.steps += 1
        try:
            self._prefetcher.end_pass(self.stats.steps - 1)
        except StateError as error:
            raise self.located(error) from None

    def _run_delayed_post_backward_callbacks(self) -> None:
        """Complete the units whose backward could not be seen to end before that of the pass."""
        self.open_units.complete()

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
        self.open_units.clear()
        self._unfinished.clear()
        self._reduced.clear()
        self._reduced_late.clear()
        self.evaluating = False
        for unit in living(self._tree.units):
            unit.reset()
        self.finish_grad_sync()
        self._post_backward_hook_registered = False
        self._prefetcher.reset()

    def parameters_without_grad(self) -> list[str]:
        """Return the names of all trainable parameters that have no gradient now."""
        return [
            name
            for unit in living(self._tree.units)
            for name in unit.gradients.parameters_without_grad()
        ]
