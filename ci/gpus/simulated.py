"""Simulated: the programs of a world on simulated ranks, in a process that is in no real group."""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from ci.gpu.programs import simulated
from ci.gpus.launch import in_fresh_processes
from ci.gpus.programs import programs_of
from fsdp_sim.trace import Trace

SECONDS_MAX = 3600.0


def names_of_simulated(folder: str) -> list[str]:
    """Simulate beside rank 0; return on every rank the names of the programs that ended.

    Args:
        folder: where rank 0's process leaves the traces, for ``trace_of``.

    Raises:
        RuntimeError: the process failed.
    """
    size = str(dist.get_world_size())
    (names,) = in_fresh_processes("ci.gpus.simulated", size, folder, ranks=1, seconds=SECONDS_MAX)
    if isinstance(names, str):
        raise RuntimeError(f"programs must run on simulated ranks, got {names}")  # noqa: TRY004
    found: list[str] = names
    return found


def trace_of(folder: str, name: str) -> Trace:
    """Return the trace of a program that was simulated."""
    return Trace.load(Path(folder) / name)


def _save(world_size: int, folder: Path) -> list[str]:
    traces = simulated(programs_of(world_size))
    for name, trace in traces.items():
        trace.save(folder / name)
    return [*traces]


if __name__ == "__main__":
    print(json.dumps(_save(int(sys.argv[1]), Path(sys.argv[2]))))
