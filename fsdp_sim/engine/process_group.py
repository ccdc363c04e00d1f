"""Process groups: backend "sim" - issuing collectives and point-to-point operations.

A rank's group is a plain ProcessGroup; every collective, from Python, C++ or a functional collective,
reaches the rank's dispatch mode as a ``c10d`` operator and is answered here.  Each rank's reads and
writes are its own, on its own stream, whichever rank moves the bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fsdp_sim.checkers.device_graph import key_of
from fsdp_sim.engine import machine as machines
from fsdp_sim.engine import patches
from fsdp_sim.engine.collectives import (
    COLLECTIVES,
    Meaning,
    Request,
    barrier,
    check_layout,
    check_rank,
    message,
)
from fsdp_sim.engine.machine import Machine
from fsdp_sim.engine.meeting import Meeting, Part, poison, settle
from fsdp_sim.engine.streams import Stream, new_stream
from fsdp_sim.engine.tensors import access_of
from fsdp_sim.engine.work import Work, is_from_cpp, let_go_of_passed
from fsdp_sim.op import Access, Call, Kind


class Communicator:
    """One rank's view of a process group.

    Attributes:
        name: the group's; a group that was destroyed and made again under one name gets a new one.
        ranks: global ranks in group order.
        rank: this rank's position among them.
        batch: what a coalescing manager has collected so far, None outside one.
    """

    def __init__(self, machine: Machine, group: Any) -> None:
        incarnation = machine.incarnations.get(group.group_name, 1)
        self.name = str(group.group_name) + (f"#{incarnation}" if incarnation > 1 else "")
        self.machine = machine
        self.ranks = patches.group_ranks(group)
        self.rank: int = group.rank()
        self.batch: list[Entry] | None = None
        self.batch_work: Work | None = None
        self._streams: dict[str, Stream] = {}
        self._sequences: dict[Any, int] = {}

    def next(self, key: Any = None) -> int:
        """Return the next sequence number of the group, or of a pair of its ranks."""
        number = self._sequences.get(key, 0)
        self._sequences[key] = number + 1
        return number

    def stream(self, peer: int | None = None) -> Stream:
        """Return the stream that the group, or a pair of its ranks, has for itself."""
        role = f"group {self.name}"
        if peer is not None:
            low, high = sorted((self.ranks[self.rank], self.ranks[peer]))
            role += f" between ranks {low} and {high}"
        stream = self._streams.get(role)
        if stream is None:
            stream = self._streams[role] = new_stream(role)
        return stream


@dataclass
class Entry:
    """One rank's part of one operation, before it is issued.

    Attributes:
        members: global ranks that take part.
        position: this rank's among them.
        sequence_key: whose counter numbers it: None for the group's collectives.
        is_corrupt: a fault changes what it sends.
    """

    meaning: Meaning
    members: tuple[int, ...]
    position: int
    sequence_key: Any = None
    is_async: bool = False
    is_corrupt: bool = False


@dataclass
class GroupCall:
    """What one call of a ``c10d`` operator asks of its group.

    Attributes:
        is_batch: its entries are one device op.
        peer: position of the other rank of a send or recv.
    """

    communicator: Communicator
    entries: Sequence[Entry]
    is_async: bool
    is_batch: bool = False
    peer: int | None = None

    def stream(self) -> Stream:
        """Return where it runs: asynchronous ones on a stream of the group's, or of the pair's."""
        communicator = self.communicator
        return communicator.stream(self.peer) if self.is_async else communicator.machine.stream


# ---------------------------------------------------------------------- one c10d operator

RETURNS_TENSORS = frozenset(
    (
        "_allgather_base_",
        "_reduce_scatter_base_",
        "allgather_",
        "allreduce_",
        "alltoall_",
        "broadcast_",
        "reduce_scatter_",
        "scatter_",
    )
)
"""Operators that return their outputs beside the handle (torch 2.11 to 2.14)."""


def dispatch_collective(machine: Machine, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Answer one ``c10d`` operator."""
    call = call_of(machine, name, patches.named_arguments(func, args, kwargs))
    communicator = call.communicator
    if communicator.batch is not None:
        work = _collect(communicator, call.entries)
    else:
        work = issue(
            communicator,
            call.entries,
            call.stream(),
            is_async=call.is_async,
            is_batch=call.is_batch,
        )
    if name == "monitored_barrier_":
        work.wait()
        return None
    return (args[0], work.boxed()) if name in RETURNS_TENSORS else work.boxed()


def call_of(machine: Machine, name: str, named: dict[str, Any]) -> GroupCall:
    """Return what a call of one ``c10d`` operator asks for.

    Args:
        machine: of the calling rank.
        name: of the operator.
        named: its arguments by name, defaults filled in.
    """
    if "process_group" not in named or name == "recv_any_source_":
        raise NotImplementedError(
            f"the simulator has no operation 'c10d::{name}', as NCCL has none"
        )
    communicator = communicator_of(machine, patches.unbox_group(named["process_group"]))
    if name in ("send", "recv_"):
        return _point_to_point(communicator, named, is_send=name == "send")
    return _collective(communicator, name, named)


