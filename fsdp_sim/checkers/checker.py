"""Checker: what every invariant looks like."""

from collections.abc import Iterable
from typing import Protocol

from fsdp_sim.clock import Clocks
from fsdp_sim.errors import Finding
from fsdp_sim.op import Kind, Op

WORK_KINDS = frozenset({Kind.ATEN, Kind.COLLECTIVE})
"""Ops that run on a stream and touch bytes."""

MEMORY_KINDS = frozenset({Kind.ALLOC, Kind.FREE})
"""Ops that take memory and give it back."""

# Looking a member up on its enum costs 90 ns in Python 3.11, and checkers compare with these for most ops.
ALLOC, FREE, COLLECTIVE = Kind.ALLOC, Kind.FREE, Kind.COLLECTIVE
RANGE_PUSH, RANGE_POP = Kind.RANGE_PUSH, Kind.RANGE_POP

SYNC_KINDS = frozenset(
    {
        Kind.RECORD_EVENT,
        Kind.WAIT_EVENT,
        Kind.WAIT_STREAM,
        Kind.HOST_WAIT_EVENT,
        Kind.HOST_WAIT_STREAM,
    }
)
"""Ops that order work."""


class Checker(Protocol):
    """One invariant as a fold over the ops of all ranks.

    Attributes:
        kinds: the kinds of ops that ``on_op`` wants to see.
    """

    kinds: frozenset[Kind]

    def on_op(self, op: Op, clocks: Clocks) -> Iterable[Finding]:
        """Take one op in; return what it breaks.

        Args:
            op: the next op of its rank.
            clocks: of the op's rank, already advanced by the op.
        """
        ...

    def on_end(self) -> Iterable[Finding]:
        """Return what is broken now that the program has ended."""
        ...
