"""Cost of simulated steps against the limit: the number of ranks times one rank's own step."""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsdp_sim
from ci.bench import threads
from ci.bench.host import measure as measure_one_rank
from ci.bench.models import SIZES, Toy, batch
from ci.bench.ways import WAYS

ROUNDS = 3
STEPS = 6
WORLD_SIZES = (2, 8)
MODES: dict[str, dict[str, Any]] = {
    "every check": {},
    "no checks": {"checkers": ()},
    "values alone": {"knobs": ("values",)},
}
TARGETS = {"every check": 2.5, "values alone": 1.2}
"""Most that a step may cost, as a multiple of the limit."""

LARGE_WORLDS = {256: "under 50 s", 1024: "under 16 GiB"}
LARGE_STEPS = 3
FRESH_STEPS = 3

Numbers = dict[str, float]


def run() -> dict[str, Numbers]:
    """Return processor time of steps as ratios to the limit, of large worlds, and of a short test."""
    table = _warm_steps()
    table["fresh process, 8 ranks"] = fresh = _in_fresh_process("test", 8)
    print(f"a test in a fresh process: {fresh['above_s']:.2f} s above imports and steps; target 1")
    for world_size, target in LARGE_WORLDS.items():
        table[f"{world_size} ranks"] = large = _in_fresh_process("large", world_size)
        print(f"{world_size} ranks: {large['s']:.1f} s, {large['gib']:.1f} GiB; target {target}")
    return table


def _warm_steps() -> dict[str, Numbers]:
    table: dict[str, Numbers] = {}
    for world_size in WORLD_SIZES:
        best = dict.fromkeys(("limit", *MODES, "threads, pinned"), float("inf"))
        for _ in range(ROUNDS):
            for mode in best:
                best[mode] = min(best[mode], _in_fresh_process(mode, world_size)["ms"])
        limit = world_size * best.pop("limit")
        for mode, milliseconds in best.items():
            ratio = milliseconds / limit
            table[f"{mode}, {world_size}"] = {"ms": milliseconds, "of_limit": ratio}
            target = f"   target {TARGETS[mode]}" if mode in TARGETS else ""
            print(f"{world_size:3d} ranks, {mode:16s}{milliseconds:9.1f} ms{ratio:7.2f}{target}")
    return table


def _in_fresh_process(job: str, world_size: int) -> Numbers:
    command = [sys.executable, "-W", "ignore", "-m", "ci.bench.simulator", job, str(world_size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{job} failed:\n{done.stderr[-4000:]}")
    numbers: Numbers = json.loads(done.stdout.splitlines()[-1])
    return numbers


# ---------------------------------------------------------------------- what runs in fresh processes


def measure(job: str, world_size: int) -> Numbers:
    """Do one job and return its numbers; seconds are of the processor."""
    torch.set_num_threads(1)
    if job == "limit":
        return {"ms": measure_one_rank("FSDP2", "toy", world_size)}
    if job == "test":
        imported = time.process_time()
        marks = _toy_steps(_simulator({}), world_size, FRESH_STEPS)
        return {"above_s": marks[0] - imported + time.process_time() - marks[-1]}
    if job == "large":
        return _large(world_size)
    if job == "threads, pinned":
        threads.pin()
        marks = _toy_steps(threads.run, world_size, STEPS)
    else:
        marks = _toy_steps(_simulator(MODES[job]), world_size, STEPS)
    return {"ms": min(end - begin for begin, end in pairwise(marks[1:])) * 1e3}


def _simulator(options: dict[str, Any]) -> Callable[[Callable[[int], Any], int], Any]:
    return lambda program, world_size: fsdp_sim.simulate(program, world_size, **options)


def _toy_steps(
    runs: Callable[[Callable[[int], Any], int], Any], world_size: int, steps: int
) -> list[float]:
    """Return the processor's time at the start of each step, and at the end of the last."""
    marks: list[float] = []
    size = SIZES["toy"]

    def mark(rank: int) -> None:
        dist.barrier()
        if rank == 0:
            marks.append(time.process_time())

    def program(rank: int) -> None:
        torch.manual_seed(0)
        step = WAYS["FSDP2"](Toy(size))
        tokens, targets = batch(size, world_size)
        for _ in range(steps):
            mark(rank)
            step(tokens, targets).item()
        mark(rank)

    runs(program, world_size)
    return marks


def _large(world_size: int) -> Numbers:
    """Train three linear layers of FSDP2 on many ranks, every check on."""

    def program(_: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
        mesh = init_device_mesh("cpu", (world_size,))
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(LARGE_STEPS):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    begin = time.process_time()
    fsdp_sim.simulate(program, world_size)
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"s": time.process_time() - begin, "gib": peak_kib / 2**20}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
