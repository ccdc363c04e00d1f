"""The threads backend inside PyTorch, which a user would run instead of the simulator."""

import os
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
)

from fsdp_sim.engine.patches import isolate_threads


def pin() -> None:
    """Keep the process on one core: on several its threads fight for the interpreter."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def run(program: Callable[[int], Any], world_size: int) -> None:
    """Run ``program(rank)`` on a thread a rank; the process is good for nothing else afterwards."""
    isolate_threads(isolate=True)
    _install_threaded_pg()
    store, errors = dist.HashStore(), []

    def body(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
        try:
            with torch.autograd.set_multithreading_enabled(False):
                program(rank)
        except BaseException as error:
            errors.append(error)
            ProcessLocalGroup.exception_handle(error)

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
