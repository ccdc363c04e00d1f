"""CUDA: streams, events and host waits of torch.cuda, each seen as the simulator's own of that kind.

A stream or event of CUDA has a *shadow*: a simulated one that is told of each use, and makes the op.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from fsdp_sim.engine import machine as machines
from fsdp_sim.engine import patches, streams
from fsdp_sim.engine.machine import Machine, caller
from fsdp_sim.op import Kind
from fsdp_sim.recorder.process import DeviceMachine

_Key = tuple[int, int]

_NUMBER = "_fsdp_sim_number"
_numbers = itertools.count()
"""Of events, over all recordings of the process."""


class Shadows:
    """The shadow of each stream and event of a process.

    Events carry their number, since they must not be referred to weakly: what torch.cuda's leave behind
    when they die is a reference to freed memory (``_CudaEventBase`` clears none), and the next collection
    of garbage follows it.

    Attributes:
        machine: set before the first use.
    """

    machine: DeviceMachine

    def __init__(self) -> None:
        self._streams: dict[_Key, streams.Stream] = {}
        self._events: dict[int, streams.Event] = {}
        self._roles: dict[_Key, str] = {}
        self._is_inside = False

    # ------------------------------------------------------------------ shadows

    def current(self) -> streams.Stream:
        """Return the shadow of the current stream."""
        return self.of_stream(torch.cuda.current_stream())

    def of_stream(self, stream: Any) -> streams.Stream:
        """Return a stream's shadow; two objects of one CUDA stream have one."""
        key = (stream.device_index, stream.stream_id)
        shadow = self._streams.get(key)
        if shadow is None:
            is_default = stream == torch.cuda.default_stream(stream.device_index)
            role = "default" if is_default else self._roles.get(key, "stream of PyTorch's")
            shadow = self._streams[key] = streams.Stream(role=role)
        return shadow

    def of_event(self, event: Any) -> streams.Event:
        """Return an event's shadow."""
        number = event.__dict__.setdefault(_NUMBER, next(_numbers))
        shadow = self._events.get(number)
        if shadow is None:
            shadow = self._events[number] = streams.Event()
        return shadow

    # ------------------------------------------------------------------ installation

    def install(self, undo: patches.Patches) -> None:
        """See every use of streams and events; ``undo`` puts all names back."""
        stream, event = torch.cuda.Stream, torch.cuda.Event
        undo.wrap(stream, "__new__", self._making)
        undo.wrap(stream, "wait_stream", self._telling(self._wait_stream))
        undo.wrap(event, "record", self._telling(self._record))
        undo.wrap(event, "wait", self._telling(self._wait))
        undo.wrap(stream, "synchronize", self._telling(self._synchronize_stream))
        undo.wrap(event, "synchronize", self._telling(self._synchronize_event))
        undo.wrap(torch.cuda, "synchronize", self._telling(self._synchronize))
        undo.wrap(torch.Tensor, "record_stream", self._telling(self._record_stream))
        undo.wrap(stream, "query", self._asking(self._stream_is_done))
        undo.wrap(event, "query", self._asking(self._event_is_done))
        undo.wrap(torch.cuda, "set_stream", self._switching)
        undo.define(stream, "__enter__", self._switching(stream.__enter__))
        undo.define(stream, "__exit__", self._switching(stream.__exit__))

    def _telling(self, tell: Callable[..., None]) -> Callable[[Any], Any]:
        """Tell of a call before it is made; what it calls inside is a part of it."""

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                if self._is_inside or machines.current() is not self.machine:
                    return original(*args, **kwargs)
                tell(*args, **kwargs)
                self._is_inside = True
                try:
                    return original(*args, **kwargs)
                finally:
                    self._is_inside = False

            return call

        return wrap

    def _asking(self, tell: Callable[[Any], None]) -> Callable[[Any], Any]:
        """Tell of a query that was answered yes: the host knows from then on."""

        def wrap(original: Callable[..., bool]) -> Callable[..., bool]:
            @functools.wraps(original)
            def query(asked: Any) -> bool:
                is_done = original(asked)
                if is_done and machines.current() is self.machine:
                    tell(asked)
                return is_done

            return query

        return wrap

    def _switching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Tell autograd's follower which stream is current from now on."""

        @functools.wraps(original)
        def switch(*args: Any) -> Any:
            result = original(*args)
            if machines.current() is self.machine:
                self.machine.select(self.current())
            return result

        return switch

    def _making(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
            stream = original(cls, *args, **kwargs)
            if "stream_id" not in kwargs and machines.current() is self.machine:
                key = (stream.device_index, stream.stream_id)
                self._roles.setdefault(key, f"stream made at {caller()}")
            return stream

        return make

    # ------------------------------------------------------------------ what is told

    def _wait_stream(self, stream: Any, awaited: Any) -> None:
        self.of_stream(stream).wait_stream(self.of_stream(awaited))

    def _record(self, event: Any, stream: Any = None) -> None:
        self.of_event(event).record(None if stream is None else self.of_stream(stream))

    def _wait(self, event: Any, stream: Any = None) -> None:
        self.of_event(event).wait(None if stream is None else self.of_stream(stream))

    def _synchronize_stream(self, stream: Any) -> None:
        self.of_stream(stream).synchronize()

    def _synchronize_event(self, event: Any) -> None:
        self.of_event(event).synchronize()

    def _synchronize(self, _device: Any = None) -> None:
        streams.synchronize()

    def _record_stream(self, tensor: Any, stream: Any) -> None:
        streams.record_stream(tensor, self.of_stream(stream))

    def _stream_is_done(self, stream: Any) -> None:
        stream_id = self.machine.stream_id(self.of_stream(stream))
        self._host_wait(Kind.HOST_WAIT_STREAM, "stream.query", stream_id)

    def _event_is_done(self, event: Any) -> None:
        ordinal = self.of_event(event).ordinal
        if ordinal >= 0:
            self._host_wait(Kind.HOST_WAIT_EVENT, "event.query", ordinal)

    def _host_wait(self, kind: Kind, name: str, other: int) -> None:
        self.machine.emit(kind, name, -1, other=other)


def install(undo: patches.Patches, shadows: Shadows, machine: Machine) -> None:
    """See a process with CUDA."""
    shadows.machine = machine  # type: ignore[assignment]
    shadows.install(undo)
    machine.default_stream = shadows.of_stream(torch.cuda.default_stream())
    machine.select(shadows.current())
    machine.stream_id(machine.default_stream)
