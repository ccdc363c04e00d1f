"""Identity: which unit something is about, for messages, for profilers, and for lists that hold no unit."""

import weakref
from collections.abc import Sequence
from typing import Any


class Identity:
    """What a unit's parts and its context know the unit by.

    Attributes:
        ref: the unit, weakly.
        fqn: names of its modules relative to their roots, once the context is finalized.
        name: how messages and ranges call it: by its fqn, and by its root's number where the
            context has several roots.
    """

    def __init__(self, unit: Any) -> None:
        self.ref: weakref.ref[Any] = weakref.ref(unit)
        self.fqn = ""
        self.name = "<root>"
        self._left_out = ""

    def label(self, operation: str) -> str:
        """Return the name of a range in which the unit does something."""
        left_out = self._left_out if operation == "reduce_gradients" else ""
        return f"{operation} {self.name}{left_out}"

    def leave_out(self, frozen: Sequence[str]) -> None:
        """Say in the name of the unit's reductions which parameters get nothing of them.

        Why there: ranks must agree on it, and whoever compares what they reduce finds those that
        do not, by the parameter's name.
        """
        self._left_out = f" without {', '.join(frozen)}" if frozen else ""

    def full_name(self, fqn: str) -> str:
        """Return the name of one of the unit's parameters relative to its root."""
        return f"{self.fqn}.{fqn}" if self.fqn else fqn
