"""Races: two accesses to the same bytes, at least one a write, are ordered by stream or wait."""

from collections.abc import Iterable
from functools import lru_cache

from fsdp_sim.checkers.checker import FREE, WORK_KINDS
from fsdp_sim.checkers.overlap import overlaps
from fsdp_sim.checkers.words import Words
from fsdp_sim.clock import Clocks
from fsdp_sim.errors import Finding
from fsdp_sim.op import Access, Op

ENTRIES_MAX = 512
"""Distinct accesses kept of one stream to one block before old ones are forgotten."""

_Last = dict[Access, Op]
"""Access -> the last op of one stream that made it: it stands for the earlier ones."""


class _History:
    """What one stream did to a block that several streams touch.

    Attributes:
        last: the last op of each distinct access.
        wrote: tick of the last write.
        touched: tick of the last access.
        limit: number of distinct accesses at which to forget old ones.
    """

    __slots__ = ("last", "limit", "touched", "wrote")

    def __init__(self, last: _Last) -> None:
        self.last = last
        self.wrote = max((op.tick for access, op in last.items() if access.write), default=0)
        self.touched = max((op.tick for op in last.values()), default=0)
        self.limit = ENTRIES_MAX

    def add(self, access: Access, op: Op) -> None:
        """Take one access in."""
        self.last[access] = op
        self.touched = op.tick
        if access.write:
            self.wrote = op.tick


_Private = tuple[int, _Last]
"""Of a block that only one stream has touched, and not in too many ways: the stream, and its accesses."""
_Shared = dict[int, _History]
"""Of any other block: what each stream did to it."""


class Races:
    """Judges every pair of accesses by vector clocks, so one run covers all timings of the devices.

    Most blocks are only ever touched by one stream: nothing is searched until a second one comes.
    Then an access is compared with those of other streams that its stream's clock does not cover.
    Of equal accesses of a stream only the last is kept: what is ordered after it is ordered after the
    earlier ones too, and what is not races with it.  A block's history ends when the block is freed;
    what its bytes are used for next is the business of ``Lifetime``.

    Source: FastTrack (Flanagan and Freund, PLDI 2009) for what may be forgotten.
    """

    kinds = WORK_KINDS | {FREE}

    def __init__(self, words: Words) -> None:
        self._words = words
        self._ranks: dict[int, dict[int, _Private | _Shared]] = {}

    def on_op(self, op: Op, clocks: Clocks) -> Iterable[Finding]:
        """Compare the op's accesses with what other streams did to the same blocks."""
        blocks = self._ranks.get(op.rank)
        if blocks is None:
            blocks = self._ranks[op.rank] = {}
        if op.kind is FREE:
            blocks.pop(op.other, None)  # nothing is left to race with
            return ()
        stream = op.stream
        found: list[Finding] | None = None
        for access in op.accesses:
            block = blocks.get(access[0])
            if block is None:
                blocks[access[0]] = (stream, {access: op})
                continue
            if isinstance(block, tuple):
                owner, last = block
                if owner == stream and len(last) <= ENTRIES_MAX:
                    last[access] = op
                    continue
                block = blocks[access[0]] = {owner: _History(last)}
            new = self._shared(block, access, op, clocks)
            found = new if found is None else found + new
        return found or ()

    def on_end(self) -> Iterable[Finding]:
        """Return nothing: a race is found at its second access."""
        return ()

    def _shared(self, histories: _Shared, access: Access, op: Op, clocks: Clocks) -> list[Finding]:
        """Check an access to a block that several streams touch, and take it in."""
        clock = clocks.of(op.stream)
        found: list[Finding] = []
        for stream, history in histories.items():
            newest = history.touched if access.write else history.wrote
            if stream != op.stream and newest > clock.get(stream, 0):
                found += self._search(history, clock.get(stream, 0), access, op)
        mine = histories.get(op.stream)
        if mine is None:
            mine = histories[op.stream] = _History({})
        mine.add(access, op)
        if len(mine.last) > mine.limit:
            _prune(mine, clocks, op.stream)
        return found

    def _search(self, history: _History, known: int, access: Access, op: Op) -> list[Finding]:
        """Compare one access with those of another stream that may still be running."""
        return [
            self._report(other, earlier, access, op)
            for other, earlier in history.last.items()
            if earlier.tick > known
            and (access.write or other.write)
            and other.lo < access.hi
            and access.lo < other.hi
            and _collide(other, access)
        ]

    def _report(self, other: Access, earlier: Op, access: Access, op: Op) -> Finding:
        words = self._words
        block = f"block {access.storage}"
        message = (
            f"rank {op.rank}: {op.name!r} on {words.stream(op.rank, op.stream)}"
            f" {'writes' if access.write else 'reads'} {block} while {earlier.name!r}"
            f" on {words.stream(op.rank, earlier.stream)}"
            f" may still {'write' if other.write else 'read'} it"
        )
        lo, hi = max(other.lo, access.lo), min(other.hi, access.hi)
        detail = [f"bytes [{lo}, {hi}) of {block}{words.birth(op.rank, access.storage)}"]
        detail += words.missing(earlier, op)
        if earlier.call and op.call and earlier.call.group_name == op.call.group_name:
            detail.append(
                "only_communicator_order: both are collectives of one process group;"
                " their order of issue protects no memory"
            )
        sites = (words.site(earlier), words.site(op))
        return Finding("Race", message, sites, tuple(detail), (op.rank,))


def _prune(history: _History, clocks: Clocks, stream: int) -> None:
    """Forget what every stream that can still come is ordered after.

    A stream that is used for the first time later starts behind the host's clock.
    """
    known = min(
        clock.get(stream, 0)
        for clock in (
            clocks.host,
            *(clock for other, clock in clocks.streams.items() if other != stream),
        )
    )
    history.last = {access: op for access, op in history.last.items() if op.tick > known}
    history.limit = max(ENTRIES_MAX, 2 * len(history.last))


@lru_cache(maxsize=4096)
def _collide(one: Access, other: Access) -> bool:
    """Whether two accesses with overlapping ranges share a byte."""
    if one.strides is None and other.strides is None:
        return True
    return overlaps(one.lo, one.hi, one.strides, other.lo, other.hi, other.strides)
