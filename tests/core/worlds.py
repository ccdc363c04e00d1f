"""Run the body of a test on simulated ranks, or on as many real processes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import fsdp_sim

Body = Callable[[int], Any]


def on_simulated_ranks(body: Body, world_size: int) -> list[Any]:
    """Run `body(rank)` on simulated ranks; a race, a mismatch or a deadlock fails the test."""
    return fsdp_sim.simulate(body, world_size).results


def on_gloo_processes(bodies: Sequence[Body], world_size: int) -> None:
    """Run bodies one after the other in one set of gloo processes, which start slowly."""
    with TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        spawn(_gloo_process, args=(bodies, world_size, store), nprocs=world_size)


def _gloo_process(rank: int, bodies: Sequence[Body], world_size: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world_size)
    for body in bodies:
        body(rank)
    dist.destroy_process_group()
