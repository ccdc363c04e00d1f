"""Process groups for what is run: of this process alone, or of several that share the first GPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist


def has_gpu() -> bool:
    """Whether there is one; without it parts that allow it run on CPUs, to see that they do run."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """Return where tensors are."""
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu() else torch.device("cpu")


@contextmanager
def one_process_group(backend: str | None = None) -> Iterator[None]:
    """Join the group of the environment, or one of this process alone, for the scope."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29531")
    if has_gpu():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(
        backend or ("nccl" if has_gpu() else "gloo"),
        rank=int(os.environ.get("RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def shared_gpu_group(rank: int, world_size: int, folder: str) -> Iterator[None]:
    """Join a gloo group of processes that all have the first GPU."""
    if has_gpu():
        torch.cuda.set_device(0)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    store = f"file://{Path(folder) / 'store'}"
    # Without CPUs in the group, objects travel on the GPU too, as they do in a world.
    backend = "cuda:gloo" if has_gpu() else "gloo"
    dist.init_process_group(backend, store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.barrier()
        dist.destroy_process_group()
