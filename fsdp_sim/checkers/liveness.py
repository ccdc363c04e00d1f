"""Liveness: device ops that must wait for each other for ever, found when the last one is issued."""

from collections.abc import Iterable, Sequence
from typing import Any

from fsdp_sim.checkers import deadlock
from fsdp_sim.checkers.device_graph import (
    POINT_TO_POINT,
    DeviceGraph,
    Edge,
    Launch,
    channel_of,
)
from fsdp_sim.checkers.words import Words
from fsdp_sim.clock import Clock, Clocks
from fsdp_sim.errors import Finding
from fsdp_sim.op import Call, Kind, Op

BATCH_HINT = (
    "a send and a recv that are issued one by one wait for their peer on the device; "
    "issue them together with torch.distributed.batch_isend_irecv"
)


class Liveness:
    """Device ops that wait for each other for ever are found when the last of them is issued.

    Three rules.  A cycle of stream order and communicator order never completes (Deadlock).  Collectives
    of several communicators that nothing orders must be submitted in one order on all ranks (Deadlock):
    NCCL demands it.  Even then they may block each other on a device that cannot run both at once
    (PossibleDeadlock, a notice); so may opposite orders where a rank has only one of them in flight, and
    groups that share single ranks around a ring, as those of the axes of a mesh do.
    """

    kinds = frozenset({Kind.COLLECTIVE})

    def __init__(self, words: Words) -> None:
        self._words = words
        self._streams = DeviceGraph()
        self._submission = DeviceGraph(is_serial=True)
        self._latest: dict[int, dict[int, dict[Any, Op]]] = {}
        self.has_deadlock = False
        self._unordered_on: dict[Any, dict[Any, dict[int, None]]] = {}

    def on_op(self, op: Op, clocks: Clocks) -> Iterable[Finding]:
        """Take one issued operation in."""
        call = op.call
        if call is None or len(call.group) < 2:
            return ()
        found = self._cycle(op, call, clocks.of(op.stream))
        if found is None:
            found = self._unordered(op, call, clocks.of(op.stream))
        return () if found is None else (found,)

    def on_end(self) -> Iterable[Finding]:
        """Return nothing: what a stored trace does not hold may have been cut off."""
        return ()

    def never_completes(self, stands: Sequence[deadlock.Stand]) -> Finding | None:
        """Return what never completes, from where the hosts of a stored run stood at its end."""
        return deadlock.judge(self._streams.operations(), stands, self._words.site)

    def _cycle(self, op: Op, call: Call, clock: Clock) -> Finding | None:
        """Look for a cycle that this operation closes, in either graph."""
        launch = self._issue(self._streams, op, call, clock)
        edges = self._streams.cycle(launch)
        if edges:
            return self._deadlock(
                edges, "operations wait for each other on their devices, in a cycle"
            )
        self._streams.settle(launch)
        if call.name in POINT_TO_POINT:
            return None
        launch = self._issue(self._submission, op, call, clock)
        edges = self._submission.cycle(launch)
        if not edges:
            self._submission.settle(launch)
            return None
        if any(edge.is_ordered for edge in edges):
            self._submission.release(launch)
            return None
        return self._deadlock(
            edges,
            "collectives of several communicators must be submitted in one order on all ranks, "
            "and nothing else orders them",
        )

    def _issue(self, graph: DeviceGraph, op: Op, call: Call, clock: Clock) -> Launch:
        return graph.issue(op.rank, call, clock, op.stream, annotation=op.annotation, op=op)

    def _deadlock(self, edges: Sequence[Edge], message: str) -> Finding:
        self.has_deadlock = True
        ops = [op for edge in edges for op in (edge.earlier_op, edge.later_op) if op is not None]
        is_messages = all(op.call is not None and op.call.name in POINT_TO_POINT for op in ops)
        hints = (BATCH_HINT,) if is_messages else ()
        return Finding(
            kind="Deadlock",
            message=message,
            ops=tuple(dict.fromkeys(self._words.site(op) for op in ops)),
            detail=(*(edge.describe() for edge in edges), *hints),
            ranks=tuple(dict.fromkeys(edge.rank for edge in edges)),
        )

    def _unordered(self, op: Op, call: Call, clock: Clock) -> Finding | None:
        """Look for work of another communicator that may run on the device at the same time."""
        streams = self._latest.setdefault(op.rank, {})
        channel = channel_of(call)
        found = None
        for stream, channels in streams.items():
            for other_channel, other in channels.items():
                if other_channel != channel and clock.get(stream, 0) < other.tick:
                    found = self._may_block(other, op) or found
        streams.setdefault(op.stream, {})[channel] = op
        return found

    def _may_block(self, first: Op, second: Op) -> Finding | None:
        assert first.call is not None
        assert second.call is not None
        if first.call.name in POINT_TO_POINT or second.call.name in POINT_TO_POINT:
            return None
        shared = set(first.call.group) & set(second.call.group)
        if len(shared) > 1:
            why = f"ranks {sorted(shared)} take part in both"
        else:
            ring = self._ring(channel_of(first.call), channel_of(second.call), first.rank)
            if not ring:
                return None
            why = f"the same holds around a ring of groups on ranks {ring}"
        return Finding(
            kind="PossibleDeadlock",
            message=(
                f"rank {first.rank}: nothing orders {_name(first.call)} and {_name(second.call)} on the "
                f"device, and {why}: on a device that cannot run both at once they may block each other"
            ),
            ops=(self._words.site(first), self._words.site(second)),
            detail=("an event or a stream wait between them on every rank orders them",),
            ranks=(first.rank,),
        )

    def _ring(self, one: Any, other: Any, rank: int) -> list[int]:
        """Note that a rank leaves two communicators unordered; return the ranks of a ring that this closes.

        Each rank of a ring may run first what the next one runs second, and then all wait.
        """
        ranks = self._unordered_on.setdefault(one, {}).setdefault(other, {})
        if rank in ranks:
            return []
        ranks[rank] = None
        self._unordered_on.setdefault(other, {}).setdefault(one, {})[rank] = None
        came: dict[Any, tuple[int, ...]] = {one: ()}
        for current in (queue := [one]):
            for following, through in self._unordered_on[current].items():
                free = [each for each in through if each != rank and each not in came[current]]
                if free and following not in came:
                    came[following] = (*came[current], free[0])
                    queue.append(following)
        return sorted((rank, *came[other])) if other in came else []


def _name(call: Call) -> str:
    return f"{call.name} of group {call.group_name!r}"