def communicator_of(machine: Machine, group: Any) -> Communicator:
    """Return the rank's view of a group, which must be one that it made through torch.distributed."""
    if not patches.is_registered_group(group):
        raise RuntimeError(
            f"rank {machine.rank.index} must use a process group of its own in the running world, got "
            f"{group.group_name or 'one built by hand'!r}; make groups with torch.distributed inside "
            "the rank's program"
        )
    communicator = machine.communicators.get(group)
    if communicator is None:
        communicator = machine.communicators[group] = Communicator(machine, group)
    return communicator


def made_group(name: str) -> None:
    """A group is being made on this rank; the name may have been that of one destroyed before."""
    machine = machines.current()
    if machine is None:
        raise RuntimeError(
            "backend 'sim' must be used inside fsdp_sim.simulate, got none running on this thread"
        )
    machine.incarnations[name] = machine.incarnations.get(name, 0) + 1
    for group in list(machine.communicators):
        if not patches.is_registered_group(group):
            del machine.communicators[group]


def _collective(communicator: Communicator, name: str, named: dict[str, Any]) -> GroupCall:
    machine = communicator.machine
    means = COLLECTIVES.get(name)
    if means is None:
        raise NotImplementedError(f"the simulator has no collective 'c10d::{name}'")
    if means is barrier:
        machine.memory.discard(named["tensor"])  # torch 2.11 may forget to release the last one
    reduction, machine.reduction = machine.reduction, None
    ranks = communicator.ranks
    if "root_rank" in named:
        check_rank(f"{name.removesuffix('_')}: the root", named["root_rank"], len(ranks))
    meanings = means(Request(named, communicator.rank, len(ranks), reduction))
    is_async = bool(named.get("async_op", True))
    entries = [Entry(meaning, ranks, communicator.rank, is_async=is_async) for meaning in meanings]
    return GroupCall(communicator, entries, is_async=is_async, is_batch=len(entries) > 1)


def _point_to_point(
    communicator: Communicator, named: dict[str, Any], *, is_send: bool
) -> GroupCall:
    """A send or a recv runs on the stream of its pair of ranks, in order of issue.

    The tag takes part in matching only: NCCL has none, so messages of a pair match in order.
    """
    me, peer = communicator.rank, named["dst" if is_send else "src"]
    check_rank("send: dst" if is_send else "recv: src", peer, len(communicator.ranks))
    source, target = (me, peer) if is_send else (peer, me)
    ranks = communicator.ranks
    (meaning,) = message(Request(named, me, len(ranks)), is_send=is_send)
    meaning.peer = ranks[peer]
    members = (ranks[source], ranks[target])
    is_batch = communicator.batch is not None
    key = (*members, is_batch, is_send)  # a rank may be both ends
    entry = Entry(meaning, members, 0 if is_send else 1, key, is_async=True)
    return GroupCall(communicator, [entry], is_async=True, peer=peer)


# ---------------------------------------------------------------------- batches


def start_coalescing(group: Any, device: Any) -> None:  # noqa: ARG001  as ProcessGroup's
    """Begin to collect the operations of a coalescing manager."""
    machine = machines.current()
    assert machine is not None
    communicator = communicator_of(machine, group)
    communicator.batch, communicator.batch_work = [], Work(machine)


def end_coalescing(group: Any, device: Any) -> Work:  # noqa: ARG001  as ProcessGroup's
    """Issue all operations collected as one device op, and return its handle."""
    machine = machines.current()
    assert machine is not None
    communicator = communicator_of(machine, group)
    entries, communicator.batch = communicator.batch or [], None
    if not entries:
        return Work(machine)
    is_async = any(entry.is_async for entry in entries)
    stream = communicator.stream() if is_async else machine.stream
    return issue(communicator, entries, stream, is_async=is_async, is_batch=True)


def _collect(communicator: Communicator, entries: Sequence[Entry]) -> Work:
    assert communicator.batch is not None
    assert communicator.batch_work is not None
    communicator.batch.extend(entries)
    return communicator.batch_work


# ---------------------------------------------------------------------- issuing


def issue(
    communicator: Communicator,
    entries: Sequence[Entry],
    stream: Stream,
    *,
    is_async: bool,
    is_batch: bool = False,
) -> Work:
    """Issue this rank's part of an operation, or of all operations of a batch, and return at once.

    Ordering: an asynchronous operation runs on a stream of its own, behind the current one; a
    synchronous one runs on the current stream (NCCL, torch 2.11 and later).
    """
    machine = communicator.machine
    for entry in entries:
        check_layout(entry.meaning.name, (*entry.meaning.inputs, *entry.meaning.outputs))
    machine.rank.reach("issue")
    if machine.faults is None:
        return _issue(communicator, entries, stream, is_async=is_async, is_batch=is_batch)
    verdict = machine.faults.visit(machine.rank, "issue", entries[0].meaning.name)
    if verdict == "drop":
        machine.last_work = Work(machine)  # C++ holds only its half
        return machine.last_work
    for entry in entries:
        entry.is_corrupt = verdict == "corrupt"
    if verdict == "duplicate":
        _issue(communicator, entries, stream, is_async=is_async, is_batch=is_batch)
    return _issue(communicator, entries, stream, is_async=is_async, is_batch=is_batch)


