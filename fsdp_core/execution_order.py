"""ExecutionEvent, ExecutionOrder: which unit is gathered when, weak, with one cursor (pure)."""

import weakref
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import nn

from fsdp_core.phase import Phase


class ExecutionEvent(NamedTuple):
    """One demand for weights: a module of a unit enters its forward or its backward.

    Attributes:
        module: the unit's module that is called.
        phase: FORWARD or BACKWARD.
    """

    module: nn.Module
    phase: Phase


class ExecutionOrder:
    """The events of one pass, and a cursor at the next one to come.

    Every repeated occurrence is an entry of its own. Modules are held weakly: an order never
    keeps a model alive, and the entries of a deleted one are passed over by iteration.
    """

    def __init__(self, items: Iterable[ExecutionEvent] = ()) -> None:
        self._entries: list[tuple[weakref.ref[nn.Module], Phase]] = []
        self._position = 0
        for item in items:
            self.append(item)

    @property
    def position(self) -> int:
        """Index of the next event to consume."""
        return self._position

    def append(self, event: ExecutionEvent) -> None:
        """Add an event at the end, without consuming any."""
        self._entries.append((weakref.ref(event.module), event.phase))

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[ExecutionEvent]:
        """Iterate over the events whose modules live."""
        for index in range(len(self._entries)):
            event = self._event(index)
            if event is not None:
                yield event

    def peek(self, offset: int = 0) -> ExecutionEvent | None:
        """Return the event `offset` places behind the cursor, without consuming any.

        Returns:
            None beyond the ends, or if the module is gone.
        """
        return self._event(self._position + offset)

    def consume(self, module: nn.Module, phase: Phase) -> bool:
        """Move the cursor past the next event, if it is this one.

        Returns:
            Whether it was; if not, nothing has moved.
        """
        if self._position >= len(self._entries):
            return False
        expected, expected_phase = self._entries[self._position]
        if expected_phase is not phase or expected() is not module:
            return False
        self._position += 1
        return True

    def move_to(self, position: int) -> None:
        """Put the cursor before the event at `position`, or behind the last one."""
        assert 0 <= position <= len(self._entries)
        self._position = position

    def truncate(self, length: int) -> None:
        """Forget all events from index `length` on; a cursor beyond goes to the new end."""
        assert 0 <= length <= len(self._entries)
        del self._entries[length:]
        self._position = min(self._position, length)

    def _event(self, index: int) -> ExecutionEvent | None:
        if not 0 <= index < len(self._entries):
            return None
        module, phase = self._entries[index][0](), self._entries[index][1]
        return None if module is None else ExecutionEvent(module, phase)
