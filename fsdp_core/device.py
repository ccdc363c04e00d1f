"""Streams, events, memory, annotations: the only file that touches an accelerator module.

Everything here is what both `torch.cuda` and the `torch.cpu` stub have. The names are looked up
when they are called, never at import: whoever replaces them at run time is served. The stub's
events are None, so no state may be read from whether an event is set.

Each verb is called by its name at the place that needs the order, one call per line: a missing
one is then a missing line.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from fsdp_core.errors import ConfigError, ConfigTypeError
from fsdp_core.torch_private import cuda_stream_handle, profiler_is_enabled

# A stream and an event are whatever the accelerator's module says they are.
Stream = Any
Event = Any

# References that one `Kept` holds at most. One lets an outer reduction run beside the next inner
# one, with two buffers alive in all; more would only raise the peak.
KEPT_MAX = 1

ANNOTATION_PREFIX = "fsdp_core::"
_CPU = torch.device("cpu")
# CUDA's streams by device and handle. PyTorch takes them from pools that live as long as the process.
_STREAMS: dict[tuple[int, int], Stream] = {}
_NOBODY_LISTENS = nullcontext()
# Nsight Systems injects its NVTX library through this variable before the process starts.
_NVTX_LISTENS = "NVTX_INJECTION64_PATH" in os.environ


@dataclass(frozen=True, slots=True)
class Ready:
    """A tensor and the event after which another stream may read it.

    Attributes:
        tensor: what was written.
        event: recorded on the writing stream behind the write; None where events are stubs.
    """

    tensor: Tensor
    event: Event


def default_device(device_type: str | None = None) -> torch.device:
    """Return this process' device of a type; without a type: CUDA, or CPU where there is none."""
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cpu":
        return _CPU
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def resolve_device(device: torch.device | str | None) -> torch.device:
    """Return a device of this process from what a user says.

    Args:
        device: None: as in `default_device`; without an index: the current one of its type.

    Raises:
        ConfigError: no CPU or CUDA device, or one that this process does not have.
    """
    if device is None:
        return default_device()
    resolved: object = device
    if isinstance(device, str):
        with suppress(RuntimeError):  # no name of a device, and refused below
            resolved = torch.device(device)
    if not isinstance(resolved, torch.device):  # PyTorch would take 7 for the eighth GPU
        msg = f"a context needs a cpu or cuda device, got {device!r}; name one, or leave it out"
        raise ConfigTypeError(msg)
    if resolved.type not in ("cpu", "cuda"):
        msg = f"a context needs a cpu or cuda device, got {device}; name one, or leave it out"
        raise ConfigError(msg)
    _check_is_there(resolved)
    return default_device(resolved.type) if resolved.index is None else resolved


def _check_is_there(device: torch.device) -> None:
    """Refuse a device that this process does not have.

    Raises:
        ConfigError: no CUDA device at all, or none of that number.
    """
    if device.type != "cuda":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        msg = (
            f"a context needs a device that this process has, got {str(device)!r} and {count} CUDA "
            f"devices; pass device='cpu', or use a PyTorch that is built for the GPUs of this machine"
        )
        raise ConfigError(msg)


def new_stream(device: torch.device) -> Stream:
    """Create a side stream on `device`.

    Ordering:
        Ordered with no other stream.
    """
    module = torch.get_device_module(device)
    if device.type == "cpu":
        return module.Stream()
    return module.Stream(device=device)


def current_stream(device: torch.device) -> Stream:
    """Return the stream that ops on `device` are launched on now.

    Why by handle on CUDA: asking for the object makes a new one each time, at ten times the cost.
    """
    handle = cuda_stream_handle(device.index) if device.type == "cuda" else None
    if handle is None:
        return torch.get_device_module(device).current_stream(device)
    key = (device.index, handle)
    stream = _STREAMS.get(key)
    if stream is None:
        stream = _STREAMS[key] = torch.get_device_module(device).current_stream(device)
    return stream


def on_stream(stream: Stream) -> AbstractContextManager[Any]:
    """Launch and allocate on `stream` inside the scope.

    Why the stream itself: it is its own scope, in C++; the module's costs three times as much.
    The CPU stub's streams are not.

    Ordering:
        Adds no order between streams: the scope's work is behind the earlier work of `stream`
        alone. A stream must not be entered inside its own scope.
    """
    scope: AbstractContextManager[Any] = stream
    return scope if hasattr(stream, "__enter__") else torch.cpu.stream(stream)