def _issue(
    communicator: Communicator,
    entries: Sequence[Entry],
    stream: Stream,
    *,
    is_async: bool,
    is_batch: bool,
) -> Work:
    machine = communicator.machine
    stream_id, current = machine.stream_id(stream), machine.current_stream_id()
    if stream_id != current:
        machine.emit(Kind.WAIT_STREAM, "launch", stream_id, other=current)
    is_host = any(entry.meaning.is_host for entry in entries)
    keeps = is_async or is_from_cpp()
    work = Work(machine, is_host=is_host)
    batch = communicator.next("batch") if is_batch else None
    for entry in entries:
        part = _launch_entry(communicator, entry, stream_id, work, batch)
        if keeps:
            part.stash = entry.meaning.inputs + entry.meaning.outputs
    if is_async or is_host:
        work.event = machine.new_event_id()
        machine.emit(Kind.RECORD_EVENT, "work", stream_id, other=work.event)
    if keeps:
        _keep(machine, work, entries)
    machine.last_work = work
    for part in list(work.parts):
        settle(part)
        if part.meeting.is_wanted and machine.wire.is_late:
            part.want_inputs()  # another rank, which came first, needs its values
    assert work.launch is not None
    for launch in machine.wire.graph.settle(work.launch):
        for rank in launch.waiters:
            rank.wake()
        launch.waiters = []
    if not is_async:
        if not machine.sees_operators:
            work.await_values()
        work.parts = []
    return work


def _launch_entry(
    communicator: Communicator, entry: Entry, stream: int, work: Work, batch: int | None
) -> Part:
    """Emit the op with this rank's reads and writes, and let it meet the others' parts."""
    machine, meaning = communicator.machine, entry.meaning
    call = signature_of(communicator, entry, batch)
    part = Part(machine, stream, work, _meeting(machine, call, meaning), call)
    reads = _note_all(part, meaning.inputs, write=False)
    writes = _note_all(part, meaning.outputs, write=True)
    part.is_corrupt = entry.is_corrupt
    part.take(meaning.inputs, meaning.outputs, meaning.extra)
    op = machine.emit(Kind.COLLECTIVE, meaning.name, stream, (*reads, *writes), call=call)
    if op is not None:
        part.source = op.source
    work.launch = machine.wire.graph.issue(
        machine.rank.index,
        call,
        machine.clocks.of(stream),
        stream,
        annotation=part.annotation,
        op=op,
    )
    part.meeting.join(entry.position, part)
    if part.meeting.missing_count == 0:
        machine.wire.meetings.pop(key_of(call), None)
    work.parts.append(part)
    if machine.poison:
        poison([out for out in meaning.outputs if out.numel()], writes, reads)
    return part


def signature_of(communicator: Communicator, entry: Entry, batch: int | None) -> Call:
    """Return what the ranks must agree on, and count the entry."""
    meaning = entry.meaning
    return Call(
        entry.members,
        communicator.name,
        communicator.next(entry.sequence_key),
        meaning.name,
        meaning.reduce_op,
        meaning.dtype,
        meaning.sizes,
        meaning.root,
        meaning.peer,
        entry.is_async,
        meaning.tag,
        batch,
    )


def _meeting(machine: Machine, call: Call, meaning: Meaning) -> Meeting:
    meetings, key = machine.wire.meetings, key_of(call)
    meeting = meetings.get(key)
    if meeting is None:
        meeting = meetings[key] = Meeting(len(call.group), meaning.compute, machine.wire)
    return meeting


def _note_all(part: Part, tensors: Sequence[Tensor], *, write: bool) -> list[Access]:
    """Return the accesses to tensors that are not empty; NCCL's tensors are on the device."""
    memory = part.machine.memory
    accesses: list[Access] = []
    for tensor in tensors:
        record = memory.record_of(tensor)
        if record.is_host:
            memory.to_device(tensor)
        record.is_shared = record.is_shared or record.stream != part.stream
        access = access_of(tensor, record.ordinal, write=write)
        part.machine.check_is_there(part.call.name, record, access)
        if access.lo != access.hi:
            accesses.append(access)
            part.note(record, access)
    return accesses


def _keep(machine: Machine, work: Work, entries: Sequence[Entry]) -> None:
    """Keep alive what NCCL would keep, and nothing else.

    C++ holds only its half of a handle: the Python half must outlive it.  What was not waited for is
    let go once its memory may be used again, as NCCL's watchdog does.
    """
    for entry in entries:
        meaning = entry.meaning
        work.outputs += meaning.outputs if meaning.result is None else meaning.result
    let_go_of_passed(machine)
    machine.works[work] = None
