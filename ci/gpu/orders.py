"""Orders: recorded runs on the GPU and simulated ones of the same programs have one order digest."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.multiprocessing.spawn import spawn

import fsdp_sim
from ci.gpu.process import device, one_process_group, shared_gpu_group
from ci.gpu.programs import (
    Body,
    drawn,
    kept,
    on_two_ranks,
    simulated_bodies,
    train_fsdp2,
    training,
    without_collector,
)
from fsdp_sim.trace import Trace, diff

DRAWN = 40


def run() -> dict[str, object]:
    """Return, for NCCL on one rank and gloo on two, how many programs agree, and how others differ.

    Programs that raise where they are simulated are left out.
    """
    one = {name: training(program) for name, program in (kept() | drawn(DRAWN)).items()}
    rows: dict[str, object] = {}
    simulated = simulated_bodies(one, 1)
    rows["one rank, NCCL"] = compared(_recorded_here(one, simulated), simulated)
    simulated = simulated_bodies(_bodies_of_two(), 2)
    rows["two ranks, gloo"] = compared(_recorded_by_two(), simulated)
    print(json.dumps(rows, indent=1))
    return rows


def _bodies_of_two() -> dict[str, Body]:
    programs = {name: training(program) for name, program in on_two_ranks().items()}
    return {**programs, "FSDP2": train_fsdp2}


# ---------------------------------------------------------------------- recorded


def _recorded_here(bodies: dict[str, Body], simulated: dict[str, Trace]) -> dict[str, Trace | str]:
    with one_process_group():
        return {name: recorded(bodies[name]) for name in simulated}


def recorded(body: Body, path: str | None = None) -> Trace | str:
    """Return what this process did; what it raised, if it did."""
    with without_collector():
        try:
            with fsdp_sim.record(path, device=device().type) as recording:
                body(device())
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:500]
    return recording.trace


def _recorded_by_two() -> dict[str, Trace | str]:
    traces: dict[str, Trace | str] = {}
    with TemporaryDirectory() as folder:
        spawn(_process, args=(folder,), nprocs=2)
        for name in _bodies_of_two():
            files = [Path(folder) / f"{name}-{rank}" for rank in range(2)]
            traces[name] = Trace.merged([Trace.load(file) for file in files])
    return traces


def _process(rank: int, folder: str) -> None:
    with shared_gpu_group(rank, 2, folder):
        for name, body in _bodies_of_two().items():
            raised = recorded(body, f"{folder}/{name}-{{rank}}")
            if isinstance(raised, str):
                print(f"{name} on rank {rank}: {raised}")


# ---------------------------------------------------------------------- compared


def compared(recorded: dict[str, Trace | str], simulated: dict[str, Trace]) -> dict[str, object]:
    different = {
        name: difference
        for name, trace in recorded.items()
        if (difference := _difference(trace, simulated[name])) is not None
    }
    return {
        "programs": len(recorded),
        "equal": len(recorded) - len(different),
        "different": different,
    }


def _difference(recorded: Trace | str, simulated: Trace) -> str | None:
    """Return how a recorded and a simulated run differ."""
    if isinstance(recorded, str):
        return recorded
    if recorded.order_digest == simulated.order_digest:
        return None
    return f"recorded, then simulated: {diff(recorded, simulated, order_only=True)}"
