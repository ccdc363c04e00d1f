"""Meeting: where the parts of one operation meet, and how values reach what waits for them.

Values move as soon as all parts are issued and their inputs are there; when hardware would have moved
them is judged apart, by the device graph.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fsdp_sim.checkers.device_graph import DeviceGraph, describe_call
from fsdp_sim.engine import patches
from fsdp_sim.engine.collectives import Compute
from fsdp_sim.engine.faults import corrupt
from fsdp_sim.engine.group_calls import GroupCalls
from fsdp_sim.engine.memory import StorageRecord
from fsdp_sim.engine.tensors import overlaps
from fsdp_sim.engine.world import Rank
from fsdp_sim.errors import RunError
from fsdp_sim.op import Access, Call, Source

if TYPE_CHECKING:
    from fsdp_sim.engine.machine import Machine
    from fsdp_sim.engine.store import WorldStore

Geometry = tuple[Any, Any, tuple[int, ...], tuple[int, ...]]
"""dtype, storage offset, sizes and strides: what makes a tensor of a storage."""


class Wire:
    """What the ranks of a world share: where parts meet, and what their devices can complete.

    Attributes:
        meetings: those that some rank has not joined yet.
        graph: every issued operation that is not complete on the devices.
        store: the world's key-value store.
        group_calls: who has made which group.
        held: in a late world, meetings whose values have not moved yet.
    """

    def __init__(self, store: "WorldStore", *, is_late: bool = False) -> None:
        self.store = store
        self.group_calls = GroupCalls()
        self.is_late = is_late
        self.held: dict[Meeting, None] = {}
        self.meetings: dict[Any, Meeting] = {}
        self.graph = DeviceGraph()

    def want(self, needs: Iterable[Any]) -> None:
        """Somebody needs values: in a late world they move only now."""
        if self.is_late:
            for each in needs:
                if isinstance(each, Pending):
                    each.want()

    def want_done(self, machine: "Machine", clock: dict[int, int] | None = None) -> None:
        """A host has waited for ``clock``, or ended: its values are there."""
        while True:
            wanted = [
                meeting
                for meeting in self.held
                if not (meeting.is_wanted or meeting.missing_count)
                and any(
                    part.machine is machine and _covers(clock, part) for part in meeting.present()
                )
            ]
            if not wanted:
                return
            for meeting in wanted:
                meeting.want()


def _covers(clock: dict[int, int] | None, part: "Part") -> bool:
    return clock is None or clock.get(part.stream, 0) >= part.tick


class Pending:
    """Work whose values are still to come: a part of an operation, or a deferred operator.

    Attributes:
        stream: where it runs, at ``tick``.
        unit: the same object for all entries of a batch, which run at once.
        waits_for: what must have its values first.
        dependents: what waits for it.
        waiters: ranks that are parked for it.
        is_ready: its inputs have been read, so that they may be overwritten.
        is_done: its outputs are written.
    """

    __slots__ = (
        "__weakref__",
        "dependents",
        "is_done",
        "is_ready",
        "machine",
        "records",
        "stream",
        "tick",
        "unit",
        "waiters",
        "waits_for",
    )

    def __init__(self, machine: "Machine", stream: int, unit: object) -> None:
        self.machine = machine
        self.stream = stream
        self.tick = machine.clocks.of(stream).get(stream, 0) + 1
        self.unit = unit
        self.records: list[StorageRecord] = []
        self.waits_for: list[Pending] = []
        self.dependents: list[Pending] = []
        self.waiters: list[Rank] = []
        self.is_ready = False
        self.is_done = False

    def note(self, record: StorageRecord, access: Access) -> None:
        """Mark bytes as read or written by this; it runs after what is pending on them and ordered.

        Called before its op is emitted, so that the clock of its stream says what is ordered before it.
        What is not ordered before it is a race, which the checkers report.
        """
        clock = self.machine.clocks.of(self.stream)
        kept = []
        for entry in record.pending:
            other, lo, hi, writes = entry
            conflicts = (access.write or writes) and lo < access.hi and access.lo < hi
            still_needed = writes or not other.is_ready
            is_before = clock.get(other.stream, 0) >= other.tick and other.unit is not self.unit
            if conflicts and still_needed and is_before:
                self._wait_for(other)
                if access.write and access.lo <= lo and hi <= access.hi:
                    continue  # who must wait for it must wait for this one
            kept.append(entry)
        record.pending = kept
        record.pending.append((self, access.lo, access.hi, access.write))
        self.records.append(record)

    def _wait_for(self, other: "Pending") -> None:
        if other not in self.waits_for:
            self.waits_for.append(other)
            other.dependents.append(self)

    def want(self) -> None:
        """Its values are needed: so are those that it waits for."""
        self.want_inputs()

    def want_inputs(self) -> None:
        """What it waits for is needed."""
        for other in tuple(self.waits_for):
            other.want()

    def proceed(self) -> "Sequence[Pending]":
        """All that it waited for is there: go on, and return what is done by that."""
        raise NotImplementedError

    def finish(self) -> None:
        """Its outputs are written: nobody needs to wait for it any more."""
        self.is_done = True
        for record in self.records:
            record.pending = [entry for entry in record.pending if entry[0] is not self]
        self.records = []
        for rank in self.waiters:
            rank.wake()
        self.waiters = []

    def move(self, old: int, new: Any) -> None:
        """Read and write another storage instead of the one at address ``old``, which is to go."""
        raise NotImplementedError

    def describe(self) -> str:
        """Return it in words, for reports."""
        raise NotImplementedError


def settle(pending: Pending) -> None:
    """Go on with what waits for nothing, then with what waited for that, and so on."""
    if pending.waits_for:
        return
    finish(pending.proceed())


def finish(first: Iterable[Pending]) -> None:
    """Finish what is done, and go on with what waited for it."""
    done = deque(first)
    while done:
        current = done.popleft()
        current.finish()
        for dependent in current.dependents:
            dependent.waits_for.remove(current)
            if not dependent.waits_for:
                done.extend(dependent.proceed())
        current.dependents = []


class Part(Pending):
    """One rank's part of an operation that has been issued.

    Takes its inputs' values once they are there, and holds its outputs weakly: the program may drop
    them.  ``stash`` holds the tensors of an asynchronous one until it is waited for, as NCCL does.
    """

    __slots__ = (
        "annotation",
        "call",
        "inputs",
        "is_corrupt",
        "meeting",
        "outputs",
        "source",
        "stash",
        "values",
    )

    def __init__(
        self, machine: "Machine", stream: int, unit: object, meeting: "Meeting", call: Call
    ) -> None:
        super().__init__(machine, stream, unit)
        self.meeting = meeting
        self.call = call
        self.annotation = machine.annotation
        self.source: Source | None = None
        self.is_corrupt = False
        self.inputs: list[Tensor] = []
        self.values: list[Any] = []
        self.outputs: list[tuple[Callable[[], Any], Geometry]] = []
        self.stash: list[Tensor] | None = None

    def take(self, inputs: Iterable[Tensor], outputs: Iterable[Tensor], extra: list[Any]) -> None:
        """Remember what to read and write when the time comes."""
        self.inputs = [tensor.detach() for tensor in inputs]
        self.outputs = [(weakref.ref(out.untyped_storage()), geometry_of(out)) for out in outputs]
        self.values = extra

    def want(self) -> None:
        """Its values are needed: so are those of all parts that it meets."""
        self.meeting.want()

    def proceed(self) -> Sequence[Pending]:
        """Take the inputs' values and meet the others."""
        with patches.below_dispatch():
            values = [tensor.clone() for tensor in self.inputs]
            if self.is_corrupt:
                corrupt(patches.bytes_of(values[0]))
            self.values = values + self.values
        self.inputs = []
        self.is_ready = True
        return self.meeting.complete_if_all_here()

    def move(self, old: int, new: Any) -> None:
        """Read and write another storage, and keep it alive until then."""
        self.inputs = [moved(tensor, old, new) for tensor in self.inputs]
        self.outputs = [
            ((lambda: new) if is_at(storage_ref(), old) else storage_ref, geometry)
            for storage_ref, geometry in self.outputs
        ]

    def write(self, results: Sequence[Tensor]) -> None:
        """Write the outputs that are still alive."""
        for (storage_ref, geometry), result in zip(self.outputs, results, strict=True):
            storage = storage_ref()
            if storage is not None and storage.nbytes():
                out = tensor_of(storage, geometry)
                out.copy_(result.reshape(out.shape))
        self.values = []

    def describe(self) -> str:
        """Return what this rank called, and where; another rank may have called something else."""
        called = describe_call(self.call, self.annotation)
        return called + (f" issued at {self.source}" if self.source else "")


