"""Happens-before of one rank's recorded ops as a graph, to say along which edges two of them are ordered.

Checkers judge order by clocks alone; here waits and records are nodes too, so that a path can be shown.
"""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from fsdp_sim.checkers.checker import ALLOC, WORK_KINDS
from fsdp_sim.op import Kind, Op

HOST = -1
"""The host, as a stream of its own."""

_STREAM_KINDS = WORK_KINDS | {ALLOC, Kind.RECORD_EVENT, Kind.WAIT_EVENT, Kind.WAIT_STREAM}
_HOST_KINDS = frozenset({Kind.HOST_WAIT_EVENT, Kind.HOST_WAIT_STREAM})


@dataclass(eq=False, slots=True)
class Node:
    """An op in the graph.

    Attributes:
        stream: whose order it is in; ``HOST`` for a wait of the host.
        position: its place there, counted from 1.
        before: nodes that it comes after: the one before it on its stream, then others.
        clock: stream -> position of the last node there that comes before it, or is it.
    """

    op: Op
    stream: int
    position: int
    before: "list[Node]" = field(default_factory=list)
    clock: dict[int, int] = field(default_factory=dict)

    def is_after(self, other: "Node") -> bool:
        """Whether a path leads from ``other`` to here."""
        return self.clock.get(other.stream, 0) >= other.position


class Graph:
    """The ops of one rank.

    Args:
        ops: of one rank, in order of issue.
        without: indices of waits and records that count as if they were not there.

    Attributes:
        nodes: by index of the op.
        crossings: (source, wait) of every edge between two streams, or a stream and the host.
    """

    def __init__(self, ops: Iterable[Op], without: Collection[int] = ()) -> None:
        self.nodes: dict[int, Node] = {}
        self.crossings: list[tuple[Node, Node]] = []
        self._last: dict[int, Node] = {}
        self._events: dict[int, Node] = {}
        self._host: Node | None = None
        self._without = without
        for op in ops:
            if op.kind in _STREAM_KINDS:
                self._add(op, op.stream)
            elif op.kind in _HOST_KINDS:
                self._host = self._add(op, HOST)

    def _add(self, op: Op, stream: int) -> Node:
        last = self._last.get(stream)
        node = Node(op, stream, 1 if last is None else last.position + 1)
        sources = self._sources(op) if op.index not in self._without else []
        chain = [last] if last is not None else []
        if stream != HOST and self._host is not None and not (last and last.is_after(self._host)):
            chain.append(self._host)
        node.before = [*chain, *sources]
        for earlier in node.before:
            for key, position in earlier.clock.items():
                if node.clock.get(key, 0) < position:
                    node.clock[key] = position
        node.clock[stream] = node.position
        self.crossings += [(source, node) for source in sources]
        if op.kind is Kind.RECORD_EVENT and op.index not in self._without:
            self._events[op.other] = node
        self.nodes[op.index] = self._last[stream] = node
        return node

    def _sources(self, op: Op) -> list[Node]:
        """Return what a wait waits for."""
        if op.kind in (Kind.WAIT_EVENT, Kind.HOST_WAIT_EVENT):
            found = [self._events.get(op.other)]
        elif op.kind in (Kind.WAIT_STREAM, Kind.HOST_WAIT_STREAM) and op.other >= 0:
            found = [self._last.get(op.other)]
        elif op.kind is Kind.HOST_WAIT_STREAM:
            found = [self._last[stream] for stream in sorted(self._last) if stream != HOST]
        else:
            found = []
        return [node for node in found if node is not None]

    def path(self, first: Node, last: Node) -> "list[tuple[Node, Node]] | None":
        """Return the edges between streams on a path with as few of them as can be; None without a path."""
        if not last.is_after(first):
            return None
        onward: dict[Node, tuple[Node, bool] | None] = {last: None}
        waiting = deque([last])
        while waiting:
            node = waiting.popleft()
            if node is first:
                break
            for earlier in node.before:
                if earlier in onward or not earlier.is_after(first):
                    continue
                crosses = earlier.stream != node.stream
                onward[earlier] = (node, crosses)
                (waiting.append if crosses else waiting.appendleft)(earlier)
        return _crossings(first, onward)


def _crossings(
    first: Node, onward: "dict[Node, tuple[Node, bool] | None]"
) -> "list[tuple[Node, Node]]":
    """Return the edges that cross streams on the way that a search found."""
    edges = []
    node, step = first, onward[first]
    while step is not None:
        following, crosses = step
        if (
            crosses and node.stream != HOST
        ):  # what the host launches after a wait needs no other word
            edges.append((node, following))
        node, step = following, onward[following]
    return edges
