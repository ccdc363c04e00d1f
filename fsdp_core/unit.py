"""ShardedUnit: what a unit does around its forward and backward.

One unit is shared by the modules of one `fully_shard` call. Its verbs are called by `hooks.py`, by
the context, or by whoever drives the unit by hand.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import CoroutineType, GeneratorType
from typing import Any

import torch
from torch import nn

from fsdp_core import device as accelerator
from fsdp_core.collectives import MeshAxes
from fsdp_core.context import FsdpContext
from fsdp_core.errors import StateError
from fsdp_core.gradients import Gradients
from fsdp_core.identity import Identity
from fsdp_core.parameter_group import ParameterGroup
from fsdp_core.phase import Phase, check_phase_change
from fsdp_core.schedule_policy import SchedulePolicy
from fsdp_core.torch_private import (
    current_graph_task,
    in_grad_transform,
    in_graph_task,
    next_node_number,
)
from fsdp_core.unit_protocol import Call
from fsdp_core.uses import Use, Uses
from fsdp_core.weights import Weights


class ShardedUnit:
    """One or several modules whose parameters are gathered and reduced together.

    Attributes:
        identity: how it is called.
        ref: this unit, weakly.
        context: what it shares with other units.
        modules: its modules, weakly: they hold the unit.
        axes: the mesh that its parameters lie on.
        groups: its parameters, one group for each dtype and trainability.
        members: all of its parameters.
        policy: how it is scheduled.
        phase: what it is doing.
        weights: its full weights.
        gradients: its gradients.
        uses: its calls that backward has still to enter.
        enclosing: see `Use`; of the last use that backward entered.
        full_numel: elements of its whole parameters.
        callbacks: called with the first module when a backward of the unit is over.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        axes: MeshAxes,
        groups: Sequence[ParameterGroup],
        context: FsdpContext,
        policy: SchedulePolicy,
    ) -> None:
        self.identity = Identity(self)
        self.ref = self.identity.ref
        self.context = context
        self.modules = tuple(weakref.ref(module) for module in modules)
        self.axes = axes
        self.groups = tuple(groups)
        self.members = [member for group in self.groups for member in group.members]
        self.full_numel = sum(group.full_numel for group in groups)
        self.policy = policy
        self.phase = Phase.RESTING
        declared = policy.grad_accumulation_count
        self.weights = Weights(self.identity, self.groups, context)
        self.gradients = Gradients(self.identity, self.groups, context, declared)
        self.uses = Uses()
        self.enclosing: tuple[weakref.ref[Any], ...] = ()
        self.callbacks: list[Callable[[nn.Module], None]] = []
        for group in self.groups:
            group.unit = self.ref
        self._holders = 0
        self._calls = 0
        self._ran: set[weakref.ref[nn.Module]] = set()
        self._scope: AbstractContextManager[Any] | None = None

    @property
    def fqn(self) -> str:
        """Names of its modules relative to their roots, once the context is finalized."""
        return self.identity.fqn

    @property
    def name(self) -> str:
        """How messages and ranges call it."""
        return self.identity.name

    @property
    def notes_events(self) -> bool:
        """Whether its hooks note when it enters a phase."""
        return self.policy.register_hooks

    @property
    def is_unsharded(self) -> bool:
        """Whether the full weights exist or are being gathered."""
        return self.weights.is_unsharded

    def _change_phase(self, phase: Phase) -> None:
        self._check_phase_change(phase)
        self.phase = phase

    def _check_phase_change(self, phase: Phase) -> None:
        try:
            check_phase_change(self.identity.fqn, self.phase, phase)
        except StateError as error:
            raise self.context.located(error) from None

    # -- driven by hand ----------------------------------------------------------------------

    def unshard(self) -> None:
        """Have the full weights in the modules, for a caller who drives the unit by hand."""
        self.context.ensure_finalized()
        if self.weights.is_stale and self.phase is Phase.RESTING:
            self.weights.reshard()
        self.weights.await_writes()
        self.weights.demand()
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
                f"{self.name!r}; leave it to the end of that, or call it then"
            )
            raise self.context.located(StateError(msg, fqn=self.fqn))
        if not self._holders:
            self.weights.reshard()
            self.weights.check_unwritten()

    def require_sharded(self, what: str) -> None:
        """Have the sharded parameters in the modules, for something that must see them.

        Raises:
            StateError: the full ones are in use.
        """
        if not self.weights.is_registered and not self.weights.is_unsharded:
            return
        if self.phase is not Phase.RESTING or self._holders:
            msg = (
                f"{what} needs the sharded parameters, got the full ones of unit {self.name!r} in "
                f"use ({self.phase.name}); do it between passes, after reshard()"
            )
            raise self.context.located(StateError(msg, fqn=self.fqn))
        self.weights.reshard()
        self.weights.check_unwritten()

    def come_to_rest(self) -> None:
        """Reshard if nobody uses the weights."""
        if self.phase is Phase.RESTING and not self._holders:
            self._ran.clear()
            if self.weights.is_unused:
                self.weights.free()  # parameters that are full wait for delayed gradients
            else:
                self.weights.reshard()

    # -- prefetches --------------------------------------------------------------------------

    def prefetch(self) -> None:
        """Gather the weights early; see `Weights.prefetch`."""
        self.weights.prefetch()

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
            StateError: the context is not finalized, the module is in its forward already, the unit's
                backward waits for delayed gradients, or a transform of `torch.func` runs it.
        """
        context = self.context
        context.ensure_finalized(module)
        recomputing = in_graph_task()
        if recomputing:
            context.begin_backward()
        elif not context.calls:
            context.begin_forward()
        self._check_entry(module, recomputing=recomputing)
        if not recomputing:
            context.note(module, Phase.FORWARD)
        self._begin_call(module, recomputing=recomputing)
        if recomputing:
            self.weights.await_writes()
        else:
            self.weights.drop_stale()
        self.weights.demand()
        if not recomputing:
            self.prefetch_successors(module, Phase.FORWARD)

    def serves(self, module: nn.Module) -> bool:
        """Whether a forward of `module` is in progress, so that its methods find weights, as they are."""
        weights = self.weights
        return self._is_running(module) and weights.is_registered and not weights.is_stale

    def _is_running(self, module: nn.Module) -> bool:
        return any(call.module is module for call in self.context.calls)

    def _check_entry(self, module: nn.Module, *, recomputing: bool) -> None:
        if self._is_running(module):
            msg = (
                f"a module must not be called inside its own forward, got {type(module).__name__} of "
                f"unit {self.name!r} again; call self.forward(...) there, which finds the weights "
                f"gathered, or context.reset() after an interrupt"
            )
            raise self.context.located(StateError(msg, fqn=self.fqn))
        if self.phase is Phase.BACKWARD and not recomputing:
            self._check_phase_change(Phase.FORWARD)
        if in_grad_transform():
            msg = (
                f"a unit must not run inside torch.func.grad, vjp or jacrev, got unit {self.name!r}, "
                f"whose weights are gathered for backward passes of autograd alone; use "
                f"torch.autograd.grad"
            )
            raise self.context.located(StateError(msg, fqn=self.fqn))

    def _begin_call(self, module: nn.Module, *, recomputing: bool) -> None:
        if self.phase is Phase.RESTING:
            self._change_phase(Phase.FORWARD)
        operation = "recompute" if recomputing else "forward"
        scope = accelerator.annotate(operation, self.identity.label)
        scope.__enter__()
        calls = self.context.calls
        if calls and calls[-1].unit is not self:
            self.uses.note_callers(calls)
        start = next_node_number()
        number = self.context.calls_begun
        calls.append(Call(self, module, recomputing, scope, sys.exception(), start, number))
        self.context.calls_begun += 1
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
        self.weights.check_unwritten()
        if evaluating:
            return None
        if torch.is_grad_enabled():
            return self.uses.use_of(call, context.calls, context.calls_begun)
        if not call.recomputing:
            self.uses.hide()
            context.graphs.note_hidden(self.uses)
        return None

    def _leave_forward(self, call: Call, *, failed: bool) -> None:
        """Reshard, unless the weights are needed again at once.

        A recomputed forward is followed by its backward, unless it is one that will be recomputed
        again (gradients disabled). A unit of several modules waits for all of them to run.
        """
        if call.recomputing:
            if not torch.is_grad_enabled():
                self.weights.reshard()
            return
        if failed:
            self.weights.reshard()
            return
        self._ran.add(weakref.ref(call.module))
        waits = self.context.calls and any(ref not in self._ran for ref in self.modules)
        if self.policy.reshard_after_forward and not waits:
            self.weights.reshard()
        if not waits:
            self._ran.clear()

    def check_returned(self, output: object, tensors: Iterable[torch.Tensor]) -> None:
        """Check that nothing of the weights is used behind a forward, which may have freed them.

        Args:
            output: what it returned.
            tensors: those in it.

        Raises:
            StateError: it has still to run, or returned weights that are freed.
        """
        if isinstance(output, (GeneratorType, CoroutineType)):
            output.close()  # Python warns of a coroutine that never begins
            msg = (
                f"a forward must have used its weights when it returns, got a {type(output).__name__} "
                f"from unit {self.name!r}; have it return a list, or shard the modules that it calls"
            )
            raise self.context.located(StateError(msg, fqn=self.fqn))
        for tensor in tensors:
            if name := self.weights.over_freed(tensor):
                msg = (
                    f"a forward must not return weights, which are freed behind it, got {name!r}, or a "
                    f"view of it, from unit {self.name!r}; use parameter.clone(), or "
                    f"SchedulePolicy(reshard_after_forward=False)"
                )
                raise self.context.located(StateError(msg, fqn=name))

    def end_with(self, use: Use, outputs: Sequence[torch.Tensor]) -> None:
        """Note which outputs of a forward backward can enter."""
        self.uses.add(use, outputs, self.context.trainability_changes)
        if self.context.calls or in_graph_task():
            return
        if outputs:
            self.context.graphs.note(use)
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
        unused = sweep and self.weights.is_unused
        if self._ran or unused:
            self._ran.clear()
            if unused or self.policy.reshard_after_forward:
                self.come_to_rest()
        self.weights.await_gather()

    # -- backward ----------------------------------------------------------------------------

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
        if torch.is_grad_enabled() and self.weights.has_transient:
            msg = (
                f"a backward through unit {self.name!r} must not be recorded, got "
                f"create_graph=True: its weights are freed before a second backward could read "
                f"them; use a parameter placement of Replicate(), which keeps them"
            )
            raise self.context.located(StateError(msg, fqn=self.fqn))
        if self.weights.is_stale:
            msg = (
                f"a backward must find the weights that its forward used, got unit {self.name!r} "
                f"whose weights were written in between (a loaded state dict, an optimizer's step); "
                f"run the forward again"
            )
            raise self.context.located(StateError(msg, fqn=self.fqn))
        use.graph_task = task
        context = self.context
        context.begin_backward()
        context.open_units.leave_sections(self, use.enclosing)
        context.note(module, Phase.BACKWARD)
        self.enclosing = use.enclosing
        self._open()
        self.uses.enter(use)
        self.gradients.window.enter(task, nested=use.recomputes)
        self.weights.demand()
        self.prefetch_successors(module, Phase.BACKWARD)

    def _open(self) -> None:
        if self.phase is Phase.BACKWARD:
            return
        self._change_phase(Phase.BACKWARD)
        self.gradients.open_window()
        self.context.open_units.add(self)
        self._scope = accelerator.annotate("backward", self.identity.label)
        self._scope.__enter__()

    def take_gradients(self) -> None:
        """Open, if full gradients are there that no backward pass of autograd brought."""
        if self.phase is Phase.RESTING and self.gradients.are_full:
            self._open()

    def gradient_ready(self, index: int) -> None:
        """Count a gradient of one parameter, which has been accumulated.

        Raises:
            StateError: more came than were declared.
        """
        context, window = self.context, self.gradients.window
        if self.phase is Phase.RESTING and window.declared and not in_graph_task():
            self._late_gradient_ready(index)
            return
        if self.phase is not Phase.BACKWARD:
            context.begin_backward()
            self._open()
            window = self.gradients.window
        if window.declared:
            self.gradients.check_declared(index)
        is_full = window.add(index)
        task = current_graph_task()
        if task not in (-1, context.graph_task):
            more_uses = self.uses.outstanding() > 0
            window.nested |= window.entered > 0 and (more_uses or task != window.graph_task)
        if is_full:
            self.retry()

    def _late_gradient_ready(self, index: int) -> None:
        """Count a delayed gradient of a declared window, which keeps no unit in its backward."""
        if self.gradients.window.add(index):
            self._open()
            self.retry()

    def retry(self) -> None:
        """Complete if all gradients have come and no unit inside this one is open."""
        if not self.gradients.window.is_due or self.phase is not Phase.BACKWARD:
            return
        if not self.context.open_units.any_inside(self):
            self._finish_gradients()

    def _finish_gradients(self) -> None:
        """Reduce; close the unit unless its weights may still be read in this backward pass.

        Those of frozen parameters may, and of such as got no gradient before the declared ones were
        there.
        """
        may_read = self.weights.has_frozen or self.gradients.may_get_more
        is_over = not (may_read and in_graph_task())
        if is_over:
            self._leave_weights()
        self.gradients.reduce()
        if is_over:
            self._close()

    def leave_section(self) -> None:
        """Reshard: backward has moved on; complete the unit if no use of it is still to come.

        What was gathered early since its last use stays, for the one that is still to come.
        """
        if self._calls or not self.policy.register_hooks:
            return
        if not self.uses.outstanding():
            self.complete()
        elif not self.weights.is_unused:
            self._leave_weights()

    def complete(self) -> None:
        """Complete what is open: backward brings no more gradients.

        A window whose declared gradients have not all come stays as it is, and so does a unit
        that waits for delayed ones, in its phase too.
        """
        gradients = self.gradients
        gradients.expect_delayed_alone()
        self._leave_weights()
        window = gradients.window
        if window.declared and not window.is_full:
            self._close()
        elif gradients.has_delayed and not window.is_full:
            window.nested = False  # delayed gradients come in no backward pass
            self.context.open_units.remove(self)
        else:
            # Where no parameter was used, another rank may have used one: zeros take part, once.
            is_owed = (
                window.entered and not window.reduced and not self.context.was_reduced(self.ref)
            )
            if gradients.are_full or is_owed:
                gradients.reduce()
            self._close()

    def _leave_weights(self) -> None:
        """Free the full weights; parameters stay full where delayed gradients will be put."""
        if self._holders:
            return
        if self.gradients.has_delayed and not self.gradients.window.is_full:
            self.weights.free()
        else:
            self.weights.reshard()

    def _close(self) -> None:
        """End the unit's backward: it rests, and the units around it may go on."""
        self.gradients.close_window()
        self._change_phase(Phase.RESTING)
        if self._scope is not None:
            self._scope.__exit__(None, None, None)
            self._scope = None
        self.context.open_units.remove(self)
        for callback in tuple(self.callbacks):
            module = self.modules[0]()
            assert module is not None
            callback(module)

    # -- gradients at rest -------------------------------------------------------------------

    def finish_window(self) -> None:
        """Bring gradients into optimizer placements: the last microbatch is over.

        Where delayed ones are still to come, their reduction does it.
        """
        if self.phase is not Phase.BACKWARD:
            self.gradients.finish_window()

    def check_complete(self) -> None:
        """Check that all gradients of the unit's window have come.

        Raises:
            StateError: some are still to come.
        """
        self.gradients.check_complete(is_open=self.phase is Phase.BACKWARD)

    def reset(self) -> None:
        """Drop every trace of a broken pass: weights, window, gradients, phase."""
        self.weights.reshard()
        self._calls = 0
        self._holders = 0
        self._ran.clear()
        self._scope = None
        self.uses.clear()
        self.gradients.drop()
        self.phase = Phase.RESTING
