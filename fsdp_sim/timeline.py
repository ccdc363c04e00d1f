"""Timeline: ops placed on a scale of their own, so that what may overlap is seen to overlap.

The simulator has no time, only order. Here each op gets the earliest place that order allows: not before
its host issued it, the op before it on its stream, and what its stream waited for. The host issues one op
a unit. An operator takes one unit, a collective ``COLLECTIVE_UNITS``: widths mean nothing else. Each rank
has a scale of its own, as it has streams of its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from fsdp_sim.op import Kind, Op

COLLECTIVE_UNITS = 12


@dataclass(frozen=True)
class Span:
    """One op on its stream.

    Units: ``start`` and ``end`` in ops issued by the host.
    """

    op: Op
    start: int
    end: int


@dataclass(frozen=True)
class Join:
    """A wait: what comes next on ``stream``, from ``end`` on, is behind ``other`` up to ``start``."""

    op: Op
    other: int
    start: int
    stream: int
    end: int


@dataclass
class RankTimeline:
    """The ops of one rank on its streams.

    Attributes:
        roles: what each stream is for, by its number.
        spans: operators and collectives, in order of issue.
        joins: waits of one stream for another, in order of issue.
    """

    roles: dict[int, str] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)


class _Placer:
    """Gives the ops of one rank their places, in order of issue."""

    def __init__(self) -> None:
        self.timeline = RankTimeline()
        self._host = 0
        self._ends: dict[int, int] = {}  # by stream: where what comes next may start
        self._events: dict[int, tuple[int, int]] = {}  # stream and place of each record

    def place(self, op: Op) -> None:
        match op.kind:
            case Kind.STREAM:
                self.timeline.roles[op.stream] = op.name
            case Kind.ATEN | Kind.COLLECTIVE:
                self._span(op, COLLECTIVE_UNITS if op.kind is Kind.COLLECTIVE else 1)
            case Kind.RECORD_EVENT:
                self._events[op.other] = op.stream, self._end(op.stream)
            case Kind.WAIT_EVENT if op.other in self._events:
                self._join(op, *self._events[op.other])
            case Kind.WAIT_STREAM:
                self._join(op, op.other, self._end(op.other))
            case Kind.HOST_WAIT_EVENT if op.other in self._events:
                self._host = max(self._host, self._events[op.other][1])
            case Kind.HOST_WAIT_STREAM:
                ends = self._ends.values() if op.other < 0 else [self._end(op.other)]
                self._host = max(self._host, *ends, 0)
            case _:
                pass

    def _end(self, stream: int) -> int:
        return self._ends.get(stream, 0)

    def _span(self, op: Op, units: int) -> None:
        self._host += 1
        start = max(self._host, self._end(op.stream))
        self._ends[op.stream] = start + units
        self.timeline.spans.append(Span(op, start, start + units))

    def _join(self, op: Op, other: int, place: int) -> None:
        end = max(place, self._end(op.stream), self._host)
        self._ends[op.stream] = end
        self.timeline.joins.append(Join(op, other, place, op.stream, end))


def rank_timeline(ops: Iterable[Op], rank: int) -> RankTimeline:
    """Place the ops of one rank.

    Args:
        ops: of a trace, in order of issue; those of other ranks are passed over.
        rank: whose.
    """
    placer = _Placer()
    for op in ops:
        if op.rank == rank:
            placer.place(op)
    return placer.timeline
