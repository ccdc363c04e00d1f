"""Works: handles of real operations, and the order that waiting for one adds."""

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from fsdp_sim.engine import machine as machines
from fsdp_sim.engine import patches
from fsdp_sim.engine.process_group import GroupCall, communicator_of
from fsdp_sim.op import Kind
from fsdp_sim.recorder.mode import emit_call
from fsdp_sim.recorder.process import ProcessMachine


class _Behind(NamedTuple):
    """The event behind an operation, and whether the host waits for it too."""

    event: int
    is_host: bool


class Works:
    """The event behind each handle that the program holds."""

    def __init__(self, machine: ProcessMachine) -> None:
        self._machine = machine
        self._events: weakref.WeakKeyDictionary[dist.Work, _Behind] = weakref.WeakKeyDictionary()

    def install(self, undo: patches.Patches) -> None:
        """See each handle as the program gets it, and each wait; ``undo`` puts all names back."""
        for name in patches.METHODS_WITH_WORK:
            undo.wrap(patches.ProcessGroup, name, self._issuing)
        undo.wrap(patches.ProcessGroup, "_start_coalescing", self._starting)
        undo.wrap(patches.ProcessGroup, "_end_coalescing", self._ending)
        for name in ("wait", "synchronize", "block_current_stream"):
            undo.wrap(dist.Work, name, self._waiting)

    def _keep(self, work: Any, *, is_host: bool) -> Any:
        """Remember what is behind a handle; a barrier without one has been waited for in C++."""
        event = self._machine.last_event
        if event is not None and isinstance(work, dist.Work):
            self._events[work] = _Behind(event, is_host)
        elif event is not None and is_host:
            self._join(_Behind(event, is_host))
        return work

    def _issuing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        is_host = original.__name__ in ("barrier", "monitored_barrier")

        @functools.wraps(original)
        def issue(group: Any, *args: Any, **kwargs: Any) -> Any:
            machine = self._machine
            machine.last_event, machine.is_issuing = None, True
            machine.reduction = patches.reduction_of(kwargs.get("opts", args[-1] if args else None))
            try:
                return self._keep(original(group, *args, **kwargs), is_host=is_host)
            finally:
                machine.reduction, machine.is_issuing = None, False

        return issue

    def _starting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def start(group: Any, device: Any) -> Any:
            communicator = communicator_of(self._machine, group)
            communicator.batch = []
            return original(group, device)

        return start

    def _ending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def end(group: Any, device: Any) -> Any:
            machine = self._machine
            communicator = communicator_of(machine, group)
            entries, communicator.batch = communicator.batch or [], None
            machine.last_event, machine.is_issuing = None, True
            if entries:
                is_async = any(entry.is_async for entry in entries)
                emit_call(
                    machine, GroupCall(communicator, entries, is_async=is_async, is_batch=True)
                )
            machine.is_issuing = False
            return self._keep(original(group, device), is_host=False)

        return end

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            behind = self._events.get(work)
            if behind is not None:
                self._join(behind)
            return original(work, *args, **kwargs)

        return wait

    def _join(self, behind: _Behind) -> None:
        machine = self._machine
        if machines.current() is not machine:
            return
        stream = machine.current_stream_id()
        machine.emit(Kind.WAIT_EVENT, "work.wait", stream, other=behind.event)
        if behind.is_host:
            machine.emit(Kind.HOST_WAIT_EVENT, "barrier", -1, other=behind.event)