def wait_stream(waiter: Stream, awaited: Stream) -> None:
    """Put everything later on `waiter` behind everything so far on `awaited`.

    Ordering:
        The host does not wait.
    """
    waiter.wait_stream(awaited)


def record_event(stream: Stream, event: Event = None) -> Event:
    """Mark the present end of `stream`.

    Args:
        stream: the stream.
        event: one that is recorded anew, at half the cost of another one; None: a new one.

    Ordering:
        What already waits for the event's last record still waits for that.

    Returns:
        The event; None where events are stubs.
    """
    return stream.record_event() if event is None else stream.record_event(event)


def wait_event(stream: Stream, event: Event) -> None:
    """Put everything later on `stream` behind `event`, and behind nothing queued after it.

    Ordering:
        The host does not wait. A None event (a stub's) orders nothing.
    """
    if event is not None:
        stream.wait_event(event)


def wait_ready(stream: Stream, ready: Ready) -> Tensor:
    """Put everything later on `stream` behind the write of a tensor, and return the tensor."""
    if ready.event is not None:
        stream.wait_event(ready.event)
    return ready.tensor


@dataclass(slots=True)
class Kept:
    """References that the pool of one stream must not get back yet, oldest first.

    Attributes:
        stream: the stream on which the tensors were allocated, so to which they are freed.
        held: each tensor with the event behind its last use on another stream.
    """

    stream: Stream
    held: deque[Ready] = field(default_factory=deque)


def keep_alive(tensor: Tensor, *, until: Event, kept: Kept) -> None:
    """Hold a reference until the stream that the tensor was allocated on is behind `until`.

    Why: a tensor whose last reference goes is reusable at once by later work of its own stream,
    even if another stream still reads it.

    Ordering:
        At most `KEPT_MAX` tensors are held: before one more, `kept.stream` waits for the oldest
        one's event, behind which its memory may be reused.
    """
    while len(kept.held) >= KEPT_MAX:
        _let_oldest_go(kept)
    kept.held.append(Ready(tensor, until))


def let_go(kept: Kept) -> None:
    """Drop every reference, with `kept.stream` ordered behind the last use of each."""
    while kept.held:
        _let_oldest_go(kept)


def _let_oldest_go(kept: Kept) -> None:
    wait_event(kept.stream, kept.held[0].event)
    kept.held.popleft()


def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate an uninitialised flat tensor from the current stream's pool.

    Why outside inference mode: a tensor born there could never be written by training.
    """
    with torch.inference_mode(mode=False):
        return torch.empty(numel, dtype=dtype, device=device)


def release(tensor: Tensor) -> None:
    """Give a tensor's memory back to its pool; the storage object and its views survive.

    Ordering:
        Requires that the current stream is the one the memory was allocated on, and that it is
        ordered behind every reader.
    """
    tensor.untyped_storage().resize_(0)


def reallocate(tensor: Tensor) -> None:
    """Take memory from the current stream's pool for a released tensor; contents are undefined.

    Why the views survive: they share the storage object, whatever address it has now.
    """
    assert tensor.storage_offset() == 0
    tensor.untyped_storage().resize_(tensor.nbytes)


def is_released(tensor: Tensor) -> bool:
    """Whether the memory behind a non-empty tensor was given back."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def annotate(operation: str, name_of: Callable[[str], str] = str) -> AbstractContextManager[Any]:
    """Open a range `fsdp_core::<name>` for whoever listens: a profiler, NVTX or a simulator.

    Args:
        operation: what is done.
        name_of: makes of it the range's name, asked only if somebody listens: a range that nobody
            sees costs one test of a flag.
    """
    if profiler_is_enabled():
        return record_function(ANNOTATION_PREFIX + name_of(operation))
    if _NVTX_LISTENS:
        return _nvtx_range(ANNOTATION_PREFIX + name_of(operation))
    return _NOBODY_LISTENS


@contextmanager
def _nvtx_range(name: str) -> Iterator[None]:
    # Not `nvtx.range`: it takes braces in a module's name for places of arguments.
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()
