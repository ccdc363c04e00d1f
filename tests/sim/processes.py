"""Run rank programs on real processes over gloo, all in one set of processes, which start slowly."""

import multiprocessing
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Programs = Mapping[str, Callable[[int], Any]]

SECONDS_MAX = 120
"""How long real processes may take: a bound for broken ones, nothing is measured."""


def on_gloo(programs: Programs, world_size: int, folder: Path) -> dict[str, list[Any]]:
    """Return, for each program, what it returned on each rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "tests.sim.parallel_programs"])
    workers = [
        context.Process(target=_process, args=(rank, world_size, dict(programs), folder))
        for rank in range(world_size)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(SECONDS_MAX)
        worker.kill()
    assert [worker.exitcode for worker in workers] == [0] * world_size
    ranks = [pickle.loads((folder / f"rank {rank}").read_bytes()) for rank in range(world_size)]
    return {name: [results[name] for results in ranks] for name in programs}


def _process(rank: int, world_size: int, programs: Programs, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, rank=rank, world_size=world_size)
    results = {name: program(rank) for name, program in programs.items()}
    (folder / f"rank {rank}").write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
