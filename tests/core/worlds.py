"""Run the body of a test on simulated ranks, or on as many real processes."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.spawn import spawn

import fsdp_sim

Body = Callable[[int], Any]


def make_mesh(*shape: int) -> DeviceMesh:
    """A mesh of the devices that the running process group is for."""
    device_type = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return init_device_mesh(device_type, shape)


def on_simulated_ranks(body: Body, world_size: int) -> list[Any]:
    """Run `body(rank)` on simulated ranks; a race, a mismatch or a deadlock fails the test."""
    return fsdp_sim.simulate(body, world_size).results


def on_processes(bodies: Sequence[Body], world_size: int, backend: str) -> None:
    """Run bodies one after the other in one set of processes, which start slowly."""
    with TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        spawn(_process, args=(bodies, world_size, backend, store), nprocs=world_size)


def _process(rank: int, bodies: Sequence[Body], world_size: int, backend: str, store: str) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = (
            ""  # without a device of its own, a context takes a GPU
        )
    dist.init_process_group(backend, f"file://{store}", rank=rank, world_size=world_size)
    for body in bodies:
        body(rank)
    dist.destroy_process_group()
