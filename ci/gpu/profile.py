"""Where the host's time of a step goes: by Python function, and by operator and CUDA call."""

import cProfile
import json
import pstats
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from ci.gpu.models import SIZES, VOCABULARY, WAYS, Gpt
from ci.gpu.process import device, one_process_group

PROFILED = ("floor", "FSDP2", "fsdp_core")
STEPS = 10
WARM_UP_STEPS = 5
ROWS = 45

Rows = list[tuple[str, float, float]]
"""What ran, how often in a step, and its own milliseconds of one."""


def run() -> dict[str, dict[str, Rows]]:
    """Return, for each way of training the small model, both tables, the costly rows first.

    Profilers cost time of their own for each call: compare rows of one table, not with `time-small`.
    """
    tables = {way: _in_fresh_process(way) for way in PROFILED}
    for way, table in tables.items():
        for kind, rows in table.items():
            total = sum(ms for _, _, ms in rows)
            print(f"-- {way}, {kind}: calls and own ms of a step; these rows {total:.1f} ms")
            for name, calls, ms in rows:
                print(f"{calls:9.1f}{ms:9.3f}  {name}")
    return tables


def _in_fresh_process(way: str) -> dict[str, Rows]:
    command = [sys.executable, "-W", "ignore", "-m", "ci.gpu.profile", way]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{way} failed:\n{done.stderr[-4000:]}")
    tables: dict[str, Rows] = json.loads(done.stdout.splitlines()[-1])
    return tables


def measure(way: str) -> dict[str, Rows]:
    """Train the small model in this process, and return both tables."""
    with one_process_group():
        steps = _steps_of(way)
        return {"functions": _functions(steps), "operators": _operators(steps)}


def _steps_of(way: str) -> Callable[[], None]:
    """Return what trains the small model for some steps, on this thread alone."""
    size = SIZES["small"]
    torch.manual_seed(0)
    with device():
        model = Gpt(size)
        shape = (size.batch, size.length)
        tokens, targets = (torch.randint(0, VOCABULARY, shape) for _ in range(2))
    step = WAYS[way](model)

    def steps() -> None:
        # Otherwise backward passes run on a thread that a profiler of Python does not see.
        with torch.autograd.set_multithreading_enabled(False):
            for _ in range(STEPS):
                step(tokens, targets)

    for _ in range(WARM_UP_STEPS):
        step(tokens, targets)
    return steps


def _functions(steps: Callable[[], None]) -> Rows:
    profile = cProfile.Profile()
    profile.runcall(steps)
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    return _costliest(
        (f"{Path(file).name}:{line} {name}", calls, own * 1e3)
        for (file, line, name), (_, calls, own, _, _) in stats.items()
    )


def _operators(steps: Callable[[], None]) -> Rows:
    with torch_profile(activities=[ProfilerActivity.CPU]) as profile:
        steps()
    return _costliest(
        (each.key, each.count, each.self_cpu_time_total * 1e-3) for each in profile.key_averages()
    )


def _costliest(rows: Iterable[tuple[str, int, float]]) -> Rows:
    by_step = [(name, calls / STEPS, ms / STEPS) for name, calls, ms in rows]
    return sorted(by_step, key=lambda row: -row[2])[:ROWS]


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
