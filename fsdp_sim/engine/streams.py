"""Streams: CUDA's Stream and Event under torch.cpu's names; every use of one is an op.

Semantics are CUDA's: a stream runs its work in order; nothing orders two streams but waits; an event is
a snapshot of a stream; waiting on an event that was never recorded does nothing; streams made here do
not synchronise with the default stream.

Source: CUDA C++ programming guide 12.x, sections 3.2.8.5 and 3.2.8.7; torch.cuda.streams, torch 2.13.
"""

from typing import Any, NoReturn, Protocol, Self

import torch

from fsdp_sim.engine import machine as machines
from fsdp_sim.engine import threads
from fsdp_sim.engine.machine import LOCAL, Machine, caller
from fsdp_sim.op import Kind, Source

QUERIES_UNTIL_DONE = 16
"""A query that was answered "not done" so many times in a row is answered "done" as soon as that is
legal: devices make progress, and a program that polls must end."""

PRIORITY_LOWEST, PRIORITY_HIGHEST = 0, -3
"""As on current GPUs; a priority chooses between kernels that may both run, so it orders nothing."""


def _machine() -> Machine:
    machine = machines.current()
    if machine is None:
        if LOCAL.started_by is not None:
            threads.refuse(LOCAL.started_by, "a stream function")
        raise RuntimeError(
            "a simulated stream must be used on the thread of a rank, got another thread; "
            "call it from the rank's own program"
        )
    return machine


def _machine_of(owned: "Stream | Event") -> Machine:
    """Return the machine of the rank that runs, which must be the one that made ``owned``."""
    machine = _machine()
    if owned.machine is not machine:
        raise RuntimeError(
            f"a stream or event must be used by the rank that made it, rank "
            f"{owned.machine.rank.index}, got rank {machine.rank.index}; make one on each rank"
        )
    return machine


class Stream(torch.Stream):
    """A queue of device work of one rank.

    Args:
        device: ignored: a rank has one device.
        priority: clamped to the range that CUDA has.
        kwargs: ``stream_id`` gives the stream that has that id again, as PyTorch's constructor does.

    Attributes:
        ordinal: per-rank id in order of first use; -1 before.
        role: what it is for, in reports: where it was made, "default", or the group it serves.
    """

    machine: Machine
    ordinal: int
    priority: int
    role: str
    source: Source | None
    unanswered: int
    _outer: "list[Stream]"

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Self:
        """Make a stream, or find the one with a given id."""
        machine = _machine()
        if "stream_id" in kwargs:
            return machine.streams[kwargs["stream_id"]]  # type: ignore[return-value]
        self = super().__new__(cls, stream_id=0, device_index=0, device_type=0)
        self.machine = machine
        self.priority = min(max(priority, PRIORITY_HIGHEST), PRIORITY_LOWEST)
        self.ordinal = -1
        role = kwargs.get("role")
        self.source = caller() if role is None else None
        self.role = role if role is not None else f"stream made at {self.source}"
        self.unanswered = 0
        self._outer = []
        return self

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the lowest and the highest priority."""
        return (PRIORITY_LOWEST, PRIORITY_HIGHEST)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The rank's only device."""
        return torch.device("cpu")

    @property
    def device_index(self) -> int:  # type: ignore[override]
        """The device's index among those of its type."""
        return self.device.index or 0

    @property
    def device_type(self) -> int:  # type: ignore[override]
        """The number of the device's type in C++: 0 is the CPU, 1 CUDA."""
        return int(self.device.type == "cuda")

    @property
    def stream_id(self) -> int:  # type: ignore[override]
        """The stream's number."""
        return self.machine.stream_id(self)

    @property
    def cuda_stream(self) -> int:
        """The stream's number, as a handle."""
        return self.machine.stream_id(self)

    native_handle = cuda_stream

    def wait_stream(self, stream: "Stream") -> None:  # type: ignore[override]
        """All later work on this stream runs after all work now on ``stream``."""
        machine = _machine_of(self)
        _machine_of(stream)
        machine.emit(
            Kind.WAIT_STREAM,
            "wait_stream",
            machine.stream_id(self),
            other=machine.stream_id(stream),
        )

    def wait_event(self, event: "Event") -> None:  # type: ignore[override]
        """All later work on this stream runs after what ``event`` recorded."""
        event.wait(self)

    def record_event(self, event: "Event | None" = None) -> "Event":  # type: ignore[override]
        """Record ``event`` (a new one when None) on this stream and return it."""
        event = torch.cpu.Event() if event is None else event  # type: ignore[assignment]
        assert event is not None
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all work now on this stream is done, as far as the host can know."""
        machine = _machine_of(self)
        stream = machine.stream_id(self)
        if not is_done(machine, self, dict(machine.clocks.of(stream))):
            return False
        machine.emit(Kind.HOST_WAIT_STREAM, "stream.query", -1, other=stream)
        return True

    def synchronize(self) -> None:
        """The host waits for all work now on this stream."""
        machine = _machine_of(self)
        stream = machine.stream_id(self)
        machine.host_wait(dict(machine.clocks.of(stream)), "stream.synchronize()")
        machine.emit(Kind.HOST_WAIT_STREAM, "stream.synchronize", -1, other=stream)

    def is_capturing(self) -> bool:
        """Return False: the simulator captures no graphs."""
        return False

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of the protocol and the stream's number."""
        return (0, self.cuda_stream)

    def __enter__(self) -> Self:
        self._outer.append(set_stream(_machine_of(self), self))
        return self

    def __exit__(self, *_: object) -> None:
        set_stream(self.machine, self._outer.pop())

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other  # torch.Stream has one of its own, which compares ids

    def __hash__(self) -> int:
        return self.cuda_stream

    def __repr__(self) -> str:
        return f"<simulated stream {self.ordinal}: {self.role}>"


