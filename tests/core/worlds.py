"""Where the bodies of tests run: on simulated ranks, or on the processes that pytest runs in.

A body is one rank's program; what it returns is checked outside of it. Under a launcher, every process
runs pytest, runs the body of its own rank, gets the results of all ranks and checks the same:

    torchrun --nproc-per-node 2 -m pytest tests/core --ranks cpu
    torchrun --nproc-per-node 2 -m pytest tests/core --ranks cuda

runs the tests that are marked `everywhere`. Processes with a GPU each speak NCCL; those that share
one, and those on CPUs, speak gloo.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

import fsdp_sim

Body = Callable[[int], Any]

SECONDS_MAX = 120
"""How long one rank waits for another: a bound for broken bodies, nothing is measured."""


@dataclass
class Processes:
    """The processes that pytest runs in.

    Attributes:
        device: where their tensors are.
        backend: what they speak.
        rank: of this one.
        world_size: how many there are.
        store: what they share beside a process group.
        more_than: bodies for that many ranks or fewer are left out.
        worlds: how many process groups they have made so far, each under a prefix of its own.
        shared: how many values they have agreed on so far.
    """

    device: torch.device
    backend: str
    rank: int
    world_size: int
    store: dist.Store
    more_than: int
    worlds: int = 0
    shared: int = 0

    def run(self, body: Body, world_size: int) -> list[Any]:
        """Run a body on the first `world_size` of them and return all results on every one."""
        if world_size > self.world_size:
            pytest.skip(f"needs {world_size} processes")
        if world_size <= self.more_than:
            pytest.skip(f"needs no more than {self.more_than} processes")
        self.worlds += 1
        store = dist.PrefixStore(f"world {self.worlds}", self.store)
        if self.rank < world_size:
            try:
                self._run(body, world_size, store)
            except BaseException as error:
                self._put(store, _Raised(repr(error)))
                raise
        results = [_on_cpu(store.get(f"result {rank}")) for rank in range(world_size)]
        for rank, result in enumerate(results):
            assert not isinstance(result, _Raised), f"rank {rank} raised {result.error}"
        return results

    def _run(self, body: Body, world_size: int, store: dist.Store) -> None:
        """Run a body and put its result into the store."""
        dist.init_process_group(
            self.backend,
            store=store,
            rank=self.rank,
            world_size=world_size,
            timeout=timedelta(seconds=SECONDS_MAX),
        )
        try:
            with self.device:
                self._put(store, body(self.rank))
            # Whoever leaves first would close connections that others are still opening.
            store.wait([f"result {rank}" for rank in range(world_size)])
        finally:
            dist.destroy_process_group()

    def _put(self, store: dist.Store, result: Any) -> None:
        # PyTorch's stubs know of text alone.
        store.set(f"result {self.rank}", _bytes_of(result))  # type: ignore[arg-type]

    def agree(self, value: str) -> str:
        """Return what rank 0 passed."""
        self.shared += 1
        key = f"shared {self.shared}"
        if self.rank == 0:
            self.store.set(key, value)
        return self.store.get(key).decode()

    def once(self, action: Callable[[], object]) -> None:
        """Have rank 0 do something while the others wait."""
        self._meet(f"before {self.shared}")
        if self.rank == 0:
            action()
        self.agree("done")

    def leave_together(self) -> None:
        """Wait for all: a launcher kills the others when one ends with a failure."""
        self._meet("left")

    def _meet(self, place: str) -> None:
        self.store.set(f"{place} {self.rank}", "")
        self.store.wait([f"{place} {rank}" for rank in range(self.world_size)])


@dataclass
class _Raised:
    """Stands for the result of a rank that raised."""

    error: str


def _bytes_of(result: Any) -> bytes:
    file = BytesIO()
    torch.save(result, file)
    return file.getvalue()


def _on_cpu(data: bytes) -> Any:
    return torch.load(BytesIO(data), map_location="cpu", weights_only=False)


_processes: Processes | None = None


def join_processes(device_type: str, *, more_than: int) -> None:
    """Have bodies for more than that many ranks run on the processes of this one's launcher."""
    global _processes
    if device_type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a context takes a GPU unless it is given a device
    store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=SECONDS_MAX)))
    backend, device = "gloo", torch.device("cpu")
    if device_type == "cuda":
        gpus = torch.cuda.device_count()
        local = int(os.environ["LOCAL_RANK"])
        backend = "nccl" if gpus >= int(os.environ["LOCAL_WORLD_SIZE"]) else "gloo"
        device = torch.device("cuda", local % gpus)
        torch.cuda.set_device(device)
    store = dist.PrefixStore("tests", store)
    _processes = Processes(device, backend, rank, world_size, store, more_than)


def leave_processes() -> None:
    """End together with the other processes, if there are any."""
    if _processes is not None:
        _processes.leave_together()


def shared_path(path: Path) -> Path:
    """Return the folder that all ranks see: that of rank 0."""
    return path if _processes is None else Path(_processes.agree(str(path)))


def once(action: Callable[[], object]) -> None:
    """Change what all ranks see, when all have come this far and before any of them goes on."""
    if _processes is None:
        action()
    else:
        _processes.once(action)


def need_point_to_point() -> None:
    """Leave out a test whose ranks send to each other, where they cannot: PyTorch would abort."""
    if _processes is not None and (_processes.backend, _processes.device.type) == ("gloo", "cuda"):
        pytest.skip("gloo has no sends of CUDA tensors")


def need_gpu() -> None:
    """Leave out a test of what a GPU alone has."""
    if device_type() != "cuda":
        pytest.skip("needs a GPU")


def device_type() -> str:
    """Where bodies compute."""
    return "cpu" if _processes is None else _processes.device.type


def world_size(at_most: int) -> int:
    """How many ranks a body for any number of them gets: as many, or as there are processes."""
    return at_most if _processes is None else min(at_most, _processes.world_size)


def make_mesh(*shape: int) -> DeviceMesh:
    """A mesh of the devices that bodies compute on."""
    return init_device_mesh(device_type(), shape)


def on_ranks(body: Body, world_size: int, **options: Any) -> list[Any]:
    """Run `body(rank)` on that many ranks, wherever tests run now, and return what each returned.

    On simulated ones, a race, a mismatch or a deadlock fails the test; `options` are those of the
    simulation, which real ranks do without.
    """
    if _processes is None:
        return on_simulated_ranks(body, world_size, **options)
    return _processes.run(body, world_size)


def unsharded(run: Callable[[], Any]) -> Any:
    """Run what ranks are compared with on the same kind of device, and return its result on the CPU."""
    if _processes is None:
        return run()
    with _processes.device:
        result = run()
    return _on_cpu(_bytes_of(result))


def on_simulated_ranks(body: Body, world_size: int, **options: Any) -> list[Any]:
    """Run `body(rank)` on simulated ranks; a race, a mismatch or a deadlock fails the test."""
    return fsdp_sim.simulate(body, world_size, **options).results
