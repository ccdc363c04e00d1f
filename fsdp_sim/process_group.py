"""Process groups: backend "sim" - issuing, meeting, waiting for collectives and point-to-point.

A rank's group is a plain ProcessGroup; every collective, from Python, C++ or a functional collective,
reaches the rank's dispatch mode as a ``c10d`` operator and is answered here.  Each rank's reads and
writes are its own, on its own stream, whichever rank moves the bytes.
"""

import sys
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from fsdp_sim import machine as machines
from fsdp_sim import patches
from fsdp_sim.collectives import COLLECTIVES, Meaning
from fsdp_sim.machine import Machine
from fsdp_sim.memory import StorageRecord
from fsdp_sim.op import Access, Call, Kind, Source
from fsdp_sim.streams import Stream, new_stream, set_stream
from fsdp_sim.tensors import access_of, overlaps
from fsdp_sim.world import Rank


class Pending:
    """One rank's part of a collective that has been issued.

    Holds its inputs' values once they are there, and its outputs weakly: the program may drop them.
    """

    __slots__ = (
        "__weakref__",
        "annotation",
        "call",
        "clock",
        "event",
        "extra",
        "inputs",
        "is_done",
        "is_ready",
        "machine",
        "meeting",
        "outputs",
        "position",
        "records",
        "source",
        "stash",
        "stream",
        "tick",
        "values",
        "waiters",
        "waits_for",
    )

    def __init__(self, machine: Machine, meeting: "Meeting", position: int, call: Call) -> None:
        self.machine = machine
        self.meeting = meeting
        self.position = position
        self.call = call
        self.annotation: str | None = None
        self.source: Source | None = None
        self.stream = -1
        self.tick = 0
        self.event = -1
        self.clock: dict[int, int] = {}
        self.inputs: list[Tensor] = []
        self.values: list[Any] = []
        self.extra: list[Any] = []
        self.outputs: list[tuple[Any, Any]] = []
        self.records: list[StorageRecord] = []
        self.stash: list[Tensor] | None = None
        self.waits_for: list[Pending] = []
        self.waiters: list[Rank] = []
        self.is_ready = False
        self.is_done = False

    def take_inputs(self) -> None:
        """Take the inputs' values as soon as nothing pending writes them, and meet the others."""
        if self.is_ready or self.waits_for:
            return
        with torch._C._DisableTorchDispatch(), torch.no_grad():  # type: ignore[attr-defined]
            self.values = [tensor.detach().clone() for tensor in self.inputs] + self.extra
        self.inputs = []
        self.is_ready = True
        self.meeting.complete_if_all_here()

    def done(self) -> None:
        """The collective is complete on this rank: wake who waits for it."""
        self.is_done, self.values = True, []
        self.machine.pending.remove(self)
        for record in self.records:
            record.pending = [entry for entry in record.pending if entry[0] is not self]
        self.records = []
        for rank in self.waiters:
            rank.wake()
        self.waiters = []
        for other in list(self.machine.pending):
            if self in other.waits_for:
                other.waits_for.remove(self)
                other.take_inputs()


class Meeting:
    """The k-th operation of a group: where its ranks' parts meet."""

    __slots__ = ("compute", "is_done", "parts", "ranks")

    def __init__(self, ranks: tuple[int, ...], compute: Any) -> None:
        self.ranks = ranks
        self.compute = compute
        self.parts: list[Pending | None] = [None] * len(ranks)
        self.is_done = False

    def describe(self) -> str:
        """Return the operation in words: kind, unit, place in its group, elements."""
        issued = next(part for part in self.parts if part is not None)
        call, unit = issued.call, f"[{issued.annotation}] " if issued.annotation else ""
        return (
            f"{call.name} {unit}(operation {call.sequence} of group {call.group_name!r}, "
            f"sizes {list(call.sizes)})"
        )

    def missing(self) -> tuple[int, ...]:
        """Return the global ranks that have not issued their part."""
        return tuple(
            rank for rank, part in zip(self.ranks, self.parts, strict=True) if part is None
        )

    def complete_if_all_here(self) -> None:
        """Move the bytes once the last part has its values."""
        parts = [part for part in self.parts if part is not None and part.is_ready]
        if self.is_done or len(parts) < len(self.ranks):
            return
        self.is_done = True
        with torch._C._DisableTorchDispatch(), torch.no_grad():  # type: ignore[attr-defined]
            results = self.compute([part.values for part in parts])
            for part, values in zip(parts, results, strict=True):
                _write(part, values)
        for part in parts:
            part.done()


