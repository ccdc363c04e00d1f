"""Trace: the ops of a run, their digests, and the forms in which people and tools read them."""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby, zip_longest
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from fsdp_sim import chrome, trace_file
from fsdp_sim.checkers.deadlock import Stand
from fsdp_sim.digest import RankDigest, add_words, combined
from fsdp_sim.errors import ConfigError, RunError
from fsdp_sim.op import Access, Kind, Op
from fsdp_sim.schedule import Schedule

TRACE_OPS_MAX = 10_000_000
"""Ops that a trace keeps; one more is an error."""
LAST_OPS_KEPT = 256
"""Ops that a trace keeps when it was not asked for: the last ones, for reports."""

_rank = attrgetter("rank")


class Trace:
    """The ops of all ranks in order of issue, and digests that need none of them kept.

    Args:
        world_size: number of ranks.
        keep_ops: keep all ops; else the last ones only.
        ranks: whose ops it holds; all by default. A recording of one process holds one rank's.

    Attributes:
        schedule: how the run was scheduled, when that is known.
        stands: where the ranks' hosts stood when the run ended; none where that is not known.
        keeps_all: all ops are kept.
    """

    def __init__(
        self, world_size: int, *, keep_ops: bool = True, ranks: Iterable[int] | None = None
    ) -> None:
        self.world_size = world_size
        self.ranks = tuple(range(world_size)) if ranks is None else tuple(sorted(ranks))
        self.schedule: Schedule | None = None
        self.stands: tuple[Stand, ...] = ()
        self.keeps_all = keep_ops
        self._ops: list[Op] | deque[Op] = [] if keep_ops else deque(maxlen=LAST_OPS_KEPT)
        self._digests = [RankDigest() for _ in range(world_size)]

    def extend(self, ops: Sequence[Op]) -> None:
        """Take ops in.

        Raises:
            RunError: a trace of more than ``TRACE_OPS_MAX`` ops was asked for.
        """
        if self.keeps_all and len(self._ops) + len(ops) > TRACE_OPS_MAX:
            raise RunError(
                f"a trace keeps {TRACE_OPS_MAX} ops at most; trace fewer steps, or pass trace=False"
            )
        self._ops.extend(ops)
        for rank, of_rank in groupby(ops, _rank):
            self._digests[rank].extend(of_rank)

    @property
    def ops(self) -> Sequence[Op]:
        """All ops in order of issue; the last ones if no trace was asked for."""
        return tuple(self._ops)

    @property
    def digest(self) -> str:
        """The same for the same code, torch minor version and device type, wherever it runs."""
        return combined(self._digests[rank].full() for rank in self.ranks)

    @property
    def order_digest(self) -> str:
        """The same for the same order of streams, events, collectives and labelled allocations."""
        return combined(self._digests[rank].order() for rank in self.ranks)

    def to_text(self) -> str:
        """Return one line an op."""
        return "\n".join(op_text(op) for op in self._ops)

    def to_chrome(self, path: str | Path) -> None:
        """Write a timeline for Perfetto: one row a rank and stream, arrows for waits."""
        chrome.write(path, self.all_ops(), self.world_size)

    def save(self, path: str | Path) -> None:
        """Write the trace as ``load`` reads it."""
        from torch import __version__ as torch_version

        header = {
            "world_size": self.world_size,
            "ranks": self.ranks,
            "stands": [trace_file.stand_record(stand) for stand in self.stands],
            "schedule": None if self.schedule is None else str(self.schedule),
            "torch": str(torch_version),
            "digest": self.digest,
            "order_digest": self.order_digest,
        }
        trace_file.write(path, header, self.all_ops())

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        """Read a trace as ``save`` wrote it.

        Raises:
            ConfigError: the file is no trace of this version, or its ops have another digest than it says.
        """
        header, ops = trace_file.read(path)
        trace = cls.of(ops, header["world_size"], header["ranks"])
        trace.stands = header["stands"]
        if header["schedule"] is not None:
            trace.schedule = Schedule.parse(header["schedule"])
        if trace.digest != header["digest"]:
            raise ConfigError(
                f"{path} must hold the ops of digest {header['digest']}, got {trace.digest};"
                " it was changed after it was written"
            )
        return trace

    @classmethod
    def of(cls, ops: Iterable[Op], world_size: int, ranks: Iterable[int] | None = None) -> "Trace":
        """Make a trace of given ops."""
        trace = cls(world_size, ranks=ranks)
        trace.extend(tuple(ops))
        return trace

    @classmethod
    def merged(cls, traces: Sequence["Trace"]) -> "Trace":
        """Join the traces of single processes to one of all ranks, in order of rank.

        Raises:
            ConfigError: they are of different numbers of ranks, or a rank is missing or comes twice.
        """
        world_size = traces[0].world_size
        sizes = sorted({trace.world_size for trace in traces})
        if len(sizes) > 1:
            raise ConfigError(f"traces to merge must be of one world size, got {sizes}")
        held = sorted(rank for trace in traces for rank in trace.ranks)
        if held != list(range(world_size)):
            raise ConfigError(
                f"traces to merge must hold each of {world_size} ranks once, got ranks {held}"
            )
        by_rank = sorted(traces, key=lambda trace: trace.ranks)
        return cls.of((op for trace in by_rank for op in trace.all_ops()), world_size)

    def all_ops(self) -> Sequence[Op]:
        """Return the ops.

        Raises:
            ConfigError: they were not kept.
        """
        if not self.keeps_all:
            raise ConfigError("the ops were not kept; pass trace=True to the run")
        return self.ops


