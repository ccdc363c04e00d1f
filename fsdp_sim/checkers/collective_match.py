"""Collective matching: the k-th collective of a group must agree on all its ranks."""

from collections.abc import Iterable
from typing import Any

from fsdp_sim.checkers.words import Words
from fsdp_sim.clock import Clocks
from fsdp_sim.errors import Finding
from fsdp_sim.op import Call, Kind, Op

COMPARED = ("name", "reduce_op", "dtype", "sizes", "root")
POINT_TO_POINT = ("send", "recv")


class CollectiveMatch:
    """Compares each rank's k-th operation of a group with the first rank's, when it is issued.

    Sizes are compared in elements, since that is what moves; a runtime's annotation (the unit that it
    gathers or reduces) takes part, so that two equal-sized operations that were swapped are found.
    """

    kinds = frozenset({Kind.COLLECTIVE})

    def __init__(self, words: Words) -> None:
        self._words = words
        self._first: dict[Any, tuple[Op, int]] = {}

    def on_op(self, op: Op, clocks: Clocks) -> Iterable[Finding]:
        """Compare one issued collective."""
        call = op.call
        if call is None:
            return ()
        key = (call.group_name, call.group, call.name in POINT_TO_POINT, call.sequence)
        known = self._first.get(key)
        if known is None:
            if len(call.group) > 1:
                self._first[key] = (op, 1)
            return ()
        first, arrived = known
        if arrived + 1 == len(call.group):
            del self._first[key]
        else:
            self._first[key] = (first, arrived + 1)
        difference = differs(first, op)
        return () if difference is None else (self._finding(first, op, difference),)

    def on_end(self) -> Iterable[Finding]:
        """Report nothing: an operation that some rank never issued is a matter of liveness."""
        return ()

    def _finding(self, first: Op, second: Op, difference: str) -> Finding:
        a, b = first.call, second.call
        assert a is not None
        assert b is not None
        return Finding(
            kind="CollectiveMismatch",
            message=(
                f"operation {a.sequence} of group {a.group_name!r} (ranks {list(a.group)}) must agree "
                f"on all ranks: rank {first.rank} issued {_describe(a)}, "
                f"rank {second.rank} {_describe(b)}"
            ),
            ops=(self._words.site(first), self._words.site(second)),
            detail=(f"differs in {difference}",),
            ranks=(first.rank, second.rank),
        )


def differs(left: Op, right: Op) -> str | None:
    """Return the first thing in which two matched operations differ, or None."""
    a, b = left.call, right.call
    assert a is not None
    assert b is not None
    if a.name in POINT_TO_POINT:
        fields: tuple[str, ...] = ("dtype", "sizes")
    else:
        fields = COMPARED
        if left.annotation != right.annotation:
            return f"annotation {left.annotation!r} on one, {right.annotation!r} on the other"
    for field in fields:
        if getattr(a, field) != getattr(b, field):
            return f"{field} {getattr(a, field)!r} on one, {getattr(b, field)!r} on the other"
    return None


def _describe(call: Call) -> str:
    reduce_op = f" {call.reduce_op}" if call.reduce_op else ""
    return f"{call.name}{reduce_op} of {list(call.sizes)} {call.dtype}"
