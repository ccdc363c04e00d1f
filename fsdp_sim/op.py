"""Op: one thing a program did to a device, and the bytes it touched."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Source:
    """A line of source code.

    Attributes:
        user: where the line is a library's, the user's line that led to it.
    """

    file: str
    line: int
    user: "Source | None" = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def from_user(self) -> "tuple[Source, ...]":
        """Return the line behind the user's line that led to it, if that is another one."""
        return (self,) if self.user is None else (self.user, self)


UNKNOWN = Source("", 0)
"""A source line that is still to be looked up."""


class Kind(StrEnum):
    """What an op is.  Everything that orders work is one of the five synchronisations."""

    ATEN = "aten"
    """An operator that reads and writes tensors on a stream."""
    COLLECTIVE = "collective"
    """One rank's part of a collective or point-to-point operation, on one stream."""
    ALLOC = "alloc"
    """Memory taken from the pool of a stream."""
    FREE = "free"
    """Memory given back to the pool of the stream that it was taken from."""
    RECORD_STREAM = "record_stream"
    """A block may not be reused before the work now on another stream is done."""
    RECORD_EVENT = "record_event"
    """An event takes a snapshot of a stream."""
    WAIT_EVENT = "wait_event"
    """A stream waits for an event's snapshot."""
    WAIT_STREAM = "wait_stream"
    """A stream waits for all work now on another stream."""
    HOST_WAIT_STREAM = "host_wait_stream"
    """The host waits for all work now on a stream (all streams when it is negative)."""
    HOST_WAIT_EVENT = "host_wait_event"
    """The host waits for an event's snapshot."""
    STREAM = "stream"
    """A stream is used for the first time; ``name`` is its role, ``source`` where it was made."""
    RANGE_PUSH = "range_push"
    """A range that names what the runtime is doing opens."""
    RANGE_POP = "range_pop"
    """The innermost range closes."""


class Access(NamedTuple):
    """Bytes [lo, hi) of a storage, read or written.

    ``strides`` is None when every byte of the range is touched; otherwise it is
    ``(itemsize, sizes, strides)`` of the view in elements, so that interleaved views do not collide.
    """

    storage: int
    lo: int
    hi: int
    write: bool
    strides: tuple[int, tuple[int, ...], tuple[int, ...]] | None = None


class Call(NamedTuple):
    """What a collective must agree on across ranks, and where it stands in its group."""

    group: tuple[int, ...]
    """Global ranks of the group, in group order."""
    group_name: str
    sequence: int
    """Position among the collectives of the group; for point-to-point, among those of the pair."""
    name: str
    """One canonical name per kind, on every torch version."""
    reduce_op: str | None
    dtype: str
    sizes: tuple[int, ...]
    root: int | None = None
    peer: int | None = None
    is_async: bool = False
    tag: int = 0
    """Of a message between two ranks."""
    batch: int | None = None
    """Which batch of its group it is an entry of (a coalescing manager, ``batch_isend_irecv``), if any:
    all entries of a batch are one device op."""


@dataclass(slots=True)
class Op:
    """One op of one rank.  Ids are per-rank counters in order of first use.

    Attributes:
        rank: the rank that did it.
        index: its position among the rank's ops.
        stream: the stream it runs on; for a wait, the stream that waits.
        other: the stream or event waited for or recorded; the storage of an alloc, free or
            record_stream.
        tick: its position on its stream, once the clocks have seen it.
        nbytes: of an alloc.
    """

    rank: int
    index: int
    kind: Kind
    name: str
    stream: int
    accesses: tuple[Access, ...] = ()
    other: int = -1
    nbytes: int = 0
    annotation: str | None = None
    source: Source | None = None
    call: Call | None = None
    tick: int = 0
