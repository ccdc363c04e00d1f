"""Host time of a step on PyTorch's ``fake`` backend, where only host work counts."""

import json
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from ci.bench.models import SIZES, Toy, batch
from ci.bench.ways import WAYS

ROUNDS = 3
STEPS = 12
WARM_UP_STEPS = 4
WORLD_SIZES = (2, 8)
TARGET = 0.4
"""fsdp_core's host time over unsharded, as a share of FSDP2's."""


def run() -> dict[str, dict[str, float]]:
    """Return milliseconds of the fastest step for each way, and the share of FSDP2's overhead."""
    table: dict[str, dict[str, float]] = {}
    print(f"{'model, ranks':14s}" + "".join(f"{way:>12s}" for way in WAYS) + f"{'share':>9s}")
    for size in SIZES:
        for world_size in WORLD_SIZES:
            best = {way: float("inf") for way in WAYS}
            for _ in range(ROUNDS):
                for way in WAYS:
                    best[way] = min(best[way], _in_fresh_process(way, size, world_size))
            base = best["unsharded"]
            best["share"] = (best["fsdp_core"] - base) / (best["FSDP2"] - base)
            table[f"{size}, {world_size}"] = best
            cells = "".join(f"{best[way]:12.2f}" for way in WAYS)
            print(f"{size + ', ' + str(world_size):14s}{cells}{best['share']:9.3f}")
    print(f"share: overhead of fsdp_core over that of FSDP2; target at most {TARGET}")
    return table


def _in_fresh_process(way: str, size: str, world_size: int) -> float:
    command = [sys.executable, "-W", "ignore", "-m", "ci.bench.host", way, size, str(world_size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{way} failed:\n{done.stderr[-4000:]}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def measure(way: str, size_name: str, world_size: int) -> float:
    """Return the processor milliseconds of the fastest step."""
    torch.set_num_threads(1)
    if way == "DDP":
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    size = SIZES[size_name]
    torch.manual_seed(0)
    step = WAYS[way](Toy(size))
    tokens, targets = batch(size, world_size)
    times = []
    for _ in range(WARM_UP_STEPS + STEPS):
        begin = time.process_time()
        step(tokens, targets)
        times.append((time.process_time() - begin) * 1e3)
    dist.destroy_process_group()
    return min(times[WARM_UP_STEPS:])


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
