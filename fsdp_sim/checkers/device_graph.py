"""Device graph: which issued device ops can complete, and which wait for each other for ever."""

from dataclasses import dataclass
from typing import Any

from fsdp_sim.clock import Clock
from fsdp_sim.op import Call, Op

POINT_TO_POINT = ("send", "recv")


def key_of(call: Call) -> tuple[Any, ...]:
    """Return what the parts of one operation have in common on all its ranks.

    A message of a batch travels on the group's communicator, any other on that of its pair of ranks.
    """
    if call.name in POINT_TO_POINT:
        return (call.group_name, call.group, call.batch is None, call.sequence)
    return (call.group_name, call.group, call.sequence)


def describe_call(call: Call, annotation: str | None) -> str:
    """Return in words what a rank called: kind, unit, place in its group, elements."""
    unit = f" [{annotation}]" if annotation else ""
    name, place = call.name, f"operation {call.sequence} of group {call.group_name!r}"
    if name in POINT_TO_POINT:
        name = f"message from rank {call.group[0]} to rank {call.group[1]}"
        place = f"number {call.sequence} in group {call.group_name!r}"
    return f"{name}{unit} ({place}, sizes {list(call.sizes)})"


def channel_of(call: Call) -> tuple[Any, ...]:
    """Return the communicator that a call runs on: the group's, or that of a pair of its ranks."""
    if call.name in POINT_TO_POINT and call.batch is None:
        return (call.group_name, *sorted(call.group))
    return (call.group_name,)


class Launch:
    """One device op of one rank: a part of one operation, or of all operations of one batch.

    It starts when everything before it is done, and is done when all its operations are.

    Attributes:
        tick: of its last entry on its stream.
        lane: those that its rank runs in order with it and that are not done: of its stream, or all.
        clock: what its first entry is ordered after.
        operations: what it takes part in.
        ops: for each operation, the op with which the rank takes part.
        before: launches of the rank that must be done before it starts; none once it has started.
        after: launches that have it among their ``before``.
        waiters: who wants to know when it is done.
    """

    __slots__ = (
        "_told_count",
        "after",
        "batch",
        "before",
        "clock",
        "is_done",
        "lane",
        "operations",
        "ops",
        "rank",
        "stream",
        "tick",
        "waiters",
    )

    def __init__(
        self, rank: int, call: Call, clock: Clock, stream: int, lane: "list[Launch]"
    ) -> None:
        self.rank = rank
        self.stream = stream
        self.batch = call.batch
        self.lane = lane
        self.tick = 0
        self.clock = dict(clock)
        self.operations: list[Operation] = []
        self.ops: list[Op | None] = []
        self.before: list[Launch] = []
        self.after: list[Launch] = []
        self.waiters: list[Any] = []
        self.is_done = False
        self._told_count = 0

    def newly_started(self) -> "list[Operation]":
        """Return the operations that have not been told yet that this launch has started."""
        new = self.operations[self._told_count :]
        self._told_count = len(self.operations)
        return new

    def op_of(self, operation: "Operation") -> Op | None:
        """Return the op with which the rank takes part in ``operation``."""
        return self.ops[self.operations.index(operation)]


class Operation:
    """A collective, or one message between two ranks: where the launches of its ranks meet.

    It is done when all its ranks' launches have started.
    """

    __slots__ = ("annotation", "call", "is_done", "key", "launches", "order", "started_count")

    def __init__(self, key: Any, call: Call, annotation: str | None, order: int) -> None:
        self.key = key
        self.call = call
        self.annotation = annotation
        self.launches: dict[int, Launch] = {}
        self.order = order
        self.started_count = 0
        self.is_done = False

    @property
    def missing(self) -> tuple[int, ...]:
        """The global ranks that have not issued their part, in group order."""
        ranks = self.call.group
        if len(self.launches) == 1 < len(ranks) == ranks.count(ranks[0]):  # to itself: two parts
            (launch,) = self.launches.values()
            return ranks[launch.operations.count(self) :]
        return tuple(rank for rank in ranks if rank not in self.launches)

    def describe(self) -> str:
        """Return the operation in words, as the rank called it that issued its part first."""
        return describe_call(self.call, self.annotation)


