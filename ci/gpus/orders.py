"""Orders: recorded runs on real ranks and simulated ones of the same programs have one order digest."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist

from ci.gpu.orders import compared, recorded
from ci.gpu.programs import training
from ci.gpus.launch import gathered
from ci.gpus.programs import programs_of
from ci.gpus.simulated import names_of_simulated, trace_of
from fsdp_sim.trace import Trace


def run() -> dict[str, object]:
    """Return how many programs agree, and the first difference of each other.

    Programs that raise on simulated ranks are left out.
    """
    rank = dist.get_rank()
    programs = programs_of(dist.get_world_size())
    real: dict[str, Trace | str] = {}
    expected: dict[str, Trace] = {}
    with TemporaryDirectory() as folder:
        for name in names_of_simulated(folder):
            path = Path(folder) / "recorded"
            raised = recorded(training(programs[name]), f"{path}-{{rank}}")
            mine = raised if isinstance(raised, str) else Path(f"{path}-{rank}").read_bytes()
            parts = gathered(mine)
            if rank == 0:
                real[name] = _merged(parts, path)
                expected[name] = trace_of(folder, name)
    row = compared(real, expected)
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