class Meeting:
    """The k-th operation of a group: where its ranks' parts meet.

    Attributes:
        is_wanted: its values move as soon as they are there; in a late world only once needed.
    """

    __slots__ = ("compute", "is_wanted", "missing_count", "parts", "wire")

    def __init__(self, size: int, compute: Compute, wire: Wire) -> None:
        self.compute = compute
        self.wire = wire
        self.is_wanted = not wire.is_late
        self.parts: list[Part | None] = [None] * size
        self.missing_count = size

    def join(self, position: int, part: Part) -> None:
        """A rank has issued its part."""
        assert self.parts[position] is None
        self.parts[position] = part
        self.missing_count -= 1
        if self.wire.is_late:
            self.wire.held[self] = None

    def present(self) -> list[Part]:
        """Return the parts that have been issued."""
        return [part for part in self.parts if part is not None]

    def want(self) -> None:
        """Somebody needs the values."""
        if self.is_wanted:
            return
        self.is_wanted = True
        for part in self.present():
            part.want_inputs()
        if self in self.wire.held:
            finish(self.complete_if_all_here())

    def complete_if_all_here(self) -> list[Part]:
        """Move the bytes once all parts have their values, and are wanted; return the parts if so."""
        parts = [part for part in self.present() if part.is_ready]
        if len(parts) < len(self.parts):
            return []
        if not self.is_wanted:
            return []
        self.wire.held.pop(self, None)
        with patches.below_dispatch():
            try:
                results = self.compute([part.values for part in parts])
                for part, values in zip(parts, results, strict=True):
                    part.write(values)
            except Exception as error:
                _misfit(parts[0], error)
        return parts


