"""Two real processes that save, of which one is killed before its file is whole."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem

from tests.core.saved_models import save_anew
from tests.core.worlds import SECONDS_MAX

RAISED = 3
"""How a process ends that an error told of the other's death."""


def save_and_kill_rank_1(folder: Path) -> list[int | None]:
    """Return how the two processes ended; None for one that had to be ended."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    processes = [context.Process(target=_save, args=(folder, rank)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS_MAX)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def _save(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    if rank == 1:
        _die_in_a_write()
    try:
        save_anew(folder / "saved")
    except RuntimeError:
        os._exit(RAISED)  # no farewell to a process that is gone


def _die_in_a_write() -> None:
    """Have this process killed when half of a file is written."""
    create_stream = FileSystem.create_stream

    @contextmanager
    def dies(self: Any, path: Any, mode: str) -> Iterator[Any]:
        with create_stream(self, path, mode) as stream:
            stream.write(b"half")
            stream.flush()
            os.kill(os.getpid(), signal.SIGKILL)
            yield stream

    FileSystem.create_stream = dies  # type: ignore[method-assign]