class Difference(NamedTuple):
    """The first op of a rank that is not the same in two traces; None where one has ended."""

    rank: int
    position: int
    first: Op | None
    second: Op | None

    def __str__(self) -> str:
        """Return both ops, one under the other."""
        first, second = (
            "(the end)" if op is None else op_text(op) for op in (self.first, self.second)
        )
        return f"rank {self.rank} differs at entry {self.position}:\n  {first}\n  {second}"


def diff(one: Trace, other: Trace, *, order_only: bool = False) -> Difference | None:
    """Return the first entry that differs, by rank, or None when the digests are equal.

    Where one trace holds some ranks only, those are compared.

    Args:
        one: the first trace.
        other: the second one.
        order_only: compare as ``order_digest`` does, else as ``digest`` does.

    Raises:
        ConfigError: the traces are of different numbers of ranks or hold none in common, or their ops
            were not kept.
    """
    if one.world_size != other.world_size:
        raise ConfigError(
            f"traces must be of one world size, got {one.world_size} and {other.world_size}"
        )
    common = [rank for rank in one.ranks if rank in other.ranks]
    if not common:
        raise ConfigError(
            f"traces must hold a rank in common, got ranks {one.ranks} and {other.ranks}"
        )
    firsts, seconds = _by_rank(one, order_only), _by_rank(other, order_only)
    for rank in common:
        pairs = firsts[rank], seconds[rank]
        for position, (first, second) in enumerate(zip_longest(*pairs, fillvalue=_END)):
            if first[0] != second[0]:
                return Difference(rank, position, first[1], second[1])
    return None


_Entry = tuple[tuple[int, ...], Op | None]
_END: _Entry = ((), None)


def _by_rank(trace: Trace, order_only: bool) -> list[list[_Entry]]:  # noqa: FBT001
    entries: list[list[_Entry]] = [[] for _ in range(trace.world_size)]
    for op in trace.all_ops():
        full: list[int] = []
        order: list[int] = []
        add_words((op,), full, order)
        words = tuple(order if order_only else full)
        if words:
            entries[op.rank].append((words, op))
    return entries


_OF_A_BLOCK = (Kind.ALLOC, Kind.FREE, Kind.RECORD_STREAM)
_OF_AN_EVENT = (Kind.RECORD_EVENT, Kind.WAIT_EVENT, Kind.HOST_WAIT_EVENT)


def op_text(op: Op) -> str:
    """Return one op as a line of text."""
    parts = [f"rank {op.rank}", f"op {op.index}"]
    parts.append("host" if op.stream < 0 else f"stream {op.stream}")
    parts.append(op.name)
    if op.annotation is not None:
        parts.append(f"[{op.annotation}]")
    if op.kind in _OF_A_BLOCK:
        parts.append(f"block {op.other}" + (f" of {op.nbytes} bytes" if op.nbytes else ""))
    elif op.kind in _OF_AN_EVENT:
        parts.append(f"event {op.other}")
    elif op.other >= 0:
        parts.append(f"for stream {op.other}")
    for verb, is_write in (("reads", False), ("writes", True)):
        ranges = [_access_text(access) for access in op.accesses if access.write is is_write]
        if ranges:
            parts.append(f"{verb} {' '.join(ranges)}")
    if op.source is not None:
        parts.append(str(op.source))
    return "  ".join(parts)


def _access_text(access: Access) -> str:
    strided = "" if access.strides is None else " strided"
    return f"{access.storage}[{access.lo}:{access.hi}{strided}]"