class Event(torch.Event):
    """A marker in a stream.

    Args:
        enable_timing: ``elapsed_time`` may be asked for.
        blocking: ignored: how the host waits is not modelled.
        interprocess: ignored, since handles for other processes are refused.
        external: ignored: the simulator captures no graphs.

    Attributes:
        ordinal: id of the last snapshot; -1 before the first.
    """

    machine: Machine
    enable_timing: bool
    ordinal: int
    unanswered: int

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> Self:
        """Make an event that is not recorded."""
        self = super().__new__(cls, device="cpu")
        self.machine = _machine()
        self.enable_timing = enable_timing
        self.ordinal = -1
        self.unanswered = 0
        return self

    @property
    def clock(self) -> dict[int, int]:
        """What the last snapshot covers."""
        return self.machine.clocks.events.get(self.ordinal, {})

    def record(self, stream: "Stream | None" = None) -> None:  # type: ignore[override]
        """Take a snapshot of ``stream`` (the current one when None); an earlier one is replaced."""
        machine = _machine_of(self)
        stream_id = machine.stream_id(stream if stream is not None else machine.stream)
        self.ordinal = machine.new_event_id()
        machine.emit(Kind.RECORD_EVENT, "record_event", stream_id, other=self.ordinal)
        self.unanswered = 0

    def wait(self, stream: "Stream | None" = None) -> None:  # type: ignore[override]
        """All later work on ``stream`` (the current one) runs after the snapshot; none, no wait."""
        machine = _machine_of(self)
        stream_id = machine.stream_id(stream if stream is not None else machine.stream)
        machine.emit(Kind.WAIT_EVENT, "wait_event", stream_id, other=self.ordinal)

    def query(self) -> bool:
        """Whether the snapshot is done, as far as the host can know; without one it is."""
        machine = _machine_of(self)
        if not is_done(machine, self, self.clock):
            return False
        if self.ordinal >= 0:
            machine.emit(Kind.HOST_WAIT_EVENT, "event.query", -1, other=self.ordinal)
        return True

    def synchronize(self) -> None:
        """The host waits for the snapshot."""
        machine = _machine_of(self)
        machine.host_wait(self.clock, "event.synchronize()")
        machine.emit(Kind.HOST_WAIT_EVENT, "event.synchronize", -1, other=self.ordinal)

    def elapsed_time(self, end_event: "Event") -> float:  # type: ignore[override]
        """Return the number of ops between two snapshots: the simulator has order, not time.

        Raises:
            RuntimeError: as CUDA's; also where the host has not waited for the end, which CUDA's may
                or may not notice.
        """
        _machine_of(self)
        if not (self.enable_timing and end_event.enable_timing):
            raise RuntimeError("both events must be made with enable_timing=True")
        if self.ordinal < 0 or end_event.ordinal < 0:
            raise RuntimeError("both events must be recorded before the time between them is taken")
        host = self.machine.clocks.host
        if any(host.get(stream, 0) < tick for stream, tick in end_event.clock.items()):
            raise RuntimeError("the host must wait for the end event first, got no such wait")
        return float(sum(end_event.clock.values()) - sum(self.clock.values()))

    @property
    def event_id(self) -> int:  # type: ignore[override]
        """The number of the last snapshot; -1 without one."""
        return self.ordinal

    cuda_event = event_id

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: Any) -> NoReturn:
        """Refuse: ranks of a world share no events."""
        raise NotImplementedError("the simulator shares no events between processes")

    def ipc_handle(self) -> NoReturn:
        """Refuse: ranks of a world share no events."""
        raise NotImplementedError("the simulator shares no events between processes")

    def __repr__(self) -> str:
        return f"<simulated event {self.ordinal}>"