def _write(part: Pending, values: Any) -> None:
    for (storage_ref, geometry), value in zip(part.outputs, values, strict=True):
        storage = storage_ref()
        if storage is None or storage.nbytes() == 0:
            continue
        dtype, offset, shape, strides = geometry
        out = torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)
        out.copy_(value.reshape(shape))


class Work(dist.Work):
    """A handle of an issued operation.

    ``wait`` orders the current stream after it and does not block the host, as with NCCL; only a
    barrier blocks.  Like NCCL's stash, it holds the tensors of an asynchronous operation until waited.
    """

    def __init__(self, machine: Machine, parts: list[Pending], *, is_host: bool) -> None:
        super().__init__()
        self.machine = machine
        self.parts = parts
        self.is_host = is_host
        self.outputs: list[Tensor] = []

    def join(self) -> None:
        """Order the current stream after the operation and let go of its tensors."""
        machine = self.machine
        stream = machine.current_stream_id()
        for part in self.parts:
            if part.event >= 0:
                machine.emit(Kind.WAIT_EVENT, "work.wait", stream, other=part.event)
            part.stash = None
        self.outputs = []
        if self in machine.works:
            machine.works.remove(self)

    def wait(self, timeout: Any = None) -> bool:
        """Join; for a barrier the host stops until everybody is here."""
        self.join()
        if self.is_host:
            machine = self.machine
            clock = {part.stream: part.tick for part in self.parts}
            machine.host_wait(clock, "barrier")
            for part in self.parts:
                machine.emit(Kind.HOST_WAIT_EVENT, "barrier", -1, other=part.event)
        return True

    def synchronize(self) -> None:
        """Join."""
        self.join()

    def block_current_stream(self) -> None:
        """Join."""
        self.join()

    def is_completed(self) -> bool:
        """Whether the device is done with it, as far as the host can know."""
        machine = self.machine
        machine.rank.reach("poll")
        if any(not part.is_done for part in self.parts):
            return False
        host = machine.clocks.host
        if all(host.get(part.stream, 0) >= part.tick for part in self.parts):
            return True
        return machine.rank.world.choose_yes("is_completed", machine.rank.index)

    def is_success(self) -> bool:
        """Whether it completed: nothing fails here without ending the run."""
        return self.is_completed()

    def exception(self) -> None:
        """Return None: nothing fails here without ending the run."""
        return

    def result(self) -> list[Tensor]:
        """Return the output tensors of an asynchronous operation that was not waited for."""
        return self.outputs

    def get_future(self) -> Any:
        """Return a Future that is complete, and whose ``wait`` joins (as NCCL's does)."""
        future = WorkFuture()
        future.events = [part.event for part in self.parts if part.event >= 0]
        future.machine = self.machine
        future.set_result(self.outputs)
        if is_from_cpp():
            _join_before_backward_ends(self.machine, self)
        return future


class WorkFuture(Future):  # type: ignore[type-arg]
    """A completed Future that carries the events of the work behind it."""

    events: list[int]
    machine: Machine

    def _join(self) -> None:
        stream = self.machine.current_stream_id()
        for event in self.events:
            self.machine.emit(Kind.WAIT_EVENT, "future.wait", stream, other=event)

    def wait(self) -> Any:
        """Join the current stream and return the value."""
        self._join()
        return super().wait()

    def then(self, callback: Any) -> Any:
        """Run ``callback`` on a stream of its own, after the work; return its Future."""
        machine = self.machine
        stream = new_stream("future.then")
        chained = WorkFuture()
        chained.machine = machine
        outer = machine.stream
        stream.wait_stream(outer)
        set_stream(machine, stream)
        try:
            self._join()
            chained.set_result(callback(self))
        except Exception as error:  # noqa: BLE001  a Future carries what its callback raised
            chained.set_exception(error)  # type: ignore[arg-type]
        finally:
            set_stream(machine, outer)
        event = torch.cpu.Event()
        event.record(stream)  # type: ignore[arg-type]
        chained.events = [event.ordinal]  # type: ignore[attr-defined]
        return chained


def is_from_cpp() -> bool:
    """Whether C++ inside a backward called us: no Python frame of c10d stands in between."""
    frame = sys._getframe(2)
    while frame is not None and "/fsdp_sim/" in frame.f_code.co_filename:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code.co_filename.endswith("autograd/graph.py")


