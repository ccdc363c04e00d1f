"""Lifetime: memory is not used again while another stream may still access what was in it."""

from collections.abc import Iterable

from fsdp_sim.checkers.checker import ALLOC, FREE, MEMORY_KINDS, WORK_KINDS
from fsdp_sim.checkers.words import Words, place
from fsdp_sim.clock import Clocks
from fsdp_sim.errors import Finding
from fsdp_sim.op import Kind, Op

_Uses = dict[int, Op]
"""Stream -> its last access."""
_NONE: _Uses = {}


class _Block:
    """An allocated block.

    Attributes:
        home: the stream whose pool it came from.
        before: the last access of that stream to any memory that was freed to its pool by then.
        before_foreign: the last accesses of other streams to such memory.
        used: the last access of its own stream.
        foreign: the accesses of other streams.
        recorded: streams that ``record_stream`` names.
    """

    __slots__ = ("before", "before_foreign", "foreign", "home", "recorded", "used")

    def __init__(self, home: int, before: Op | None, before_foreign: _Uses) -> None:
        self.home = home
        self.before = before
        self.before_foreign = before_foreign
        self.used: Op | None = None
        self.foreign: _Uses | None = None
        self.recorded: set[int] | None = None


class _Pools:
    """The memory of one rank.

    Attributes:
        blocks: those that are allocated.
        freed: stream -> blocks freed to its pool since its last allocation that other streams have
            accessed: the op that freed, and those accesses.
        last: stream -> its own last access to any memory that was freed to its pool.
        past: stream -> the last accesses of other streams to such memory; never changed in place.
    """

    __slots__ = ("blocks", "freed", "last", "past")

    def __init__(self) -> None:
        self.blocks: dict[int, _Block] = {}
        self.freed: dict[int, list[tuple[Op, _Uses]]] = {}
        self.last: dict[int, Op] = {}
        self.past: dict[int, _Uses] = {}


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
            before, before_foreign = pools.last.get(stream), pools.past.get(stream, _NONE)
            pools.blocks[op.other] = _Block(stream, before, before_foreign)
            if stream in pools.freed:
                return self._judge(pools, op, clocks)
        elif kind is FREE:
            _free(pools, op)
        elif kind is Kind.RECORD_STREAM:
            block = pools.blocks.get(op.other)
            if block is not None:
                block.recorded = {op.stream, *(block.recorded or ())}
        return ()

    def on_end(self) -> Iterable[Finding]:
        """Return nothing: what is never used again cannot be corrupted."""
        return ()

    def _use(self, pools: _Pools, op: Op, clocks: Clocks) -> Iterable[Finding]:
        """Note the accesses of an op; judge those that are the first of another stream."""
        blocks = pools.blocks
        stream = op.stream
        found: list[Finding] = []
        for access in op.accesses:
            block = blocks.get(access[0])
            if block is None:
                continue
            if block.home == stream:
                block.used = op
                continue
            if block.foreign is None:
                block.foreign = {}
            if stream not in block.foreign:
                found += self._first(block, access[0], op, clocks)
            block.foreign[stream] = op
        return found

    def _first(self, block: _Block, storage: int, op: Op, clocks: Clocks) -> list[Finding]:
        """Check that what the pool held before is done before another stream uses a block of it."""
        earlier = () if block.before is None else (block.before,)
        return [
            self._too_early(use, storage, op)
            for use in (*earlier, *block.before_foreign.values())
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
    block = pools.blocks.pop(free.other, None)
    if block is None:
        return
    home, used = block.home, block.used
    if used is not None:
        last = pools.last.get(home)
        if last is None or last.tick < used.tick:
            pools.last[home] = used
    if block.foreign is not None:
        recorded = block.recorded or ()
        unsafe = {stream: op for stream, op in block.foreign.items() if stream not in recorded}
        pools.freed.setdefault(home, []).append((free, unsafe))
        pools.past[home] = _merged(pools.past.get(home, _NONE), unsafe)


def _merged(past: _Uses, uses: _Uses) -> _Uses:
    """Return the later access of each stream, as a new record: blocks in use hold the old one."""
    merged = dict(past)
    for stream, op in uses.items():
        known = merged.get(stream)
        if known is None or known.tick < op.tick:
            merged[stream] = op
    return merged
