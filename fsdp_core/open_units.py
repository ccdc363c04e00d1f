"""OpenUnits: the units whose backward has begun and is not over."""

import weakref
from collections.abc import Iterator
from typing import Any

from fsdp_core.unit_protocol import Unit


class OpenUnits:
    """The units of one context whose backward is not over, in the order of their opening."""

    def __init__(self) -> None:
        self._units: list[Unit] = []

    def add(self, unit: Unit) -> None:
        """Note that a unit's backward has begun."""
        self._units.append(unit)

    def remove(self, unit: Unit) -> None:
        """Note that a unit's backward is over; units around it may have waited for that."""
        if unit in self._units:
            self._units.remove(unit)
        for other in reversed(tuple(self._units)):
            other.retry()

    def any_inside(self, unit: Unit) -> bool:
        """Whether a unit that was called inside `unit` is still open."""
        return any(unit.ref in other.enclosing for other in self._units)

    def leave_sections(self, unit: Unit, enclosing: tuple["weakref.ref[Any]", ...]) -> None:
        """Backward enters `unit`: it has left every open unit that does not enclose it, inner ones first.

        Why that holds: the engine runs nodes in the reverse order of their making, so what a
        unit's forward made runs in one piece.
        """
        for other in self._inner_first():
            if other is not unit and other.ref not in enclosing:
                other.leave_section()

    def complete(self) -> None:
        """Complete every unit that is still open, inner ones before those around them."""
        for unit in self._inner_first():
            unit.complete()

    def _inner_first(self) -> Iterator[Unit]:
        """Yield the open units; one that closes before its turn is passed over."""
        for unit in reversed(tuple(self._units)):
            if unit in self._units:
                yield unit

    def clear(self) -> None:
        """Forget all of them: the pass broke."""
        self._units.clear()
