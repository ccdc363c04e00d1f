"""Mode: operators and collectives of a real process become ops, and then run as they would."""

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fsdp_sim.engine import patches, process_group
from fsdp_sim.engine.dispatch import RankMode
from fsdp_sim.engine.process_group import Entry, GroupCall
from fsdp_sim.engine.tensors import access_of
from fsdp_sim.engine.work import WorkFuture, join_before_backward_ends
from fsdp_sim.op import Access, Kind
from fsdp_sim.recorder.process import ProcessMachine


class RecordingMode(RankMode):
    """The dispatch mode of a recorded process."""

    def __init__(self, machine: ProcessMachine) -> None:
        super().__init__(machine)
        self.process = machine

    @patches.never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record one call and make it."""
        kwargs = kwargs or {}
        if not (types and patches.is_python_subclass(types)):
            if func.namespace == "c10d":
                record_call(self.process, func, args, kwargs)
                return func(*args, **kwargs)
            if func.namespace == "_c10d_functional" and patches.name_of(func) == "wait_tensor":
                _join(self.process, args[0])
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if patches.is_download(func, args, kwargs, out):
            stream = self.machine.current_stream_id()
            self.machine.emit(Kind.HOST_WAIT_STREAM, "to host", -1, other=stream)
        return out


def record_call(machine: ProcessMachine, func: Any, args: Any, kwargs: Any) -> None:
    """Emit what the simulator would for one ``c10d`` operator, before it is issued."""
    machine.last_event = None
    named = patches.named_arguments(func, args, kwargs)
    name = patches.name_of(func)
    try:
        call = process_group.call_of(machine, name, named)
    except (NotImplementedError, RuntimeError) as error:
        warnings.warn(f"c10d::{name} is not recorded: {error}", stacklevel=2)
        return
    communicator = call.communicator
    if communicator.batch is not None:
        communicator.batch.extend(call.entries)
    else:
        emit_call(machine, call)


def emit_call(machine: ProcessMachine, call: GroupCall) -> None:
    """Emit the launch, this rank's part of each entry, and the event behind an asynchronous call."""
    communicator = call.communicator
    stream, current = machine.stream_id(call.stream()), machine.current_stream_id()
    if stream != current:
        machine.emit(Kind.WAIT_STREAM, "launch", stream, other=current)
    batch = communicator.next("batch") if call.is_batch else None
    for entry in call.entries:
        meaning = entry.meaning
        signature = process_group.signature_of(communicator, entry, batch)
        accesses = (
            *_accesses(machine, meaning.inputs, stream, write=False),
            *_accesses(machine, meaning.outputs, stream, write=True),
        )
        machine.emit(Kind.COLLECTIVE, meaning.name, stream, accesses, call=signature)
    if call.is_async or any(entry.meaning.is_host for entry in call.entries):
        machine.last_event = machine.new_event_id()
        machine.emit(Kind.RECORD_EVENT, "work", stream, other=machine.last_event)
        if machine.functional_depth:
            _promise(machine, call.entries, machine.last_event)
        elif not machine.is_issuing:
            _join_for_cpp(machine, machine.last_event)


def _accesses(
    machine: ProcessMachine, tensors: list[Tensor], stream: int, *, write: bool
) -> list[Access]:
    accesses = []
    for tensor in tensors:
        record = machine.memory.record_of(tensor)
        if record.is_host:
            machine.memory.to_device(tensor)
        record.is_shared = record.is_shared or record.stream != stream
        access = access_of(tensor, record.ordinal, write=write)
        if access.lo != access.hi:
            accesses.append(access)
    return accesses


def _promise(machine: ProcessMachine, entries: Sequence[Entry], event: int) -> None:
    """Remember that ``wait_tensor`` of an output of a functional collective joins the event."""
    for entry in entries:
        meaning = entry.meaning
        for tensor in meaning.outputs if meaning.result is None else meaning.result:
            record = machine.memory.record_of(tensor)
            machine.functional_events.setdefault(record.ordinal, []).append(event)


def _join(machine: ProcessMachine, tensor: Tensor) -> None:
    record = machine.memory.record_of(tensor)
    for event in machine.functional_events.pop(record.ordinal, ()):
        machine.emit(Kind.WAIT_EVENT, "work.wait", machine.current_stream_id(), other=event)


def _join_for_cpp(machine: ProcessMachine, event: int) -> None:
    """C++ has issued an operation and will wait for it where nobody sees it.

    Inside a backward (DDP's reducer) that is before the backward ends, elsewhere at once.
    """
    future = WorkFuture()
    future.machine, future.events = machine, [event]
    if patches.current_autograd_node() is None:
        future.join()
    else:
        join_before_backward_ends(machine, future)
