"""Parity: programs on real ranks have the numbers of the unsharded run, bit for bit where sums are exact."""

import json
from tempfile import TemporaryDirectory

import torch.distributed as dist

from ci.gpu.process import device
from ci.gpu.programs import on_host
from ci.gpus.launch import gathered
from ci.gpus.programs import programs_of
from ci.gpus.simulated import names_of_simulated
from fsdp_sim.mutation.programs import SpecProgram
from fsdp_sim.program import ProgramSpec, run_program


def run() -> dict[str, object]:
    """Return how many programs have the unsharded run's numbers, and how others differ.

    Programs that raise on simulated ranks are left out.
    """
    with TemporaryDirectory() as folder:
        names = names_of_simulated(folder)
    kept = programs_of(dist.get_world_size())
    programs = {name: kept[name] for name in names}
    differences = {}
    for name, program in programs.items():
        runs = gathered(_run(program))
        if dist.get_rank() == 0:
            differences[name] = _difference(name, program, runs)
    different = {name: text for name, text in differences.items() if text is not None}
    row = {"programs": len(programs), "equal": len(programs) - len(different), "not": different}
    if dist.get_rank() == 0:
        print(json.dumps(row, indent=1))
    return row


def _run(program: ProgramSpec) -> object:
    try:
        return on_host(run_program(program, device()))
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:500]


def _difference(name: str, program: ProgramSpec, runs: list[object]) -> str | None:
    raised = [run for run in runs if isinstance(run, str)]
    return raised[0] if raised else SpecProgram(name, program).difference(runs)