class StreamContext:
    """Selects a stream for its body; None selects nothing."""

    def __init__(self, stream: "Stream | None") -> None:
        self.stream = stream
        self._outer: list[Stream] = []

    def __enter__(self) -> None:
        if self.stream is not None:
            self._outer.append(set_stream(_machine_of(self.stream), self.stream))

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            set_stream(self.stream.machine, self._outer.pop())


# ---------------------------------------------------------------------- functions of torch.cuda


def set_stream(machine: Machine, stream: Stream) -> Stream:
    """Make ``stream`` current and return the one that was."""
    outer = machine.stream
    machine.select(stream)
    return outer


def set_current_stream(stream: "Stream | None") -> None:
    """Make ``stream`` current until something else does; None does nothing."""
    if stream is not None:
        machine = _machine_of(stream)
        machine.backward.watch()
        set_stream(machine, stream)


def stream(stream: "Stream | None") -> StreamContext:
    """Return a context that selects a stream for its body."""
    return StreamContext(stream)


def current_stream(device: Any = None) -> Stream:
    """Return the current stream of the rank."""
    return _machine().stream


def default_stream(device: Any = None) -> Stream:
    """Return the stream that is current when a rank starts."""
    return _machine().default_stream


def get_stream_from_external(data_ptr: int, device: Any = None) -> NoReturn:
    """Refuse: a stream of another library cannot be seen."""
    raise NotImplementedError("the simulator cannot see streams of other libraries")


def is_current_stream_capturing() -> bool:
    """Return False: the simulator captures no graphs."""
    return False


def synchronize(device: Any = None) -> None:
    """The host waits for all streams of the rank's device."""
    machine = _machine()
    machine.host_wait(machine.clocks.all_streams(), "synchronize()")
    machine.emit(Kind.HOST_WAIT_STREAM, "synchronize", -1, other=-1)


def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    """The tensor's memory may not be reused before the work now on ``stream`` is done."""
    machine = _machine_of(stream)
    record = machine.memory.record_of(tensor)
    machine.emit(
        Kind.RECORD_STREAM, "record_stream", machine.stream_id(stream), other=record.ordinal
    )


class Asked(Protocol):
    """What a program may poll.

    Attributes:
        unanswered: how many times in a row the answer was "not done" though it could be.
    """

    unanswered: int


def is_done(machine: Machine, asked: Asked, clock: dict[int, int], *, kind: str = "query") -> bool:
    """Answer a query: certain where ordering decides it, the schedule's choice elsewhere.

    Once it says yes, the host knows: what it launches from then on is behind ``clock``.
    """
    machine.rank.poll("poll")
    if machine.needed(clock):
        return False
    if all(machine.clocks.host.get(stream, 0) >= tick for stream, tick in clock.items()):
        return True
    asked.unanswered += 1
    if asked.unanswered <= QUERIES_UNTIL_DONE and not machine.rank.world.choose_yes(
        kind, machine.rank.index
    ):
        return False
    asked.unanswered = 0
    return True


def new_stream(role: str) -> Stream:
    """Return a stream of the simulator's own, of the class that the world's program sees."""
    stream_class: Any = torch.cpu.Stream
    made: Stream = stream_class(role=role)
    return made


def stream_classes() -> tuple[type[Stream], type[Event]]:
    """Return classes for one world, so that what a program replaces on them dies with it."""
    return type("Stream", (Stream,), {}), type("Event", (Event,), {})
