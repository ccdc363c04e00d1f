"""Recording: one process of a real run, from its first op to its trace."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_sim.engine import machine as machines
from fsdp_sim.engine import meshes, patches, shims
from fsdp_sim.engine.machine import LOCAL
from fsdp_sim.errors import ConfigError
from fsdp_sim.recorder import cpu, cuda
from fsdp_sim.recorder.mode import RecordingMode
from fsdp_sim.recorder.process import DeviceMachine, ProcessMachine
from fsdp_sim.recorder.works import Works
from fsdp_sim.trace import Trace


class Recording:
    """What one process did.

    Attributes:
        rank: of the process.
        trace: its ops; all other ranks have none in it.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.trace = Trace(world_size, ranks=(rank,))


@contextmanager
def record(
    path: str | Path | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    device: str | None = None,
) -> Iterator[Recording]:
    """Record what this process does to its streams, memory and process groups inside the scope.

    The program runs as it would: no wait is added, no value is changed. Each call becomes the op that
    the simulator makes of it, so traces of all ranks, merged, go through the same checkers, and have the
    ``order_digest`` of a simulated run of the same program. Collectives are placed on streams as NCCL
    places them, whatever the backend.

    Args:
        path: where to write the trace when the scope ends, also by an exception; "{rank}" in it becomes
            the rank.
        rank: of this process; by default that of the process group, else of the environment, else 0.
        world_size: number of processes, likewise; 1 by default.
        device: "cpu" or "cuda": whose streams are recorded; by default CUDA's where there is a GPU.

    Ordering:
        Begins before the program makes streams and issues collectives: what came before is not in it.

    Raises:
        ConfigError: recording already, or inside a simulated world; or several processes would write one
            file.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    recording = Recording(*_place(rank, world_size))
    target = _target(path, recording)
    if device not in ("cuda", "cpu"):
        raise ConfigError(f"device must be 'cuda' or 'cpu', got {device!r}")
    if machines.current() is not None:
        raise ConfigError(
            "record must be entered once, outside a simulated world, got a call inside"
        )
    try:
        with _seen(recording, device):
            yield recording
    finally:
        if target is not None:
            recording.trace.save(target)


@contextmanager
def _seen(recording: Recording, device: str) -> Iterator[None]:
    """See what the process does, until the end of the scope."""
    shadows = cuda.Shadows()
    keep, rank, world_size = recording.trace.extend, recording.rank, recording.trace.world_size
    machine = (
        ProcessMachine(rank, world_size, keep)
        if device == "cpu"
        else DeviceMachine(rank, world_size, keep, shadows.current)
    )
    with patches.listening() as undo:
        LOCAL.set_everywhere(machine)
        try:
            shims.install_backward(undo)
            shims.install_memory(undo)
            shims.install_ranges(undo, enters=True)
            meshes.install_unmarked(undo)
            if device == "cpu":
                cpu.install(undo, machine)
            else:
                cuda.install(undo, shadows, machine)
            Works(machine).install(undo)
            with RecordingMode(machine):
                yield
        finally:
            machine.is_open = False
            machine.analysis.settle()
            LOCAL.set_everywhere(None)
            LOCAL.forget()


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return the rank and the number of processes."""
    if dist.is_initialized():
        known = dist.get_rank(), dist.get_world_size()
    else:
        known = _number("RANK", 0), _number("WORLD_SIZE", 1)
    here = known[0] if rank is None else rank, known[1] if world_size is None else world_size
    if not 0 <= here[0] < here[1]:
        raise ConfigError(f"rank must be from 0 to {here[1] - 1}, got {here[0]}")
    return here


def _number(name: str, default: int) -> int:
    with suppress(ValueError):
        return int(os.environ.get(name, default))
    raise ConfigError(f"the environment variable {name} must be a number, got {os.environ[name]!r}")


def _target(path: str | Path | None, recording: Recording) -> Path | None:
    """Return where the trace goes."""
    if path is None:
        return None
    if recording.trace.world_size > 1 and "{rank}" not in str(path):
        raise ConfigError(
            f"path must have '{{rank}}' in it, since each process writes a file, got {str(path)!r}"
        )
    target = Path(str(path).replace("{rank}", str(recording.rank)))
    if not target.parent.is_dir():
        raise ConfigError(f"path must be in a folder that exists, got {str(target.parent)!r}")
    return target
