"""Launch: the process group that torchrun describes, and fresh processes, one beside each rank."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ci.gpu.process import one_process_group

PATIENCE = timedelta(hours=1)
"""Ranks wait so long for each other: rank 0 simulates, and compares, alone."""

_control: list[dist.ProcessGroup] = []
_launches = itertools.count(1)


@contextmanager
def joined() -> Iterator[None]:
    """Join the group of torchrun's environment, and one on the host for what is no part of a program."""
    with one_process_group():
        _control[:] = [dist.new_group(backend="gloo", timeout=PATIENCE)]
        yield
        meet()


def meet() -> None:
    """Wait for all ranks."""
    dist.barrier(_control[0])


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks, on each."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=_control[0])
    return values


def shared(value: Any) -> Any:
    """Return the value of rank 0, on each rank."""
    return gathered(value)[0]


def in_fresh_processes(
    module: str, *arguments: str, ranks: int | None = None, seconds: float = 600.0
) -> list[Any]:
    """Run a module in one process beside each of the first ranks, as a world of its own.

    Args:
        module: what ``python -m`` runs; its last line of output is JSON.
        arguments: its command line.
        ranks: how many take part; all by default.
        seconds: after which a process is ended.

    Returns:
        On every rank, what each process printed last; what went wrong, as text, where it did.
    """
    ranks, rank = ranks or dist.get_world_size(), dist.get_rank()
    port = str(int(os.environ["MASTER_PORT"]) + next(_launches))
    result = None
    if rank < ranks:
        own = {name: text for name, text in os.environ.items() if "TORCHELASTIC" not in name}
        own |= {"WORLD_SIZE": str(ranks), "MASTER_PORT": port}
        result = _result([sys.executable, "-W", "ignore", "-m", module, *arguments], own, seconds)
    return gathered(result)[:ranks]


def _result(command: list[str], environment: dict[str, str], seconds: float) -> Any:
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"no end within {seconds:.0f} s"
    if done.returncode:
        return f"exit {done.returncode}: {done.stderr[-2000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def world_sizes() -> list[int]:
    """Return the worlds that are compared: one rank, then twice as many until all are in."""
    world_size = dist.get_world_size()
    return sorted({min(2**power, world_size) for power in range(world_size.bit_length() + 1)})


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
