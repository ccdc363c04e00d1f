"""Words: what checkers need to describe ops - roles of streams, births of blocks, missing edges."""

from collections import deque
from collections.abc import Iterable

from fsdp_sim.checkers.checker import ALLOC, FREE, MEMORY_KINDS, SYNC_KINDS
from fsdp_sim.clock import Clocks
from fsdp_sim.errors import Finding, OpSite
from fsdp_sim.op import Kind, Op

SYNCS_KEPT = 4096
"""Synchronisations remembered a rank; a report treats older ones as if there were none."""


class Words:
    """A fold like every checker, but it finds nothing: it remembers what reports have to say."""

    kinds = SYNC_KINDS | MEMORY_KINDS | {Kind.STREAM}

    def __init__(self) -> None:
        self._roles: dict[tuple[int, int], str] = {}
        self._allocs: dict[tuple[int, int], Op] = {}
        self._syncs: dict[int, deque[Op]] = {}

    def on_op(self, op: Op, clocks: Clocks) -> Iterable[Finding]:  # noqa: ARG002
        """Remember the op."""
        kind = op.kind
        if kind is ALLOC:
            self._allocs[op.rank, op.other] = op
        elif kind is FREE:
            self._allocs.pop((op.rank, op.other), None)
        elif kind is Kind.STREAM:
            self._roles[op.rank, op.stream] = op.name
        else:
            syncs = self._syncs.get(op.rank)
            if syncs is None:
                syncs = self._syncs[op.rank] = deque(maxlen=SYNCS_KEPT)
            syncs.append(op)
        return ()

    def on_end(self) -> Iterable[Finding]:
        """Return nothing."""
        return ()

    def stream(self, rank: int, stream: int) -> str:
        """Name a stream by its number and, where it is known, its role."""
        role = self._roles.get((rank, stream))
        return f"stream {stream}" if role is None else f"stream {stream} ({role})"

    def site(self, op: Op) -> OpSite:
        """Return the op as reports show it."""
        stream = self.stream(op.rank, op.stream)
        return OpSite(op.rank, op.index, op.name, stream, op.source, op.annotation)

    def birth(self, rank: int, storage: int) -> str:
        """Say how large a block is and where it was allocated, if that was seen."""
        alloc = self._allocs.get((rank, storage))
        return "" if alloc is None else f" ({alloc.nbytes} bytes, allocated at {place(alloc)})"

    def missing(self, earlier: Op, later: Op) -> tuple[str, str]:
        """Say what there is between two ops that nothing orders, and what is missing."""
        waiter = self.stream(later.rank, later.stream)
        last = self._last_wait(earlier, later)
        return (
            f"nothing orders op {earlier.index} before op {later.index}: {last}",
            f"missing edge: {waiter} must wait for {self._awaited(earlier, later)}",
        )

    def _last_wait(self, earlier: Op, later: Op) -> str:
        waiter, awaited = later.stream, earlier.stream
        syncs = self._syncs.get(earlier.rank, deque())
        for position in range(len(syncs) - 1, -1, -1):
            op = syncs[position]
            is_wait = op.index < later.index and op.stream == waiter
            if is_wait and self._source(syncs, position) == awaited:
                return f"stream {waiter} last waited for stream {awaited} at {place(op)}"
        return f"stream {waiter} has never waited for stream {awaited}"

    def _source(self, syncs: deque[Op], position: int) -> int | None:
        """Return the stream that a wait waits for, None if it is no wait of a stream."""
        op = syncs[position]
        if op.kind is Kind.WAIT_STREAM:
            return op.other
        if op.kind is Kind.WAIT_EVENT:
            for before in range(position - 1, -1, -1):
                record = syncs[before]
                if record.kind is Kind.RECORD_EVENT and record.other == op.other:
                    return record.stream
        return None

    def _awaited(self, earlier: Op, later: Op) -> str:
        """Name the event that would do, if the program records one behind the earlier op."""
        for op in self._syncs.get(earlier.rank, ()):
            if (
                op.kind is Kind.RECORD_EVENT
                and op.stream == earlier.stream
                and earlier.index < op.index < later.index
            ):
                return f"event {op.other}, recorded at {place(op)}"
        return f"{self.stream(earlier.rank, earlier.stream)} after op {earlier.index}"


def place(op: Op) -> str:
    """Return the op's number and source line, for the middle of a sentence."""
    return f"op {op.index} ({op.source})" if op.source else f"op {op.index}"
