"""Resuming: a program's model and optimizer go through a checkpoint, and what was dropped is watched."""

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_sim.program.passes import set_frozen
from fsdp_sim.program.shard import Sharded, shard_program
from fsdp_sim.program.spec import ProgramSpec
from fsdp_sim.program.tree import at_step


class Watch:
    """Weak references to the parts of models, to tell which outlive their program's last reference."""

    def __init__(self) -> None:
        self._parts: dict[str, weakref.ref[Any]] = {}

    def add(self, sharded: Sharded) -> None:
        """Watch the context, each module and each parameter of a model, behind those before it."""
        prefix = f"{len(self._parts)}: " if self._parts else ""
        model = sharded.model
        parts = {
            "the context": sharded.context,
            **{f"module {name!r}": module for name, module in model.named_modules()},
            **{f"parameter {name!r}": each for name, each in sharded.parameters.items()},
        }
        self._parts |= {prefix + name: weakref.ref(part) for name, part in parts.items()}

    def alive(self) -> tuple[str, ...]:
        """Return the names of the parts that still live."""
        return tuple(name for name, part in self._parts.items() if part() is not None)


def start(program: ProgramSpec, number: int, rank: int, device: torch.device) -> Sharded:
    """Build what runs step ``number``: with the strategies and the frozen layers that it has there."""
    sharded = shard_program(at_step(program, number), rank, device)
    for step in program.steps[:number]:
        set_frozen(sharded.model, step)
    return sharded


@contextmanager
def shared_folder(device: torch.device) -> Iterator[Path]:
    """Give all ranks one new folder, and remove it.

    The ranks agree on it by a tensor of fixed size: what a run sends must not depend on its name.

    Ordering:
        Collective on the default process group, at both ends.
    """
    token = torch.tensor(list(os.urandom(8)), dtype=torch.uint8, device=device)
    dist.broadcast(token, 0)
    folder = Path(tempfile.gettempdir()) / f"fsdp_sim_{bytes(token.tolist()).hex()}"
    try:
        yield folder
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