def _join_before_backward_ends(machine: Machine, work: Work) -> None:
    """C++ will wait for a Future that we cannot observe: join it in a callback queued before its."""
    if not machine.cpp_works:

        def join_all() -> None:
            works, machine.cpp_works = machine.cpp_works, []
            for each in works:
                each.join()

        patches.queue_backward_callback(join_all)
    machine.cpp_works.append(work)


# ---------------------------------------------------------------------- issuing


def dispatch_collective(machine: Machine, func: Any, args: Any, kwargs: Any) -> Any:
    """Answer one ``c10d`` operator."""
    named = _named_arguments(func, args, kwargs)
    group = patches.unbox_group(named["process_group"])
    _check_group(machine, group)
    name = func._opname
    if name in ("send", "recv_"):
        return _point_to_point(machine, group, named, is_send=name == "send").boxed()
    meaning_of = COLLECTIVES.get(name)
    if meaning_of is None:
        raise NotImplementedError(f"the simulator has no collective 'c10d::{name}'")
    meaning = meaning_of(named, group.rank(), group.size(), machine.premultiplier)
    machine.premultiplier = None
    work = issue(machine, group, meaning, is_async=bool(named.get("async_op", True)))
    if name == "monitored_barrier_":
        return work.wait() and None
    returns = func._schema.returns
    return (args[0], work.boxed()) if len(returns) == 2 else work.boxed()


def _named_arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return all arguments by name; the dispatcher strips those that equal their default."""
    schema = func._schema.arguments
    named = {arg.name: arg.default_value for arg in schema[len(args) :]}
    named.update(zip((arg.name for arg in schema), args, strict=False))
    named.update(kwargs)
    return named


def _check_group(machine: Machine, group: Any) -> None:
    if not patches.is_registered_group(group):
        raise RuntimeError(
            f"rank {machine.rank.index} must use a process group of its own in the running world, got "
            f"{group.group_name or 'one built by hand'!r}; make groups with torch.distributed inside "
            "the rank's program"
        )


def issue(
    machine: Machine,
    group: Any,
    meaning: Meaning,
    *,
    is_async: bool,
    key: Any = None,
    ranks: tuple[int, ...] | None = None,
    position: int | None = None,
    stream: Stream | None = None,
) -> Work:
    """Issue this rank's part and return at once.

    Ordering: an asynchronous collective runs on the group's own stream, behind the current one; a
    synchronous one runs on the current stream (NCCL, torch 2.11 and later).
    """
    machine.rank.reach("issue")
    name = group.group_name
    all_ranks = _ranks_of(machine, group)
    if key is None:
        key = (name, all_ranks, _next(machine, name))
        position = group.rank()
    assert position is not None
    members = ranks if ranks is not None else all_ranks
    call = Call(
        members,
        name,
        key[-1],
        meaning.name,
        meaning.reduce_op,
        meaning.dtype,
        meaning.sizes,
        meaning.root,
        meaning.peer,
        is_async,
    )
    meeting = machine.meetings.get(key)
    if meeting is None:
        meeting = machine.meetings[key] = Meeting(members, meaning.compute)
    part = Pending(machine, meeting, position, call)
    _run_on_stream(machine, part, meaning, stream or _stream_for(machine, name, is_async), is_async)
    meeting.parts[position] = part
    if not meeting.missing():
        del machine.meetings[key]
    machine.pending.append(part)
    work = Work(machine, [part], is_host=meaning.is_host)
    _keep(machine, work, meaning, is_async)
    part.take_inputs()
    return work


def _keep(machine: Machine, work: Work, meaning: Meaning, is_async: bool) -> None:
    """Keep alive what NCCL would keep, and nothing else."""
    part = work.parts[0]
    from_cpp = is_from_cpp()
    if is_async or from_cpp:
        part.stash = meaning.inputs + meaning.outputs
        work.outputs = list(meaning.result if meaning.result is not None else meaning.outputs)
    if from_cpp:
        machine.works.append(work)
    if machine.coalescing is not None:
        machine.coalescing.append(part)
    machine.last_work = work  # its Python half must outlive the way back through C++


def _run_on_stream(
    machine: Machine, part: Pending, meaning: Meaning, stream: Stream, is_async: bool
) -> None:
    """Emit the op with this rank's reads and writes, and find what it must wait for."""
    current = machine.current_stream_id()
    stream_id = machine.stream_id(stream)
    if stream_id != current:
        machine.emit(Kind.WAIT_STREAM, "launch", stream_id, other=current)
    clock = machine.clocks.of(stream_id)
    accesses: list[Access] = []
    for tensors, write in ((meaning.inputs, False), (meaning.outputs, True)):
        for tensor in tensors:
            record = machine.memory.record_of(tensor)
            access = access_of(tensor, record.ordinal, write=write)
            if access.lo == access.hi:
                continue
            accesses.append(access)
            for other, lo, hi, other_writes in record.pending:
                if other is part:
                    continue
                conflicts = (write or other_writes) and lo < access.hi and access.lo < hi
                if conflicts and not other.is_done and clock.get(other.stream, 0) >= other.tick:
                    if other not in part.waits_for and not (not other_writes and other.is_ready):
                        part.waits_for.append(other)
            record.is_shared = record.is_shared or record.stream != stream_id
            record.pending.append((part, access.lo, access.hi, write))
            part.records.append(record)
    part.stream = stream_id
    part.tick = clock[stream_id] + 1
    part.clock = dict(clock)
    op = machine.emit(
        Kind.COLLECTIVE, meaning.name, stream_id, tuple(accesses), call=part.call
    )
    if op is not None:
        part.tick, part.annotation, part.source = op.tick, op.annotation, op.source
    if is_async or meaning.is_host:
        part.event = machine.new_event_id()
        machine.emit(Kind.RECORD_EVENT, "work", stream_id, other=part.event)
    part.inputs = [tensor.detach() for tensor in meaning.inputs]
    part.extra = meaning.extra
    part.outputs = [(weakref.ref(t.untyped_storage()), _geometry(t)) for t in meaning.outputs]
    if machine.poison:
        _poison(meaning, accesses)