class DeviceGraph:
    """Which issued device ops can complete, as their streams and communicators order them.

    A launch is behind everything that its stream's clock covers, and behind the last launch on the
    same communicator; nothing else.  ``is_serial`` is the stricter rule that NCCL states for programs
    with several communicators: every device runs them one after the other, in order of issue.

    Source: NCCL user guide, "Using multiple NCCL communicators concurrently".
    """

    def __init__(self, *, is_serial: bool = False) -> None:
        self._is_serial = is_serial
        self._unfinished: dict[int, dict[int, list[Launch]]] = {}
        self._last: dict[Any, Launch] = {}
        self._operations: dict[Any, Operation] = {}
        self._order = 0

    def issue(
        self,
        rank: int,
        call: Call,
        clock: Clock,
        stream: int,
        *,
        annotation: str | None = None,
        op: Op | None = None,
    ) -> Launch:
        """Take in one rank's part of an operation; return its launch, a known one for a batch.

        ``clock`` says what is ordered before it, its own tick included.
        """
        launch = self._launch(rank, call, clock, stream)
        key = key_of(call)
        operation = self._operations.get(key)
        if operation is None:
            operation = Operation(key, call, annotation, self._next_order())
            self._operations[key] = operation
        operation.launches[rank] = launch
        launch.operations.append(operation)
        launch.ops.append(op)
        launch.tick = clock[stream]
        if launch.is_done:  # its earlier entries are complete already
            launch.is_done = False
            launch.lane.append(launch)
        return launch

    def _next_order(self) -> int:
        self._order += 1
        return self._order

    def _launch(self, rank: int, call: Call, clock: Clock, stream: int) -> Launch:
        channel = (rank, *channel_of(call))
        last = self._last.get(channel)
        if last is not None and call.batch is not None and last.batch == call.batch:
            return last
        lanes = self._unfinished.setdefault(rank, {})
        lane = lanes.setdefault(-1 if self._is_serial else stream, [])
        launch = self._last[channel] = Launch(rank, call, clock, stream, lane)
        launch.before = self._before(launch, last)
        for other in launch.before:
            other.after.append(launch)
        lane.append(launch)
        return launch

    def _before(self, launch: Launch, last: Launch | None) -> list[Launch]:
        """Return the last one on each stream that it is ordered after: the others are behind those."""
        before = [last] if last is not None and not last.is_done else []
        for lane in self._unfinished.get(launch.rank, {}).values():
            for other in reversed(lane):
                if self._is_serial or launch.clock.get(other.stream, 0) >= other.tick:
                    if other is not last:
                        before.append(other)
                    break
        return before

    def settle(self, launch: Launch) -> list[Launch]:
        """Complete what can complete now that ``launch`` is issued in full; return what is done."""
        done: list[Launch] = []
        queue = [launch]
        while queue:
            current = queue.pop()
            if current.before:
                current.before = [other for other in current.before if not other.is_done]
                if current.before:
                    continue
            for operation in current.newly_started():
                if self._complete(operation):
                    queue.extend(operation.launches.values())
            if current.is_done or [each for each in current.operations if not each.is_done]:
                continue
            current.is_done = True
            current.lane.remove(current)
            done.append(current)
            queue.extend(current.after)
            current.after = []
        return done

    def _complete(self, operation: Operation) -> bool:
        """One more of its launches has started: is that all?"""
        operation.started_count += 1
        if operation.started_count < len(operation.call.group):
            return False
        operation.is_done = True
        del self._operations[operation.key]
        return True

    def release(self, launch: Launch) -> None:
        """Settle a launch that closes a cycle which is no finding: let it start all the same."""
        for before in launch.before:
            before.after.remove(launch)
        launch.before = []
        self.settle(launch)

    def unfinished(self, rank: int) -> list[Launch]:
        """Return the launches of a rank that are not done, stream by stream in order of issue."""
        lanes = self._unfinished.get(rank, {})
        return [launch for lane in lanes.values() for launch in lane]

    def operations(self) -> list[Operation]:
        """Return what is issued by some rank and not done, in order of first issue."""
        return list(self._operations.values())

    # ------------------------------------------------------------------ cycles

    def cycle(self, launch: Launch) -> "list[Edge]":
        """Return the cycle that ``launch`` closes with its newest entry, one edge a rank, or nothing.

        Operations are kept in an order that every edge follows, so that most launches need no search;
        where one does not fit, what is behind its operation moves to the end.

        Source: Pearce and Kelly, "A dynamic topological sort algorithm" (2006), simplified.
        """
        operation = launch.operations[-1]
        for before in launch.before:
            for earlier in before.operations:
                if earlier.order > operation.order and not earlier.is_done:
                    behind = _behind(operation)
                    if earlier in behind:
                        return _search(launch)
                    for each in sorted(behind, key=lambda each: each.order):
                        each.order = self._next_order()
        return []


def _behind(operation: Operation) -> dict[Operation, None]:
    """Return the operations that cannot complete before ``operation``, and itself."""
    behind = {operation: None}
    queue = [operation]
    while queue:
        for launch in queue.pop().launches.values():
            for later in launch.after:
                for each in later.operations:
                    if each not in behind:
                        behind[each] = None
                        queue.append(each)
    return behind


def _search(launch: Launch) -> "list[Edge]":
    """Walk from what is before ``launch`` through what those wait for, until it is met again."""
    came: dict[Launch, tuple[Launch | None, Operation | None, Launch]] = {
        before: (None, None, launch) for before in launch.before if not before.is_done
    }
    queue = list(came)
    for current in queue:
        for operation in current.operations:
            for other in () if operation.is_done else operation.launches.values():
                if other is launch:
                    return _edges(came, current, operation)
                for before in other.before:
                    if before not in came and not before.is_done:
                        came[before] = (current, operation, other)
                        queue.append(before)
    raise AssertionError("a cycle that was found must be found again")


@dataclass(frozen=True)
class Edge:
    """On one rank's device, one operation must be done before another can start."""

    rank: int
    earlier: Operation
    later: Operation
    earlier_op: Op | None
    later_op: Op | None
    is_ordered: bool
    """By streams, events or the host; otherwise only by the order of issue."""

    def describe(self) -> str:
        """Return the edge in words."""
        return f"rank {self.rank}: {self.earlier.describe()} is ahead of {self.later.describe()}"


def _edges(
    came: "dict[Launch, tuple[Launch | None, Operation | None, Launch]]",
    last: Launch,
    closing: Operation,
) -> list[Edge]:
    """Walk back from where the search met its start."""
    edges: list[Edge] = []
    current: Launch | None = last
    leaving = closing
    while current is not None:
        previous, arriving, later = came[current]
        entered = arriving if arriving is not None else closing
        edges.append(
            Edge(
                current.rank,
                leaving,
                entered,
                current.op_of(leaving),
                later.op_of(entered),
                later.clock.get(current.stream, 0) >= current.tick,
            )
        )
        current, leaving = previous, entered
    return edges[::-1]
