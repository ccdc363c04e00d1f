"""Batches: entries of one batch run at once, so none may write what another touches."""

from collections.abc import Iterable

from fsdp_sim.checkers.overlap import overlaps
from fsdp_sim.checkers.words import Words
from fsdp_sim.clock import Clocks
from fsdp_sim.errors import Finding
from fsdp_sim.op import Access, Kind, Op


class Batches:
    """The order of calls inside a batch is none: a send may read before a recv has written, or after.

    Source: NCCL user guide, "Group calls": operations of a group may run concurrently.
    """

    kinds = frozenset({Kind.COLLECTIVE})

    def __init__(self, words: Words) -> None:
        self._words = words
        self._entries: dict[int, list[Op]] = {}

    def on_op(self, op: Op, clocks: Clocks) -> Iterable[Finding]:  # noqa: ARG002  as Checker's
        """Compare an entry with those before it in its batch."""
        call = op.call
        if call is None or call.batch is None:
            self._entries.pop(op.rank, None)
            return ()
        entries = self._entries.get(op.rank, [])
        if entries and not _is_same_batch(entries[0], op):
            entries = []
        found = [self._finding(entry, op) for entry in entries if _collide(entry, op)]
        self._entries[op.rank] = [*entries, op]
        return found[:1]

    def on_end(self) -> Iterable[Finding]:
        """Report nothing."""
        return ()

    def _finding(self, first: Op, second: Op) -> Finding:
        return Finding(
            kind="Race",
            message=(
                f"rank {second.rank}: {first.name!r} and {second.name!r} of one batch run at once, and "
                "one of them writes what the other touches"
            ),
            ops=(self._words.site(first), self._words.site(second)),
            detail=("use a buffer for each, or two batches",),
            ranks=(second.rank,),
        )


def _is_same_batch(first: Op, second: Op) -> bool:
    assert first.call is not None
    assert second.call is not None
    one, other = first.call, second.call
    return (one.group_name, one.batch) == (other.group_name, other.batch)


def _collide(first: Op, second: Op) -> bool:
    return any(_conflict(one, other) for one in first.accesses for other in second.accesses)


def _conflict(one: Access, other: Access) -> bool:
    if one.storage != other.storage or not (one.write or other.write):
        return False
    return overlaps(one.lo, one.hi, one.strides, other.lo, other.hi, other.strides)
