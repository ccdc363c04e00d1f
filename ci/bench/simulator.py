"""Cost of a simulated step against the limit: the number of ranks times one rank's own step."""

import json
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

import fsdp_sim
from ci.bench.host import measure as measure_one_rank
from ci.bench.models import SIZES, Toy, batch
from ci.bench.ways import WAYS

ROUNDS = 3
STEPS = 6
WORLD_SIZES = (2, 8)
MODES: dict[str, dict[str, Any]] = {"every check": {}, "no checks": {"checkers": ()}}


def run() -> dict[str, dict[str, float]]:
    """Return, for each world size and mode, milliseconds of a step and the ratio to the limit."""
    table: dict[str, dict[str, float]] = {}
    for world_size in WORLD_SIZES:
        limit, best = float("inf"), {mode: float("inf") for mode in MODES}
        for _ in range(ROUNDS):
            limit = min(limit, world_size * _fresh("limit", world_size))
            for mode in MODES:
                best[mode] = min(best[mode], _fresh(mode, world_size))
        for mode, milliseconds in best.items():
            table[f"{mode}, {world_size}"] = {"ms": milliseconds, "of_limit": milliseconds / limit}
            print(
                f"{world_size:3d} ranks, {mode:12s}{milliseconds:9.1f} ms{milliseconds / limit:7.2f}"
            )
    return table


def _fresh(mode: str, world_size: int) -> float:
    command = [sys.executable, "-W", "ignore", "-m", "ci.bench.simulator", mode, str(world_size)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def measure(mode: str, world_size: int) -> float:
    """Return processor milliseconds of the fastest step of the whole world."""
    if mode == "limit":
        return measure_one_rank("FSDP2", "toy", world_size)
    torch.set_num_threads(1)
    marks: list[float] = []
    size = SIZES["toy"]

    def program(rank: int) -> None:
        torch.manual_seed(0)
        step = WAYS["FSDP2"](Toy(size))
        tokens, targets = batch(size, world_size)
        for _ in range(STEPS):
            if rank == 0:
                marks.append(time.process_time())
            step(tokens, targets).item()
            dist.barrier()

    fsdp_sim.simulate(program, world_size, **MODES[mode])
    return min(end - begin for begin, end in pairwise(marks[1:])) * 1e3


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
