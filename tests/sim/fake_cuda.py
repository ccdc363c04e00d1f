"""A stand-in for torch.cuda's streams and events: what the recorder sees of them, on a CPU."""

from typing import Any, Self

import pytest
import torch

from fsdp_sim.recorder import process

_CURRENT: list["Stream"] = []


class Stream:
    """A stream with a number; two objects of one number are one stream."""

    count = 0
    device_index = 0

    def __new__(cls, **kwargs: int) -> Self:
        """Make a stream, or another object of a known one."""
        self = super().__new__(cls)
        if "stream_id" not in kwargs:
            Stream.count += 1
        self.stream_id = kwargs.get("stream_id", Stream.count)
        return self

    stream_id: int

    def wait_event(self, event: "Event") -> None:
        """Wait as torch.cuda's does: by the event."""
        event.wait(self)

    def wait_stream(self, stream: "Stream") -> None:
        """Wait as torch.cuda's does: for an event of the other."""
        self.wait_event(stream.record_event())

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record an event, a new one if there is none."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """Whatever a CPU was asked to do is done."""
        return True

    def synchronize(self) -> None:
        """Nothing is under way."""

    def __enter__(self) -> Self:
        _CURRENT.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _CURRENT.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.stream_id == other.stream_id

    def __hash__(self) -> int:
        return self.stream_id


class Event:
    """An event that is always done, and to which nothing may refer weakly, as to torch.cuda's."""

    __slots__ = ("__dict__",)

    def record(self, stream: Stream | None = None) -> None:
        """Nothing is under way."""

    def wait(self, stream: Stream | None = None) -> None:
        """Nothing is under way."""

    def query(self) -> bool:
        """It is done."""
        return True

    def synchronize(self) -> None:
        """Nothing is under way."""


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-in in the place of torch.cuda's names; the CPU is its device."""
    monkeypatch.setattr(process, "DeviceMemory", process.ProcessMemory)
    monkeypatch.setattr(torch, "get_device_module", lambda _=None: torch.cuda)
    default = Stream(stream_id=0)
    _CURRENT[:] = [default]
    names: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda _=None: Stream(stream_id=_CURRENT[-1].stream_id),
        "default_stream": lambda _=None: default,
        "synchronize": lambda _=None: None,
    }
    for name, value in names.items():
        monkeypatch.setattr(torch.cuda, name, value)