def _geometry(tensor: Tensor) -> Any:
    return (tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def _poison(meaning: Meaning, accesses: list[Access]) -> None:
    """Fill the outputs that are no inputs with NaN until the collective is complete."""
    reads = [access for access in accesses if not access.write]
    writes = iter([access for access in accesses if access.write])
    with torch._C._DisableTorchDispatch(), torch.no_grad():  # type: ignore[attr-defined]
        for tensor in meaning.outputs:
            if tensor.numel() == 0:
                continue
            access = next(writes)
            if tensor.is_floating_point() and not any(overlaps(access, read) for read in reads):
                tensor.detach().fill_(float("nan"))


def _ranks_of(machine: Machine, group: Any) -> tuple[int, ...]:
    ranks = machine.group_ranks.get(group.group_name)
    if ranks is None:
        ranks = machine.group_ranks[group.group_name] = patches.group_ranks(group)
    return ranks


def _next(machine: Machine, key: Any) -> int:
    number = machine.sequences.get(key, 0)
    machine.sequences[key] = number + 1
    return number


def _stream_for(machine: Machine, name: str, is_async: bool) -> Stream:
    if not is_async:
        return machine.stream
    return own_stream(machine, f"group {name}")


def own_stream(machine: Machine, role: str) -> Stream:
    """Return the stream that a group, or a pair of its ranks, has for itself."""
    stream = machine.group_streams.get(role)
    if stream is None:
        stream = machine.group_streams[role] = new_stream(role)
    return stream


def _point_to_point(machine: Machine, group: Any, named: Any, *, is_send: bool) -> Work:
    """Issue a send or a recv on the stream of its pair of ranks, in order of issue."""
    me, peer = group.rank(), named["dst" if is_send else "src"]
    source, target = (me, peer) if is_send else (peer, me)
    name, ranks, tensors = group.group_name, _ranks_of(machine, group), named["tensors"]
    pair = (name, ranks, "p2p", source, target)
    meaning = Meaning(
        "send" if is_send else "recv",
        tensors if is_send else [],
        [] if is_send else tensors,
        lambda values: [[], list(values[0])],
        tuple(tensor.numel() for tensor in tensors),
        str(tensors[0].dtype).removeprefix("torch."),
        peer=ranks[peer],
        result=tensors,
    )
    low, high = sorted((ranks[me], ranks[peer]))
    return issue(
        machine,
        group,
        meaning,
        is_async=True,
        key=(*pair, _next(machine, pair)),
        ranks=(ranks[source], ranks[target]),
        position=0 if is_send else 1,
        stream=own_stream(machine, f"group {name} between ranks {low} and {high}"),
    )


def start_coalescing(group: Any, device: Any) -> None:
    """Begin to collect the operations of a coalescing manager."""
    machine = machines.current()
    assert machine is not None
    machine.coalescing = []


def end_coalescing(group: Any, device: Any) -> Work:
    """Return one handle for all operations collected."""
    machine = machines.current()
    assert machine is not None
    parts, machine.coalescing = machine.coalescing or [], None
    work = Work(machine, parts, is_host=False)
    machine.last_work = work
    return work
