"""Process: the machine of a real process, where nothing decides and nobody parks.

A simulated rank asks its world what happens next; here the hardware has the answers, so each question
is answered at once and every wait is over: ops are all that is left.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fsdp_sim.analysis import Analysis
from fsdp_sim.engine import patches
from fsdp_sim.engine.machine import Machine
from fsdp_sim.engine.meeting import Wire
from fsdp_sim.engine.memory import Memory, StorageRecord
from fsdp_sim.op import UNKNOWN, Op, Source

if TYPE_CHECKING:
    from fsdp_sim.engine.streams import Stream


class _Unscheduled:
    """What stands for a rank of a world and for its world: whatever is asked, the answer is yes."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.world = self

    def reach(self, _kind: str, **_: Any) -> None:
        """Go on."""

    def poll(self, _kind: str) -> None:
        """Go on."""

    def choose_yes(self, _kind: str, _rank: int) -> bool:
        """Whatever CPUs were asked to do is done."""
        return True

    def stop(self, _error: BaseException) -> None:
        """A recording ends nothing; checkers judge it afterwards."""


class ProcessMemory(Memory):
    """The storages of a real process.

    What dies on a thread of PyTorch's own, such as a communicator's, is noted at the program's next op.
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._dead: deque[StorageRecord] = deque()

    def died(self, record: StorageRecord) -> None:
        """The last reference to a storage is gone."""
        del self.records[record.key]
        self._dead.append(record)
        if patches.mode_depths()[1]:
            self._bury()

    def _bury(self) -> None:
        while self._dead:
            self._free(self._dead.popleft())

    def _track(self, storage: torch.UntypedStorage) -> StorageRecord:
        self._bury()
        return super()._track(storage)


class DeviceMemory(ProcessMemory):
    """The storages of a process with an accelerator: each tensor says whether it is the host's."""

    def _track(self, storage: torch.UntypedStorage) -> StorageRecord:
        record = super()._track(storage)
        record.is_host = storage.device.type == "cpu"
        return record

    def is_seen(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has memory at all."""
        return not tensor.is_meta and tensor.__class__ is not patches.FakeTensor

    def born(
        self,
        tensor: torch.Tensor,
        *,
        is_host: bool = False,  # noqa: ARG002  guessed where only CPUs are
        source: Source | None = UNKNOWN,
    ) -> StorageRecord | None:
        """Return the record of an op's output."""
        return super().born(tensor, is_host=patches.is_on_cpu(tensor), source=source)

    def to_device(self, tensor: torch.Tensor) -> None:
        """A tensor is where it is."""

    def to_host(self, tensor: torch.Tensor) -> None:
        """A tensor is where it is."""


class ProcessMachine(Machine):
    """The device of one real process.

    Args:
        rank: of the process.
        world_size: of its world.
        keep: takes the ops, some at a time.

    Attributes:
        last_event: recorded behind the operation that was issued last; None when it was synchronous.
        functional_events: events that ``wait_tensor`` joins, by storage.
        is_issuing: Python calls a method of a process group; otherwise C++ does, and waits itself.
    """

    def __init__(self, rank: int, world_size: int, keep: Callable[[Sequence[Op]], None]) -> None:
        scheduled: Any = _Unscheduled(rank)
        nothing_shared: Any = None
        super().__init__(scheduled, Analysis((), world_size, keep=keep), Wire(nothing_shared))
        self.memory = ProcessMemory(self)
        self.communicators = weakref.WeakKeyDictionary()  # type: ignore[assignment]
        self.last_event: int | None = None
        self.functional_events: dict[int, list[int]] = {}
        self.is_issuing = False


class DeviceMachine(ProcessMachine):
    """The device of one real process that has an accelerator: its current stream is the hardware's.

    Args:
        current: returns the current stream.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        keep: Callable[[Sequence[Op]], None],
        current: Callable[[], "Stream"],
    ) -> None:
        super().__init__(rank, world_size, keep)
        self.memory = DeviceMemory(self)
        self._current = current

    @property
    def stream(self) -> "Stream":
        """The current stream."""
        if self.in_backward:
            self.backward.follow()
        return self._current()

    def current_stream_id(self) -> int:
        """Return the id of the current stream."""
        return self.stream_id(self.stream)

    def select(self, stream: "Stream") -> None:
        """A stream is current now; autograd's own choices are the hardware's already."""
        if patches.current_autograd_node() is None:
            self.backward.note(stream)
