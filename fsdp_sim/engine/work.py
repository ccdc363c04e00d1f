"""Work: handles of issued operations, and Futures of them, with NCCL's meaning."""

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from fsdp_sim.checkers.device_graph import Launch
from fsdp_sim.engine import patches
from fsdp_sim.engine.machine import Machine
from fsdp_sim.engine.meeting import Part
from fsdp_sim.engine.streams import is_done, new_stream, record_stream, set_stream
from fsdp_sim.engine.tensors import tensors_in
from fsdp_sim.op import Kind

WORKS_LOOKED_AT = 32
"""Handles, the oldest first, that are looked at each time: more are let go than are made."""


class Work(dist.Work):
    """A handle of an issued operation, or of a batch.

    ``wait`` orders the current stream after it and does not block the host, as with NCCL; only a
    barrier blocks.  An operation inside a coalescing manager is issued at its end: until then its
    handle has no launch, and waiting for it does nothing.

    Attributes:
        launch: the device op behind it.
        event: recorded behind it on its stream; -1 for a synchronous one, which needs none.
        outputs: of an asynchronous one, until it is waited for.
    """

    def __init__(self, machine: Machine, *, is_host: bool = False) -> None:
        super().__init__()
        self.machine = machine
        self.is_host = is_host
        self.launch: Launch | None = None
        self.event = -1
        self.unanswered = 0
        self.parts: list[Part] = []
        self.outputs: list[Tensor] = []

    @property
    def is_synchronous(self) -> bool:
        """Whether the operation ran on the stream that was current, so that streams need no wait."""
        return self.launch is not None and self.event < 0

    def await_values(self) -> None:
        """The host stops until the operation is complete, as gloo's would.

        Where operators are not seen, none of them would wait for the values that it needs.
        """
        if self.launch is not None:
            needs: tuple[Launch | Part, ...] = (self.launch, *self.parts)
            self.machine.park_for(needs, "its values", is_host_wait=True)

    def join(self) -> None:
        """Order the current stream after the operation and let go of its tensors."""
        machine = self.machine
        if not machine.sees_operators:
            self.await_values()
        if self.event >= 0:
            stream = machine.current_stream_id()
            machine.emit(Kind.WAIT_EVENT, "work.wait", stream, other=self.event)
        self.let_go()

    def let_go(self) -> None:
        """Keep nothing alive any more."""
        for part in self.parts:
            part.stash = None
        self.parts, self.outputs = [], []
        self.machine.works.pop(self, None)

    def is_passed(self) -> bool:
        """Whether the streams that its tensors' memory belongs to are ordered after it."""
        machine, launch = self.machine, self.launch
        if launch is None:
            return False
        stash = [tensor for part in self.parts for tensor in part.stash or ()]
        pools = {machine.memory.record_of(tensor).stream for tensor in stash}
        return all(machine.clocks.is_ordered(launch.stream, launch.tick, pool) for pool in pools)

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002  a world has no time
        """Join; for a barrier the host stops until everybody is here."""
        self.join()
        if self.is_host and self.launch is not None:
            machine = self.machine
            machine.host_wait({self.launch.stream: self.launch.tick}, "barrier")
            machine.emit(Kind.HOST_WAIT_EVENT, "barrier", -1, other=self.event)
        return True

    def synchronize(self) -> None:
        """Join."""
        self.join()

    def block_current_stream(self) -> None:
        """Join."""
        self.join()

    def is_completed(self) -> bool:
        """Whether the device is done with it, as far as the host can know; then the host knows it."""
        machine, launch = self.machine, self.launch
        if launch is None:
            machine.rank.poll("poll")
            return False
        if not is_done(machine, self, {launch.stream: launch.tick}, kind="is_completed"):
            return False
        if self.event >= 0:
            machine.emit(Kind.HOST_WAIT_EVENT, "work.is_completed", -1, other=self.event)
        return True

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
        if not self.machine.sees_operators:
            self.await_values()
        future = WorkFuture()
        future.machine = self.machine
        future.events = [self.event] if self.event >= 0 else []
        future.set_result(self.outputs)
        return self._for_cpp(future) if is_from_cpp() else future

    def _for_cpp(self, future: "WorkFuture") -> Any:
        """Return a Future of the type that C++ wants, after seeing to its join, which C++ hides."""
        outputs = self.outputs
        is_in_callback = patches.current_autograd_node() is None  # ours would come too late
        if self.machine.joins_futures_at_once or is_in_callback:
            self.join()
        else:
            join_before_backward_ends(self.machine, future)
        return patches.future_of_tensors(outputs)


class WorkFuture(Future):  # type: ignore[type-arg]
    """A completed Future that carries the events of the work behind it.

    Attributes:
        events: recorded behind the work.
        tensors: those of its value.
    """

    events: list[int]
    machine: Machine
    tensors: tuple[Tensor, ...] = ()

    def set_result(self, result: Any) -> None:
        """Take the value."""
        self.tensors = tuple(filter(patches.has_storage, tensors_in(result)))
        super().set_result(result)

    def join(self) -> None:
        """Order the current stream after the work, and protect the value's memory until it is done there."""
        stream = self.machine.current_stream_id()
        for event in self.events:
            self.machine.emit(Kind.WAIT_EVENT, "future.wait", stream, other=event)
        for tensor in self.tensors:
            record_stream(tensor, self.machine.stream)

    def wait(self) -> Any:
        """Join the current stream and return the value."""
        self.join()
        let_go_of_passed(self.machine)
        return super().wait()

    def add_done_callback(self, callback: Any) -> None:
        """Run ``callback`` on a stream of its own, after the work."""
        self.then(callback)

    def then(self, callback: Any) -> Any:
        """Run ``callback`` on a stream of its own, after the work alone; return its Future."""
        machine = self.machine
        stream, outer = new_stream("future.then"), machine.stream
        chained = WorkFuture()
        chained.machine = machine
        set_stream(machine, stream)
        try:
            self.join()
            chained.set_result(callback(self))
        except Exception as error:
            chained.set_exception(error)
        finally:
            set_stream(machine, outer)
        chained.events = [machine.new_event_id()]
        stream_id = machine.stream_id(stream)
        machine.emit(Kind.RECORD_EVENT, "future.then", stream_id, other=chained.events[0])
        return chained


def collect_all(futures: Sequence[Any]) -> Any:
    """Return a Future of all: its ``wait`` joins them all."""
    future = WorkFuture()
    ours = [each for each in futures if isinstance(each, WorkFuture)]
    future.machine = ours[0].machine
    future.events = [event for each in ours for event in each.events]
    future.set_result(list(futures))
    return future


def let_go_of_passed(machine: Machine) -> None:
    """Keep nothing alive for handles that nobody waits for, once their memory may be used again."""
    for work in list(itertools.islice(machine.works, WORKS_LOOKED_AT)):
        if work.is_passed():
            work.let_go()


def is_from_cpp() -> bool:
    """Whether C++ inside a backward called us: no Python frame of c10d stands in between."""
    frame = sys._getframe(2)  # noqa: SLF001  the only way to look at callers at this price
    while frame is not None and "/fsdp_sim/" in frame.f_code.co_filename:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code.co_filename.endswith("autograd/graph.py")


def join_before_backward_ends(machine: Machine, future: WorkFuture) -> None:
    """C++ will wait for a Future that we cannot observe: join it in a callback queued before its."""
    if not machine.cpp_futures:

        def join_all() -> None:
            futures, machine.cpp_futures = machine.cpp_futures, []
            for each in futures:
                each.join()
            let_go_of_passed(machine)

        patches.queue_backward_callback(join_all)
    machine.cpp_futures.append(future)
