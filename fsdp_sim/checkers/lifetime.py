"""Lifetime: memory is not used again while another stream may still access what was in it."""

from collections.abc import Iterable

from fsdp_sim.checkers.checker import ALLOC, FREE, MEMORY_KINDS, WORK_KINDS
from fsdp_sim.checkers.words import Words, place
from fsdp_sim.clock import Clocks
from fsdp_sim.errors import Finding
from fsdp_sim.op import Kind, Op

_Uses = dict[int, Op]
"""Stream -> its last access."""


class _Pools:
    """The memory of one rank.

    Attributes:
        home: allocated block -> the stream whose pool it came from.
        used: allocated block -> the last access of that stream.
        foreign: allocated block -> the accesses of other streams, where there are any.
        recorded: allocated block -> streams that ``record_stream`` names.
        freed: stream -> blocks freed to its pool since its last allocation that other streams have
            accessed: the op that freed, and those accesses.
        last: stream -> its own last access to any memory that was freed to its pool.
        past: stream -> the last accesses of other streams to such memory; never changed in place.
        before: allocated block -> ``last`` when it was allocated.
        before_foreign: allocated block -> ``past`` when it was allocated, if there was any.
    """

    __slots__ = (
        "before",
        "before_foreign",
        "foreign",
        "freed",
        "home",
        "last",
        "past",
        "recorded",
        "used",
    )

    def __init__(self) -> None:
        self.home: dict[int, int] = {}
        self.used: dict[int, Op] = {}
        self.foreign: dict[int, _Uses] = {}
        self.recorded: dict[int, set[int]] = {}
        self.freed: dict[int, list[tuple[Op, _Uses]]] = {}
        self.last: dict[int, Op] = {}
        self.past: dict[int, _Uses] = {}
        self.before: dict[int, Op] = {}
        self.before_foreign: dict[int, _Uses] = {}


class Lifetime:
    """A block is freed to the stream that allocated it and may be used again there at once.

    Two rules, and neither depends on the luck of sizes.  At any allocation on a stream, every block
    freed to it since its last allocation must have all accesses of other streams ordered before.  And
    the first access of another stream to a block must be ordered after all accesses to whatever its
    pool held when it was allocated, for its memory may be any of that.  ``record_stream`` keeps a block
    from reuse until the work on that stream is done, so it protects too; where the order of the streams
    protects already, nothing else is asked for.

    Source: CUDACachingAllocator.cpp, torch 2.13 (``free``, ``insert_events``, ``process_events``).
    """

    kinds = WORK_KINDS | MEMORY_KINDS | {Kind.RECORD_STREAM}

    def __init__(self, words: Words) -> None:
        self._words = words
        self._ranks: dict[int, _Pools] = {}

    def on_op(self, op: Op, clocks: Clocks) -> Iterable[Finding]:
        """Follow blocks from their allocation over their uses to the next allocation."""
        pools = self._ranks.get(op.rank)
        if pools is None:
            pools = self._ranks[op.rank] = _Pools()
        kind = op.kind
        if op.accesses:
            return self._use(pools, op, clocks)
        if kind is ALLOC:
            stream = op.stream
            pools.home[op.other] = stream
            last = pools.last.get(stream)
            if last is not None:
                pools.before[op.other] = last
            if stream in pools.past:
                pools.before_foreign[op.other] = pools.past[stream]
            if stream in pools.freed:
                return self._judge(pools, op, clocks)
        elif kind is FREE:
            _free(pools, op)
        elif kind is Kind.RECORD_STREAM:
            pools.recorded.setdefault(op.other, set()).add(op.stream)
        return ()

    def on_end(self) -> Iterable[Finding]:
        """Return nothing: what is never used again cannot be corrupted."""
        return ()

    def _use(self, pools: _Pools, op: Op, clocks: Clocks) -> Iterable[Finding]:
        """Note the accesses of an op; judge those that are the first of another stream."""
        home = pools.home
        stream = op.stream
        found: list[Finding] = []
        for access in op.accesses:
            block = access[0]
            owner = home.get(block)
            if owner == stream:
                pools.used[block] = op
            elif owner is not None:
                foreign = pools.foreign.setdefault(block, {})
                if stream not in foreign:
                    found += self._first(pools, block, op, clocks)
                foreign[stream] = op
        return found

    def _first(self, pools: _Pools, block: int, op: Op, clocks: Clocks) -> list[Finding]:
        """Check that what the pool held before is done before another stream uses a block of it."""
        last = pools.before.get(block)
        earlier = () if last is None else (last,)
        return [
            self._too_early(use, block, op)
            for use in (*earlier, *pools.before_foreign.get(block, {}).values())
            if not clocks.is_ordered(use.stream, use.tick, op.stream)
        ]

    def _judge(self, pools: _Pools, alloc: Op, clocks: Clocks) -> list[Finding]:
        """Check all that was freed to a stream before it allocates again."""
        return [
            self._too_late(access, free, alloc)
            for free, foreign in pools.freed.pop(alloc.stream)
            for stream, access in foreign.items()
            if not clocks.is_ordered(stream, access.tick, alloc.stream)
        ]

    def _too_early(self, earlier: Op, block: int, access: Op) -> Finding:
        words = self._words
        before, user = (words.stream(op.rank, op.stream) for op in (earlier, access))
        message = (
            f"rank {access.rank}: {access.name!r} on {user} uses block {block} while {earlier.name!r}"
            f" on {before} may still access what its memory held before"
        )
        detail = (
            f"its memory{words.birth(access.rank, block)} may be any that was freed to the pool by then",
            *words.missing(earlier, access),
        )
        sites = (words.site(earlier), words.site(access))
        return Finding("UseAfterFree", message, sites, detail, (access.rank,))

    def _too_late(self, access: Op, free: Op, alloc: Op) -> Finding:
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
    """Give a block back to its pool; accesses of streams that ``record_stream`` named are done by then."""
    block = free.other
    home = pools.home.pop(block, free.stream)
    pools.before.pop(block, None)
    used = pools.used.pop(block, None)
    if used is not None:
        last = pools.last.get(home)
        if last is None or last.tick < used.tick:
            pools.last[home] = used
    if pools.before_foreign:
        pools.before_foreign.pop(block, None)
    recorded = pools.recorded.pop(block, ()) if pools.recorded else ()
    foreign = pools.foreign.pop(block, None) if pools.foreign else None
    if foreign is not None:
        unsafe = {stream: op for stream, op in foreign.items() if stream not in recorded}
        pools.freed.setdefault(home, []).append((free, unsafe))
        pools.past[home] = _merged(pools.past.get(home, {}), unsafe)


def _merged(past: _Uses, uses: _Uses) -> _Uses:
    """Return the later access of each stream, as a new record: blocks in use hold the old one."""
    merged = dict(past)
    for stream, op in uses.items():
        known = merged.get(stream)
        if known is None or known.tick < op.tick:
            merged[stream] = op
    return merged
