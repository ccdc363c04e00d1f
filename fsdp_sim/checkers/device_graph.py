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
        clock: what its first entry is ordered after.
        operations: what it takes part in.
        ops: for each operation, the op with which the rank takes part.
        before: launches of the rank that must be done before it starts.
        after: launches that have it among their ``before``.
        waiters: who wants to know when it is done.
    """

    __slots__ = (
        "after",
        "batch",
        "before",
        "clock",
        "is_done",
        "is_started",
        "operations",
        "ops",
        "rank",
        "stream",
        "tick",
        "waiters",
    )

    def __init__(self, rank: int, stream: int, batch: Any) -> None:
        self.rank = rank
        self.stream = stream
        self.batch = batch
        self.tick = 0
        self.clock: Clock = {}
        self.operations: list[Operation] = []
        self.ops: list[Op | None] = []
        self.before: list[Launch] = []
        self.after: list[Launch] = []
        self.waiters: list[Any] = []
        self.is_started = False
        self.is_done = False

    def op_of(self, operation: "Operation") -> Op | None:
        """Return the op with which the rank takes part in ``operation``."""
        return self.ops[self.operations.index(operation)]


class Operation:
    """A collective, or one message between two ranks: where the launches of its ranks meet.

    It is done when all its ranks' launches have started.
    """

    __slots__ = ("annotation", "call", "is_done", "launches")

    def __init__(self, call: Call, annotation: str | None) -> None:
        self.call = call
        self.annotation = annotation
        self.launches: dict[int, Launch] = {}
        self.is_done = False

    @property
    def missing(self) -> tuple[int, ...]:
        """The global ranks that have not issued their part, in group order."""
        return tuple(rank for rank in self.call.group if rank not in self.launches)

    def describe(self) -> str:
        """Return the operation in words: kind, unit, place in its group, elements."""
        call, unit = self.call, f" [{self.annotation}]" if self.annotation else ""
        name, place = call.name, f"operation {call.sequence} of group {call.group_name!r}"
        if name in POINT_TO_POINT:
            name = f"message from rank {call.group[0]} to rank {call.group[1]}"
            place = f"number {call.sequence} in group {call.group_name!r}"
        return f"{name}{unit} ({place}, sizes {list(call.sizes)})"


class DeviceGraph:
    """Which issued device ops can complete, as their streams and communicators order them.

    A launch is behind everything that its stream's clock covers, and behind the last launch on the
    same communicator; nothing else.  ``is_serial`` is the stricter rule that NCCL states for programs
    with several communicators: every device runs them one after the other, in order of issue.

    Source: NCCL user guide, "Using multiple NCCL communicators concurrently".
    """

    def __init__(self, *, is_serial: bool = False) -> None:
        self._is_serial = is_serial
        self._unfinished: dict[int, list[Launch]] = {}
        self._last: dict[Any, Launch] = {}
        self._operations: dict[Any, Operation] = {}

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
            operation = self._operations[key] = Operation(call, annotation)
        operation.launches[rank] = launch
        launch.operations.append(operation)
        launch.ops.append(op)
        launch.tick = clock[stream]
        if launch.is_done:  # its earlier entries are complete already
            launch.is_done = False
            self.unfinished(rank).append(launch)
        return launch

    def _launch(self, rank: int, call: Call, clock: Clock, stream: int) -> Launch:
        channel = (rank, *channel_of(call))
        last = self._last.get(channel)
        if last is not None and call.batch is not None and last.batch == call.batch:
            return last
        launch = self._last[channel] = Launch(rank, stream, call.batch)
        launch.clock = dict(clock)
        unfinished = self.unfinished(rank)
        if self._is_serial:
            launch.before = unfinished[-1:]
        else:
            launch.before = [
                other
                for other in unfinished
                if other is last or clock.get(other.stream, 0) >= other.tick
            ]
        for other in launch.before:
            other.after.append(launch)
        unfinished.append(launch)
        return launch

    def settle(self, launch: Launch) -> list[Launch]:
        """Complete what can complete now that ``launch`` is issued in full; return what is done."""
        done: list[Launch] = []
        queue = [launch]
        while queue:
            current = queue.pop()
            if not current.is_started:
                if not all(other.is_done for other in current.before):
                    continue
                current.is_started, current.before = True, []
            for operation in current.operations:
                if not operation.is_done and self._complete(operation):
                    queue.extend(operation.launches.values())
            if not current.is_done and all(each.is_done for each in current.operations):
                current.is_done = True
                self.unfinished(current.rank).remove(current)
                done.append(current)
                queue.extend(current.after)
                current.after = []
        return done

    def release(self, launch: Launch) -> None:
        """Settle a launch; if it closes a cycle, which is no finding, let it start all the same."""
        if self.cycle(launch):
            for before in launch.before:
                before.after.remove(launch)
            launch.before = []
        self.settle(launch)

    def _complete(self, operation: Operation) -> bool:
        launches = operation.launches
        if len(launches) < len(operation.call.group):
            return False
        if not all(launch.is_started for launch in launches.values()):
            return False
        operation.is_done = True
        del self._operations[key_of(operation.call)]
        return True

    def unfinished(self, rank: int) -> list[Launch]:
        """Return the launches of a rank that are not done, in order of issue."""
        return self._unfinished.setdefault(rank, [])

    def operations(self) -> list[Operation]:
        """Return what is issued by some rank and not done, in order of first issue."""
        return list(self._operations.values())

    def cycle(self, launch: Launch) -> "list[Edge]":
        """Return the cycle that ``launch`` closes, as one edge a rank; empty if there is none."""
        if launch.is_started or all(len(each.launches) < 2 for each in launch.operations):
            return []
        came: dict[Launch, tuple[Launch | None, Operation | None, Launch]] = {
            before: (None, None, launch) for before in launch.before if not before.is_done
        }
        queue = list(came)
        while queue:
            current = queue.pop()
            for operation in current.operations:
                for other in () if operation.is_done else operation.launches.values():
                    if other is launch:
                        return _edges(came, current, operation)
                    for before in other.before:
                        if before not in came and not before.is_done:
                            came[before] = (current, operation, other)
                            queue.append(before)
        return []


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
