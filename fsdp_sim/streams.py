"""Streams: CUDA's Stream and Event under torch.cpu's names; every use of one is an op.

Semantics are CUDA's: a stream runs its work in order; nothing orders two streams but waits; an event is
a snapshot of a stream; waiting on an event that was never recorded does nothing; streams made here do
not synchronise with the default stream.

Source: CUDA C++ programming guide 12.x, sections 3.2.8.5 and 3.2.8.7; torch.cuda.streams, torch 2.13.
"""

from typing import Any

import torch

from fsdp_sim import machine as machines
from fsdp_sim.machine import Machine, caller
from fsdp_sim.op import Kind, Source

QUERIES_UNTIL_DONE = 16
"""A query that was answered "not done" so many times in a row is answered "done" as soon as that is
legal: devices make progress, and a program that polls must end."""


def _machine() -> Machine:
    machine = machines.current()
    if machine is None:
        raise RuntimeError(
            "a simulated stream must be used on the thread of a rank, got another thread; "
            "call it from the rank's own program"
        )
    return machine


class Stream:
    """A queue of device work of one rank.

    Attributes:
        ordinal: per-rank id in order of first use; -1 before.
        role: what it is for, in reports: where it was made, "default", or the group it serves.
    """

    def __init__(
        self, device: Any = None, priority: int = 0, *, role: str | None = None, **_: Any
    ) -> None:
        self.machine = _machine()
        self.device = torch.device("cpu")
        self.priority = priority
        self.ordinal = -1
        self.source: Source | None = caller() if role is None else None
        self.role = role if role is not None else f"stream made at {self.source}"
        self._outer: list[Stream] = []

    @property
    def stream_id(self) -> int:
        """The stream's number."""
        return self.machine.stream_id(self)

    @property
    def cuda_stream(self) -> int:
        """The stream's number, as a handle."""
        return self.machine.stream_id(self)

    def wait_stream(self, stream: "Stream") -> None:
        """All later work on this stream runs after all work now on ``stream``."""
        machine = self.machine
        machine.emit(
            Kind.WAIT_STREAM, "wait_stream", machine.stream_id(self), other=machine.stream_id(stream)
        )

    def wait_event(self, event: "Event") -> None:
        """All later work on this stream runs after what ``event`` recorded."""
        event.wait(self)

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record ``event`` (a new one when None) on this stream and return it."""
        event = torch.cpu.Event() if event is None else event  # type: ignore[assignment]
        assert event is not None
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all work now on this stream is done, as far as the host can know."""
        machine = self.machine
        return _query(machine, self, dict(machine.clocks.of(machine.stream_id(self))))

    def synchronize(self) -> None:
        """The host waits for all work now on this stream."""
        machine = self.machine
        stream = machine.stream_id(self)
        machine.host_wait(dict(machine.clocks.of(stream)), "stream.synchronize()")
        machine.emit(Kind.HOST_WAIT_STREAM, "stream.synchronize", -1, other=stream)

    def __enter__(self) -> "Stream":
        self._outer.append(set_stream(self.machine, self))
        return self

    def __exit__(self, *_: object) -> None:
        set_stream(self.machine, self._outer.pop())

    def __repr__(self) -> str:
        return f"<simulated stream {self.ordinal}: {self.role}>"


class Event:
    """A marker in a stream."""

    def __init__(self, *, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self.enable_timing = enable_timing
        self.blocking = blocking
        self.ordinal = -1
        self.clock: dict[int, int] = {}
        self._unanswered = 0

    def record(self, stream: "Stream | None" = None) -> None:
        """Take a snapshot of ``stream`` (the current one when None); an earlier one is replaced."""
        machine = _machine()
        stream_id = machine.stream_id(stream if stream is not None else current_stream())
        self.ordinal = machine.new_event_id()
        machine.emit(Kind.RECORD_EVENT, "record_event", stream_id, other=self.ordinal)
        self.clock = machine.clocks.events[self.ordinal]

    def wait(self, stream: "Stream | None" = None) -> None:
        """All later work on ``stream`` (the current one) runs after the snapshot; none, no wait."""
        machine = _machine()
        stream_id = machine.stream_id(stream if stream is not None else current_stream())
        machine.emit(Kind.WAIT_EVENT, "wait_event", stream_id, other=self.ordinal)

    def query(self) -> bool:
        """Whether the snapshot is done, as far as the host can know."""
        return _query(_machine(), self, self.clock)

    def synchronize(self) -> None:
        """The host waits for the snapshot."""
        machine = _machine()
        machine.host_wait(self.clock, "event.synchronize()")
        machine.emit(Kind.HOST_WAIT_EVENT, "event.synchronize", -1, other=self.ordinal)

    def elapsed_time(self, end_event: "Event") -> float:
        """Return 0 milliseconds: the simulator has no time, only order."""
        return 0.0


class StreamContext:
    """Selects a stream for its body; None selects nothing."""

    def __init__(self, stream: "Stream | None") -> None:
        self.stream = stream
        self._outer: Stream | None = None

    def __enter__(self) -> None:
        if self.stream is not None:
            self._outer = set_stream(_machine(), self.stream)

    def __exit__(self, *_: object) -> None:
        if self._outer is not None:
            set_stream(_machine(), self._outer)
            self._outer = None


def set_stream(machine: Machine, stream: Stream) -> Stream:
    """Make ``stream`` current and return the one that was."""
    outer, machine.stream = machine.stream, stream
    return outer


def current_stream(device: Any = None) -> Stream:
    """Return the current stream of the rank."""
    return _machine().stream


def synchronize(device: Any = None) -> None:
    """The host waits for all streams of the rank's device."""
    machine = _machine()
    machine.host_wait(machine.clocks.all_streams(), "synchronize()")
    machine.emit(Kind.HOST_WAIT_STREAM, "synchronize", -1, other=-1)


def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    """The tensor's memory may not be reused before the work now on ``stream`` is done."""
    machine = _machine()
    record = machine.memory.record_of(tensor)
    machine.emit(
        Kind.RECORD_STREAM, "record_stream", machine.stream_id(stream), other=record.ordinal
    )


def _query(machine: Machine, asked: Any, clock: dict[int, int]) -> bool:
    """Answer a query: certain where ordering decides it, the schedule's choice elsewhere."""
    machine.rank.reach("poll")
    if machine.needed(clock):
        return False
    if all(machine.clocks.host.get(stream, 0) >= tick for stream, tick in clock.items()):
        return True
    asked._unanswered = getattr(asked, "_unanswered", 0) + 1
    if asked._unanswered <= QUERIES_UNTIL_DONE:
        if not machine.rank.world.choose_yes("query", machine.rank.index):
            return False
    asked._unanswered = 0
    return True


def new_stream(role: str) -> Stream:
    """Return a stream of the simulator's own, of the class that the world's program sees."""
    stream_class: Any = torch.cpu.Stream
    made: Stream = stream_class(role=role)
    return made


def stream_classes() -> tuple[type[Stream], type[Event]]:
    """Return classes for one world, so that what a program replaces on them dies with it."""
    return type("Stream", (Stream,), {}), type("Event", (Event,), {})

