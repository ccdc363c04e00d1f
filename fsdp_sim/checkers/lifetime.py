"""Lifetime: memory is not used again while another stream may still access what was in it."""

from collections.abc import Iterable

from fsdp_sim.checkers.checker import ALLOC, FREE, MEMORY_KINDS, WORK_KINDS
from fsdp_sim.checkers.words import Words, place
from fsdp_sim.clock import Clocks
from fsdp_sim.errors import Finding
from fsdp_sim.op import Kind, Op

_Foreign = dict[int, Op]
"""Stream -> its last access, of the streams that the block was not allocated on."""


class _Pools:
    """The memory of one rank.

    Attributes:
        home: allocated block -> the stream whose pool it came from.
        foreign: allocated block -> accesses from other streams, where there are any.
        recorded: allocated block -> streams that ``record_stream`` names.
        freed: stream -> blocks freed to its pool since its last allocation that other streams have
            accessed: the op that freed, and those accesses.
    """

    __slots__ = ("foreign", "freed", "home", "recorded")

    def __init__(self) -> None:
        self.home: dict[int, int] = {}
        self.foreign: dict[int, _Foreign] = {}
        self.recorded: dict[int, set[int]] = {}
        self.freed: dict[int, list[tuple[Op, _Foreign]]] = {}


class Lifetime:
    """A block is freed to the stream that allocated it and may be used again there at once.

    The rule depends on no luck of sizes: at any allocation on a stream, every block freed to it since
    its last allocation must have all accesses of other streams ordered before.  ``record_stream``
    keeps a block from reuse until the work on that stream is done, so it protects too; where the order
    of the streams protects already, nothing else is asked for.

    Source: CUDACachingAllocator.cpp, torch 2.13 (``free``, ``insert_events``, ``process_events``).
    """

    kinds = WORK_KINDS | MEMORY_KINDS | {Kind.RECORD_STREAM}

    def __init__(self, words: Words) -> None:
        self._words = words
        self._ranks: dict[int, _Pools] = {}

    def on_op(self, op: Op, clocks: Clocks) -> Iterable[Finding]:
        """Follow accesses from other streams, and judge them at the next allocation."""
        pools = self._ranks.get(op.rank)
        if pools is None:
            pools = self._ranks[op.rank] = _Pools()
        kind = op.kind
        if op.accesses:
            home = pools.home
            stream = op.stream
            for access in op.accesses:
                if home.get(access[0], stream) != stream:
                    pools.foreign.setdefault(access[0], {})[stream] = op
        elif kind is ALLOC:
            pools.home[op.other] = op.stream
            if op.stream in pools.freed:
                return self._judge(pools, op, clocks)
        elif kind is FREE:
            _free(pools, op)
        elif kind is Kind.RECORD_STREAM:
            pools.recorded.setdefault(op.other, set()).add(op.stream)
        return ()

    def on_end(self) -> Iterable[Finding]:
        """Return nothing: what is never used again cannot be corrupted."""
        return ()

    def _judge(self, pools: _Pools, alloc: Op, clocks: Clocks) -> list[Finding]:
        """Check all that was freed to a stream before it allocates again."""
        return [
            self._report(access, free, alloc)
            for free, foreign in pools.freed.pop(alloc.stream)
            for stream, access in foreign.items()
            if not clocks.is_ordered(stream, access.tick, alloc.stream)
        ]

    def _report(self, access: Op, free: Op, alloc: Op) -> Finding:
        words = self._words
        pool, user = (words.stream(op.rank, op.stream) for op in (alloc, access))
        message = (
            f"rank {alloc.rank}: block {free.other} was freed to {pool}, which allocates again"
            f" while {access.name!r} on {user} may still access it"
        )
        detail = (
            f"freed at {place(free)}; any later allocation on {pool} may take its memory",
            *words.missing(access, alloc),
        )
        sites = (words.site(access), words.site(alloc))
        return Finding("UseAfterFree", message, sites, detail, (alloc.rank,))


def _free(pools: _Pools, free: Op) -> None:
    """Give a block back; an access that ``record_stream`` or nothing foreign made is safe."""
    home = pools.home.pop(free.other, free.stream)
    foreign = pools.foreign.pop(free.other, None)
    if foreign is not None:
        recorded = pools.recorded.pop(free.other, ())
        unsafe = {stream: op for stream, op in foreign.items() if stream not in recorded}
        pools.freed.setdefault(home, []).append((free, unsafe))
    elif pools.recorded:
        pools.recorded.pop(free.other, None)
