"""Collective matching: the k-th collective of a group must agree on all its ranks."""

from collections.abc import Iterable
from typing import Any

from fsdp_sim.checkers.device_graph import POINT_TO_POINT, key_of
from fsdp_sim.checkers.words import Words
from fsdp_sim.clock import Clocks
from fsdp_sim.errors import Finding
from fsdp_sim.op import Call, Kind, Op

COMPARED = ("name", "reduce_op", "dtype", "sizes", "root")
"""What the parts of a collective must agree on, beside the annotation."""

ALL_TO_ALL = "all_to_all"

RANKS_LISTED_MAX = 32
"""Other ranks whose calls a report lists."""


class CollectiveMatch:
    """Compares each rank's k-th operation of a group with the others', when it is issued.

    Sizes are compared in elements, since that is what moves; of an all-to-all, what one rank sends to
    another with what that one receives from it.  A runtime's annotation (the unit that it gathers or
    reduces) takes part, so that two equal-sized operations that were swapped are found.
    """

    kinds = frozenset({Kind.COLLECTIVE})

    def __init__(self, words: Words) -> None:
        self._words = words
        self._issued: dict[Any, list[Op]] = {}

    def on_op(self, op: Op, clocks: Clocks) -> Iterable[Finding]:  # noqa: ARG002
        """Compare one issued collective with the parts that are there already."""
        call = op.call
        if call is None or len(call.group) < 2:
            return ()
        key = key_of(call)
        others = self._issued.get(key)
        if others is None:
            self._issued[key] = [op]
            return ()
        others.append(op)
        if len(others) == len(call.group):
            del self._issued[key]
        is_pairwise = call.name == ALL_TO_ALL
        for other in others[:-1] if is_pairwise else others[:1]:
            difference = differs(other, op)
            if difference is not None:
                rest = [each for each in others[:-1] if each is not other]
                return (self._finding(other, op, difference, rest),)
        return ()

    def on_end(self) -> Iterable[Finding]:
        """Report nothing: an operation that some rank never issued is a matter of liveness."""
        return ()

    def _finding(self, first: Op, second: Op, difference: str, rest: list[Op]) -> Finding:
        a, b = first.call, second.call
        assert a is not None
        assert b is not None
        return Finding(
            kind="CollectiveMismatch",
            message=(
                f"operation {a.sequence} of group {a.group_name!r} (ranks {list(a.group)}) must agree "
                f"on all ranks: rank {first.rank} issued {_describe(first, a)}, "
                f"rank {second.rank} {_describe(second, b)}"
            ),
            ops=(self._words.site(first), self._words.site(second)),
            detail=(f"differs in {difference}", *(_also(op) for op in rest[:RANKS_LISTED_MAX])),
            ranks=(first.rank, second.rank),
        )


def _also(op: Op) -> str:
    assert op.call is not None
    place = f" at {op.source}" if op.source else ""
    return f"rank {op.rank} issued {_describe(op, op.call)}{place}"


def differs(left: Op, right: Op) -> str | None:
    """Return the first thing in which two matched operations differ, or None."""
    a, b = left.call, right.call
    assert a is not None
    assert b is not None
    if a.name in POINT_TO_POINT:
        return _field(a, b, ("dtype", "sizes", "tag"))
    if a.name == b.name == ALL_TO_ALL:
        return _field(a, b, ("dtype",)) or _splits(left, a, right, b) or _annotation(left, right)
    return _field(a, b, COMPARED) or _annotation(left, right)


def _field(a: Call, b: Call, fields: tuple[str, ...]) -> str | None:
    for field in fields:
        if getattr(a, field) != getattr(b, field):
            return f"{field}: {getattr(a, field)!r} on one, {getattr(b, field)!r} on the other"
    return None


def _annotation(left: Op, right: Op) -> str | None:
    if left.annotation == right.annotation:
        return None
    return f"annotation: {left.annotation!r} on one, {right.annotation!r} on the other"


def _splits(left: Op, a: Call, right: Op, b: Call) -> str | None:
    """Compare what each of two ranks sends with what the other receives.

    The sizes of an all-to-all are what it sends to each rank, then what it receives from each.
    """
    size = len(a.group)
    one, two = a.group.index(left.rank), a.group.index(right.rank)
    for sender, sends, source, receiver, receives, target in (
        (left, a.sizes, one, right, b.sizes, two),
        (right, b.sizes, two, left, a.sizes, one),
    ):
        sent, received = sends[target], receives[size + source]
        if sent != received:
            return (
                f"split sizes: rank {sender.rank} sends {sent} elements to rank {receiver.rank}, "
                f"which receives {received} from it"
            )
    return None


def _describe(op: Op, call: Call) -> str:
    unit = f" [{op.annotation}]" if op.annotation else ""
    reduce_op = f" {call.reduce_op}" if call.reduce_op else ""
    root = f" with root {call.root}" if call.root is not None else ""
    return f"{call.name}{reduce_op}{unit} of {list(call.sizes)} {call.dtype}{root}".rstrip()
