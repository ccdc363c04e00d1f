"""Step times: every way in fresh processes, interleaved; medians and spread."""

import json
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

from ci.gpu.models import SIZES, VOCABULARY, WAYS, Gpt
from ci.gpu.process import one_process_group

ROUNDS = 3
BLOCKS = 6
STEPS_PER_BLOCK = 5
WARM_UP_STEPS = 5


def run(size_name: str, rounds: int = ROUNDS) -> dict[str, dict[str, float]]:
    """Return, for each way, milliseconds per step and peak GiB; ratios to FSDP2 and to the floor."""
    blocks: dict[str, list[float]] = {way: [] for way in WAYS}
    peaks: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for way in WAYS:
            result = _in_fresh_process(way, size_name)
            print(f"{way}: {', '.join(f'{ms:.1f}' for ms in result['ms'])} ms", flush=True)
            blocks[way] += result["ms"]
            peaks[way] = result["peak"]
    table: dict[str, dict[str, float]] = {}
    for way, times in blocks.items():
        table[way] = {
            "ms": statistics.median(times),
            "ms_min": min(times),
            "ms_max": max(times),
            **peaks[way],
        }
    for row in table.values():
        row["of_fsdp2"] = row["ms"] / table["FSDP2"]["ms"]
        row["of_floor"] = row["ms"] / table["floor"]["ms"]
        row["of_unsharded"] = row["ms"] / table["unsharded bf16"]["ms"]
    _show(size_name, table)
    return table


def _in_fresh_process(way: str, size_name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "ci.gpu.timing", way, size_name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{way} failed:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _show(size_name: str, table: dict[str, dict[str, float]]) -> None:
    print(
        f"{size_name:16s}{'ms':>8s}{'min':>8s}{'max':>8s}{'/FSDP2':>8s}{'/floor':>8s}{'GiB':>8s}{'res.':>8s}"
    )
    for way, row in table.items():
        print(
            f"{way:16s}{row['ms']:8.1f}{row['ms_min']:8.1f}{row['ms_max']:8.1f}"
            f"{row['of_fsdp2']:8.3f}{row['of_floor']:8.3f}"
            f"{row['allocated_gib']:8.1f}{row['reserved_gib']:8.1f}"
        )


def measure(way: str, size_name: str) -> dict[str, object]:
    """Train in this process and return milliseconds per step, one for each block of steps."""
    with one_process_group():
        return _measure(way, size_name)


def _measure(way: str, size_name: str) -> dict[str, object]:
    size = SIZES[size_name]
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Gpt(size)
        shape = (size.batch, size.length)
        tokens, targets = (torch.randint(0, VOCABULARY, shape) for _ in range(2))
    step = WAYS[way](model)
    for _ in range(WARM_UP_STEPS):
        step(tokens, targets)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    loss = torch.zeros(())
    for _ in range(BLOCKS):
        begin = time.perf_counter()
        for _ in range(STEPS_PER_BLOCK):
            loss = step(tokens, targets)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3 / STEPS_PER_BLOCK)
    peak = {
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "loss": loss.item(),
    }
    return {"ms": times, "peak": peak}


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:3])))