def _misfit(part: Part, error: Exception) -> None:
    part.machine.rank.world.stop(
        RunError(
            f"the parts of {part.describe()} do not fit together ({error}); "
            "run with the checker 'collective_match' to see where they differ"
        )
    )


def geometry_of(tensor: Tensor) -> Geometry:
    """Return what makes the tensor of its storage."""
    return (tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def tensor_of(storage: Any, geometry: Geometry) -> Tensor:
    """Return a tensor of the storage with a version counter of its own, so that autograd sees nothing."""
    return patches.tensor_on(storage, *geometry)


def is_at(storage: Any, address: int) -> bool:
    """Whether a storage, which may be gone, is the one at ``address``."""
    return storage is not None and patches.storage_key(storage) == address


def moved(tensor: Tensor, old: int, new: Any) -> Tensor:
    """Return the same tensor on another storage if it is on the one at address ``old``."""
    if not is_at(tensor.untyped_storage(), old):
        return tensor
    return tensor_of(new, geometry_of(tensor))


def poison(outputs: Sequence[Tensor], accesses: Sequence[Access], reads: Sequence[Access]) -> None:
    """Fill outputs that are no inputs with NaN until the operation is complete."""
    with patches.below_dispatch():
        for tensor, access in zip(outputs, accesses, strict=True):
            if tensor.is_floating_point() and not any(overlaps(access, read) for read in reads):
                tensor.detach().fill_(float("nan"))
