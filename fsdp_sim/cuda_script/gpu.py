"""Gpu: the simulated GPU of one rank of a CUDA script, and which tensors are on it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fsdp_sim.checkers.caching_allocator import CachingAllocator
from fsdp_sim.checkers.memory_peak import MemoryPeak
from fsdp_sim.engine import machine as machines
from fsdp_sim.engine import patches
from fsdp_sim.engine.machine import Machine


class Gpu:
    """The only GPU of one rank: cuda:0 of rank 0, cuda:1 of rank 1, and so on.

    Attributes:
        machine: of the rank.
        device: its name.
        current: index of the current device, 0 until the program sets it, as in every process.
        is_initialized: the program has used or chosen a device.
        target: whether what is being made belongs on the GPU; None: where its arguments are.
        rng_state: of its own random number generator.
        pinned: storages of the host's, by number, that the program has pinned.
    """

    def __init__(self, machine: Machine, memory: MemoryPeak) -> None:
        self.machine = machine
        self.device = torch.device("cuda", machine.rank.index)
        self.current = 0
        self.is_initialized = False
        self.target: bool | None = None
        self.rng_state = torch.Generator().manual_seed(machine.rank.index).get_state()
        self.pinned: set[int] = set()
        self._memory = memory

    def is_here(self, device: Any) -> bool | None:
        """Whether a device argument means this GPU (True), the host (False), or no memory (None).

        Raises:
            RuntimeError: it means another rank's GPU, or a device that is not simulated.
        """
        if isinstance(device, int):
            device = torch.device("cuda", device)
        device = torch.device(device)
        if device.type == "cuda":
            self.check_index(self.current if device.index is None else device.index)
            return True
        if device.type not in ("cpu", "meta"):
            raise RuntimeError(
                f"a simulated CUDA script has the devices cuda, cpu and meta, got {device}"
            )
        return False if device.type == "cpu" else None

    def check_index(self, index: int) -> None:
        """Refuse another rank's GPU.

        Raises:
            RuntimeError: it is not this rank's.
        """
        self.is_initialized = True
        if index != self.device.index:
            raise RuntimeError(
                f"rank {self.device.index} must use its own GPU, {self.device}, got cuda:{index}; call "
                "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before anything uses 'cuda'"
            )

    def allocator(self) -> CachingAllocator:
        """Return the model of its allocator as it is now."""
        self.machine.analysis.settle()
        return self._memory.allocator(self.machine.rank.index)

    def take(self, storage: Any) -> None:
        """Move a storage of the host's, as a whole, to the GPU."""
        with patches.below_dispatch():
            self.machine.memory.to_device(patches.bytes_of_storage(storage))

    @contextmanager
    def making(self, target: bool | None) -> Iterator[None]:
        """Make what is made in the body on the GPU, on the host, or where its arguments are."""
        outer, self.target = self.target, target
        try:
            yield
        finally:
            self.target = outer

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw random numbers from the GPU's generator."""
        outer = patches.get_rng_state()
        patches.set_rng_state(self.rng_state)
        try:
            yield
        finally:
            self.rng_state = patches.get_rng_state()
            patches.set_rng_state(outer)


def give_gpu(machine: Machine, memory: MemoryPeak) -> None:
    """Give a rank its GPU, whose memory ``memory`` counts."""
    machine.gpu = Gpu(machine, memory)
    machine.memory.takes_unknown_for_host = True


def current() -> Gpu | None:
    """Return the GPU of the rank that runs on this thread, or None where there is none."""
    machine = machines.current()
    return None if machine is None else machine.gpu


def device_of(tensor: Tensor) -> torch.device:
    """Return the device that a tensor of the program says it is on."""
    gpu, device = current(), patches.device_of(tensor)
    if gpu is None or device.type != "cpu":
        return device
    inner = patches.inner_tensors(tensor)
    if inner:
        return inner[0].device
    return gpu.device if is_on_gpu(gpu, tensor) else device


def is_on_gpu(gpu: Gpu, tensor: Tensor) -> bool:
    """Whether a tensor's memory is the GPU's."""
    if tensor.layout is not torch.strided:
        return False
    record = gpu.machine.memory.known(tensor.untyped_storage())
    return record is not None and not record.is_host


def own_gpu() -> Gpu:
    """Return the GPU of the rank that runs on this thread."""
    gpu = current()
    if gpu is None:
        raise RuntimeError(
            "a simulated GPU must be used on the thread of a rank, got another thread; "
            "call it from the rank's own program"
        )
    return gpu
