"""Orders: recorded runs on real ranks and simulated ones of the same programs have one order digest."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist

from ci.gpu.orders import compared, recorded
from ci.gpu.programs import simulated, training
from ci.gpus.launch import gathered, shared
from ci.gpus.programs import programs_of
from fsdp_sim.trace import Trace


def run() -> dict[str, object]:
    """Return how many programs agree, and the first difference of each other.

    Programs that raise on simulated ranks are left out.
    """
    rank = dist.get_rank()
    programs = programs_of(dist.get_world_size())
    traces = simulated(programs) if rank == 0 else {}
    names = shared([*traces])
    real: dict[str, Trace | str] = {}
    with TemporaryDirectory() as folder:
        for name in names:
            path = Path(folder) / "trace"
            raised = recorded(training(programs[name]), f"{path}-{{rank}}")
            mine = raised if isinstance(raised, str) else Path(f"{path}-{rank}").read_bytes()
            parts = gathered(mine)
            if rank == 0:
                real[name] = _merged(parts, path)
    row = compared(real, traces) if rank == 0 else {}
    if rank == 0:
        print(json.dumps(row, indent=1))
    return row


def _merged(parts: list[bytes | str], path: Path) -> Trace | str:
    traces = []
    for part in parts:
        if isinstance(part, str):
            return part
        path.write_bytes(part)
        traces.append(Trace.load(path))
    return Trace.merged(traces)
