"""Memory peak: bytes of each rank as CUDA's caching allocator would count them."""

from collections.abc import Iterable
from typing import NamedTuple

from fsdp_sim.checkers.caching_allocator import CachingAllocator
from fsdp_sim.checkers.checker import ALLOC, FREE, MEMORY_KINDS
from fsdp_sim.checkers.words import Words
from fsdp_sim.clock import Clock, Clocks
from fsdp_sim.errors import Finding
from fsdp_sim.op import Kind, Op

LOG_MAX = 16384
"""Events of a rank that are kept before the model of the allocator takes them in."""

_FREE, _DEFER, _RELEASE = -1, -2, -3


class Peaks(NamedTuple):
    """The most that one rank held at any time.

    Units: bytes.

    Attributes:
        requested: as the program asked for.
        allocated: in blocks, as ``torch.cuda.max_memory_allocated`` counts.
        reserved: in segments taken from the device, as ``torch.cuda.max_memory_reserved`` counts.
    """

    requested: int
    allocated: int
    reserved: int


class _Account:
    """The memory of one rank.

    Requested bytes are counted at once.  The model of the allocator costs several times as much, so it
    is run over a log, when somebody asks or the log is long.

    Attributes:
        live: allocated block -> its requested bytes.
        recorded: allocated block -> streams that ``record_stream`` named.
        deferred: freed block -> what must be done before it may be used again.
    """

    __slots__ = (
        "_allocator",
        "_log",
        "_requested",
        "_requested_peak",
        "deferred",
        "live",
        "recorded",
    )

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.recorded: dict[int, set[int]] = {}
        self.deferred: dict[int, Clock] = {}
        self._requested = self._requested_peak = 0
        self._log: list[tuple[int, int, int]] = []
        self._allocator = CachingAllocator()

    def allocate(self, storage: int, nbytes: int, stream: int) -> None:
        """Count an allocation."""
        self.live[storage] = nbytes
        self._requested += nbytes
        if self._requested > self._requested_peak:
            self._requested_peak = self._requested
        self._log.append((storage, nbytes, stream))
        if len(self._log) > LOG_MAX:
            self._replay()

    def free(self, storage: int, clocks: Clocks) -> None:
        """Count a free, if the allocation was seen."""
        nbytes = self.live.pop(storage, None)
        if nbytes is None:
            return
        self._requested -= nbytes
        streams = self.recorded.pop(storage, None) if self.recorded else None
        if streams is None:
            self._log.append((storage, _FREE, 0))
        else:
            self._log.append((storage, _DEFER, 0))
            self.deferred[storage] = {s: clocks.of(s).get(s, 0) for s in sorted(streams)}

    def release(self, clocks: Clocks, stream: int) -> None:
        """Release what an allocation on ``stream`` knows to be done."""
        for storage, ticks in tuple(self.deferred.items()):
            if all(clocks.is_ordered(other, tick, stream) for other, tick in ticks.items()):
                del self.deferred[storage]
                self._log.append((storage, _RELEASE, 0))

    def allocator(self) -> CachingAllocator:
        """Return the model of the allocator as it is now."""
        self._replay()
        return self._allocator

    def peaks(self) -> Peaks:
        """Return the most so far."""
        allocator = self.allocator()
        return Peaks(self._requested_peak, allocator.allocated_peak, allocator.reserved)

    def _replay(self) -> None:
        allocator = self._allocator
        for storage, what, stream in self._log:
            if what >= 0:
                allocator.allocate(storage, what, stream)
            elif what == _FREE:
                allocator.free(storage)
            elif what == _DEFER:
                allocator.defer(storage)
            else:
                allocator.release(storage)
        self._log.clear()


class MemoryPeak:
    """Follows every allocation of each rank; finds nothing, and is asked for ``peaks``.

    A block that ``record_stream`` names stays out of its pool until the work on that stream is ordered
    before an allocation.
    """

    kinds = MEMORY_KINDS | {Kind.RECORD_STREAM}

    def __init__(self, words: Words) -> None:  # noqa: ARG002  made like every checker
        self._accounts: dict[int, _Account] = {}

    def peaks(self, rank: int) -> Peaks:
        """Return the most that a rank held at any time."""
        account = self._accounts.get(rank)
        return Peaks(0, 0, 0) if account is None else account.peaks()

    def allocator(self, rank: int) -> CachingAllocator:
        """Return the model of a rank's allocator as it is now."""
        return self._accounts.setdefault(rank, _Account()).allocator()

    def on_op(self, op: Op, clocks: Clocks) -> Iterable[Finding]:
        """Allocate and free."""
        account = self._accounts.get(op.rank)
        if account is None:
            account = self._accounts[op.rank] = _Account()
        kind = op.kind
        if kind is ALLOC:
            if account.deferred:
                account.release(clocks, op.stream)
            account.allocate(op.other, op.nbytes, op.stream)
        elif kind is FREE:
            account.free(op.other, clocks)
        else:
            account.recorded.setdefault(op.other, set()).add(op.stream)
        return ()

    def on_end(self) -> Iterable[Finding]:
        """Return nothing."""
        return ()
