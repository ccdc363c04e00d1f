"""PrefetchOrder, Prefetcher: which units are gathered early, in the order of the tree or of a recorded pass."""

import warnings
import weakref
from collections.abc import Iterable
from enum import Enum
from typing import Any

from torch import nn

from fsdp_core.agreement import agree_on_events
from fsdp_core.collectives import MeshAxes
from fsdp_core.errors import StateError
from fsdp_core.execution_order import ExecutionEvent, ExecutionOrder
from fsdp_core.module_tree import ModuleTree, living, unit_of
from fsdp_core.phase import Phase

# Events that the message about a diverging pass repeats.
LAST_EVENTS = 4


class PrefetchOrder(Enum):
    """Where the order of prefetches comes from.

    REGISTRATION  units run in the order of the module tree; a deviation is followed, with a warning
    RECORDED      the first pass is recorded and repeated; a deviation is an error
    """

    REGISTRATION = "registration"
    RECORDED = "recorded"


class Prefetcher:
    """Follows the passes of a context, and gathers units early.

    Attributes:
        mode: where the order comes from.
        execution_order: the events of one pass, and where this one is.
        is_recording: the present pass is the one that later passes must repeat.
    """

    def __init__(self, mode: PrefetchOrder, tree: ModuleTree) -> None:
        self.mode = mode
        self.execution_order = ExecutionOrder()
        self.is_recording = mode is PrefetchOrder.RECORDED
        self._tree = tree
        # Index of each module's event in the registration order; empty under RECORDED.
        self._positions: dict[Phase, dict[weakref.ref[nn.Module], int]] = {}
        self._evaluated: dict[weakref.ref[nn.Module], None] = {}
        # Indices of events of the registration order that this pass went over.
        self._skipped: set[int] = set()
        self._deviation: tuple[str, str] | None = None
        self._deviation_before: tuple[str, str] | None = None

    def follow_registration(
        self, forward: Iterable[nn.Module], backward: Iterable[nn.Module]
    ) -> None:
        """Take the order of the module tree, unless a pass is to be recorded."""
        if not self.is_recording:
            self._fill_order(Phase.FORWARD, forward)
            self._fill_order(Phase.BACKWARD, backward)

    def _fill_order(self, phase: Phase, modules: Iterable[nn.Module]) -> None:
        positions = self._positions[phase] = {}
        for module in modules:
            positions[weakref.ref(module)] = len(self.execution_order)
            self.execution_order.append(ExecutionEvent(module, phase))

    # -- prefetches --------------------------------------------------------------------------

    def prefetch(
        self, module: nn.Module, phase: Phase, numel_max: int | None, *, evaluating: bool
    ) -> None:
        """Gather the units early that follow in the order, within a budget.

        Args:
            module: of the unit that runs now, whose own further events are passed over.
            phase: the direction; units of the other one are never gathered early.
            numel_max: the budget in elements; None: one unit.
            evaluating: no backward will follow, and the pass may end anywhere.
        """
        if self.is_recording or (evaluating and not self._positions):
            return
        order, unit = self.execution_order, unit_of(module)
        offset = 0
        if self._positions:
            offset = self._positions[phase][weakref.ref(module)] + 1 - order.position
        numel = 0
        while numel_max is None or numel < numel_max:
            event = order.peek(offset)
            if event is None or event.phase is not phase:
                return
            offset += 1
            successor = unit_of(event.module)
            if successor is unit:
                continue
            if evaluating and event.module in self._tree.roots:
                return
            successor.prefetch()
            if numel_max is None:
                return
            numel += successor.full_numel

    # -- events ------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """How many events this pass has had."""
        order = self.execution_order
        return len(order) if self.is_recording else order.position

    def rewind(self, length: int) -> None:
        """Take back all events of this pass but the first `length`."""
        if self.is_recording:
            self.execution_order.truncate(length)
        else:
            self.execution_order.move_to(length)

    def note(self, module: nn.Module, phase: Phase, step: int, *, nested: bool) -> None:
        """Note that a unit's module enters a phase: the cursor moves behind this event.

        Args:
            module: the module.
            phase: the phase.
            step: for messages.
            nested: it is entered inside the forward of another module.

        Raises:
            StateError: the recorded pass has another event here.
        """
        if self.is_recording:
            self.execution_order.append(ExecutionEvent(module, phase))
        elif self.execution_order.consume(module, phase):
            return
        elif self.mode is PrefetchOrder.RECORDED:
            raise self._divergence(ExecutionEvent(module, phase), step)
        else:
            self._move_cursor(module, phase, step, nested=nested)

    def note_evaluated(self, module: nn.Module) -> None:
        """Note that a module ran without gradients: it may be recomputed in this pass' backward."""
        self._evaluated[weakref.ref(module)] = None

    def _move_cursor(self, module: nn.Module, phase: Phase, step: int, *, nested: bool) -> None:
        """Follow a module that was called out of order; warn once for each change of order."""
        order, identity = self.execution_order, unit_of(module).identity
        position = self._positions[phase][weakref.ref(module)]
        if order.position == position + 1:
            return  # once more, right behind its own event: nothing else was passed over
        # A backward whose forward came before an earlier backward begins where it is, too.
        restarts = not (order.position if phase is Phase.BACKWARD else nested)
        self._skipped.update(range(order.position, position))
        while (expected := order.peek()) and self._is_passed_over(expected, module, position):
            order.move_to(order.position + 1)
        if order.position == position:
            expected = None
        if expected is not None and not restarts and self._deviation is None:
            name = unit_of(expected.module).identity.name
            self._deviation = (f"{name}, {expected.phase}", f"{identity.name}, {phase}")
            if self._deviation != self._deviation_before:
                warnings.warn(
                    f"step {step}: unit {name!r} was expected to enter its "
                    f"{expected.phase.value} next, got the {phase.value} of "
                    f"{identity.name!r}; prefetches follow registration order, so some are "
                    f"wasted (PrefetchOrder.RECORDED follows the order of the first pass)",
                    stacklevel=2,
                )
        order.move_to(position + 1)

    def _is_passed_over(self, event: ExecutionEvent, module: nn.Module, position: int) -> bool:
        """Whether nothing is wasted where this event does not come before `module` at `position`.

        Nobody says when a unit without hooks runs; backward passes by a unit that returns its input
        untouched; and a reentrant checkpoint runs the forward without gradients.
        """
        if self.execution_order.position == position:
            return False
        unit = unit_of(event.module)
        if not (unit.notes_events and unit.full_numel) or unit is unit_of(module):
            return True
        return self._comes_later(event) or any(
            self._has_run(ref, event.phase) for ref in unit.modules
        )

    def _comes_later(self, event: ExecutionEvent) -> bool:
        """Whether a module of the same unit has its event behind the one at the cursor."""
        positions = self._positions[event.phase]
        last = max(positions[ref] for ref in unit_of(event.module).modules if ref() is not None)
        return last > self.execution_order.position

    def _has_run(self, ref: "weakref.ref[nn.Module]", phase: Phase) -> bool:
        """Whether a module has entered a phase in this pass, or its forward without gradients."""
        if ref() is None:
            return False
        position = self._positions[phase][ref]
        is_noted = position < self.execution_order.position and position not in self._skipped
        return is_noted or (phase is Phase.FORWARD and ref in self._evaluated)

    # -- ends of passes ----------------------------------------------------------------------

    def end_pass(self, step: int) -> None:
        """Freeze the recorded pass, or check that it was repeated to its end.

        Raises:
            StateError: ranks ran different passes, or this one ended early.
        """
        self._deviation_before, self._deviation = self._deviation, None
        self._evaluated.clear()
        self._skipped.clear()
        order = self.execution_order
        if self.is_recording:
            if len(order):
                self._freeze()
            return
        ended, expected = order.position, order.peek()
        order.move_to(0)
        if self.mode is PrefetchOrder.RECORDED and ended not in (0, len(order)):
            msg = (
                f"step {step}: a pass must repeat the recorded one, got its end at "
                f"position {ended} of {len(order)}, expected {self._describe(expected)}; use "
                f"REGISTRATION if passes differ"
            )
            raise StateError(msg)

    def reset(self) -> None:
        """Forget what this pass has had."""
        self._evaluated.clear()
        self._skipped.clear()
        self.rewind(0)
        self._deviation = None

    def _freeze(self) -> None:
        """End recording, once the ranks have agreed that they ran the same pass."""
        events = list(self.execution_order)
        described = [
            (self._tree.root_index(event.module), self._describe(event)) for event in events
        ]
        meshes: dict[tuple[Any, ...], MeshAxes] = {}
        for unit in living(self._tree.units):
            meshes.setdefault(unit.axes.process_groups, unit.axes)
        try:
            for axes in meshes.values():
                mine = [
                    each
                    for each, event in zip(described, events, strict=True)
                    if unit_of(event.module).axes.process_groups == axes.process_groups
                ]
                agree_on_events(mine, axes)
        except StateError:
            self.execution_order.truncate(0)
            raise
        self.is_recording = False

    def _divergence(self, event: ExecutionEvent, step: int) -> StateError:
        """Say how an event differs from the recorded one."""
        order = self.execution_order
        position, identity = order.position, unit_of(event.module).identity
        if position == 0 and event.phase is Phase.BACKWARD:
            msg = (
                f"step {step}: RECORDED needs one backward call per pass, got another "
                f"one that enters unit {identity.name!r}; add the losses, or use REGISTRATION"
            )
            return StateError(msg, fqn=identity.fqn)
        expected = order.peek()
        before = [order.peek(-offset) for offset in range(min(position, LAST_EVENTS), 0, -1)]
        hint = "call context.reset() and repeat the recorded pass, or use REGISTRATION"
        if event.phase is Phase.FORWARD:
            hint += "; run validation under torch.no_grad()"
        msg = (
            f"step {step}: a pass must repeat the recorded one, got "
            f"{self._describe(event)} at position {position} of {len(order)}, expected "
            f"{self._describe(expected)}; before it came "
            f"[{', '.join(self._describe(each) for each in before)}]; {hint}"
        )
        return StateError(msg, fqn=identity.fqn)

    def _describe(self, event: ExecutionEvent | None) -> str:
        if event is None:
            return "the end"
        unit = unit_of(event.module)
        of_module = f" (module {self._tree.names[event.module]!r})" if unit.modules[1:] else ""
        return f"{unit.identity.name}{of_module} {event.phase.value}"
