"""Times on several GPUs: tokens a second, communication that nothing hides, peak memory, and scaling."""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ci.gpu.models import SIZES, VOCABULARY, WAYS, Gpt
from ci.gpu.process import device, has_gpu, one_process_group
from ci.gpus.launch import in_fresh_processes, synchronize, world_sizes
from ci.training import Size

COMPARED = ("DDP", "FSDP2", "fsdp_core")
ROUNDS = 2
WARM_UP_STEPS = 5
BLOCKS, STEPS_PER_BLOCK = 4, 5
PROFILED_STEPS = 3

Interval = tuple[float, float]


def run() -> dict[str, object]:
    """Return a row for each model, number of GPUs and way of training; the largest model on all GPUs."""
    sizes = ("small", "large", "huge") if has_gpu() else ("tiny",)
    rows: dict[str, object] = {}
    for size_name in sizes:
        for ranks in world_sizes() if size_name != "huge" else [dist.get_world_size()]:
            rows[f"{size_name} on {ranks}"] = _row(size_name, ranks)
    if dist.get_rank() == 0:
        print(json.dumps(rows, indent=1))
    return rows


def _row(size_name: str, ranks: int) -> dict[str, object]:
    """Return, for each way, what the slowest rank has measured in fresh processes, interleaved."""
    found: dict[str, list[list[Any]]] = {way: [] for way in COMPARED}
    for _ in range(ROUNDS):
        for way in COMPARED:
            found[way].append(in_fresh_processes("ci.gpus.timing", way, size_name, ranks=ranks))
    return {way: _summary(SIZES[size_name], ranks, rounds) for way, rounds in found.items()}


def _summary(size: Size, ranks: int, rounds: list[list[Any]]) -> object:
    results = [each for one in rounds for each in one]
    failed = [each for each in results if isinstance(each, str)]
    if failed:
        return failed[0]
    blocks = (block for one in rounds for block in zip(*(each["ms"] for each in one)))
    ms = statistics.median(max(block) for block in blocks)
    exposed = [each["exposed_ms"] for each in results]
    return {
        "ms": ms,
        "tokens a second": 1e3 * ranks * size.batch * size.length / ms,
        "exposed communication": None if None in exposed else max(exposed) / ms,
        "peak GiB": max(each["peak_gib"] for each in results),
    }


def measure(way: str, size_name: str) -> dict[str, object]:
    """Train in this process; return milliseconds per step by block, exposed milliseconds, peak."""
    size, target = SIZES[size_name], device()
    torch.manual_seed(0)
    with target:
        model = Gpt(size)
        torch.manual_seed(dist.get_rank())
        shape = (size.batch, size.length)
        tokens, targets = (torch.randint(0, VOCABULARY, shape) for _ in range(2))
    step = WAYS[way](model)

    def steps(count: int) -> None:
        for _ in range(count):
            step(tokens, targets)
        synchronize()

    steps(WARM_UP_STEPS)
    if has_gpu():
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(BLOCKS):
        dist.barrier()
        begin = time.perf_counter()
        steps(STEPS_PER_BLOCK)
        times.append((time.perf_counter() - begin) * 1e3 / STEPS_PER_BLOCK)
    peak = torch.cuda.max_memory_allocated() / 2**30 if has_gpu() else 0.0
    return {"ms": times, "exposed_ms": _exposed_ms(steps) if has_gpu() else None, "peak_gib": peak}


# ---------------------------------------------------------------------- exposed communication


def _exposed_ms(steps: Callable[[int], None]) -> float:
    """Return how long a step's communication runs while nothing is computed, in milliseconds."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        steps(PROFILED_STEPS)
    kernels = [event for event in seen.events() or [] if event.device_type == DeviceType.CUDA]
    communication = [_interval(event) for event in kernels if "nccl" in event.name.lower()]
    compute = [_interval(event) for event in kernels if "nccl" not in event.name.lower()]
    return exposed(communication, compute) / 1e3 / PROFILED_STEPS


def _interval(event: Any) -> Interval:
    return event.time_range.start, event.time_range.end


def exposed(communication: Iterable[Interval], compute: Iterable[Interval]) -> float:
    """Return for how long some interval of the first lies in none of the second."""
    hidden = [*compute]
    return length([*communication, *hidden]) - length(hidden)


def length(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for begin, until in sorted(intervals):
        total += max(0.0, until - max(begin, end))
        end = max(end, until)
    return total


if __name__ == "__main__":
    with one_process_group():
        print(json.dumps(measure(*sys.argv[1:3])))
