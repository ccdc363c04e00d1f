"""Programs that run on the GPU and on simulated ranks: drawn ones, kept ones, and PyTorch's FSDP2."""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsdp_sim
from fsdp_sim.mutation.core_programs import small_programs
from fsdp_sim.program import ProgramSpec, run_program
from fsdp_sim.program.results import RankRun
from fsdp_sim.program.tree import units
from fsdp_sim.strategies import programs as drawn_programs
from fsdp_sim.trace import Trace

Body = Callable[[torch.device], Any]
"""What one rank does on a device."""

FSDP2_WIDTH = 8
FSDP2_STEPS = 2


def kept() -> dict[str, ProgramSpec]:
    """Return the programs that mutation uses, each on one rank."""
    return {name: on_one_rank(program) for name, program in small_programs().items()}


def on_one_rank(program: ProgramSpec) -> ProgramSpec:
    """Return a program on a mesh of as many axes, all of size one."""
    owners = tuple(replace(owner, owner=0, ranks=None) for owner in program.owners)
    return replace(program, mesh=(1,) * len(program.mesh), owners=owners)


def on_two_ranks() -> dict[str, ProgramSpec]:
    """Return the kept programs of two ranks that gloo can run with CUDA tensors: no point-to-point."""
    return {
        name: program
        for name, program in small_programs().items()
        if program.world_size == 2
        and all(unit.spec.strategy != "tensor_atomic" for unit in units(program))
    }


def drawn(count: int, ranks: int = 1) -> dict[str, ProgramSpec]:
    """Return programs of a number of ranks, the same ones each time."""
    found: dict[ProgramSpec, None] = {}

    @settings(
        max_examples=4 * count * ranks,
        database=None,
        derandomize=True,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn_programs(ranks_max=ranks, disturbed=False))
    def draw(program: ProgramSpec) -> None:
        if program.world_size == ranks:
            found[program] = None

    draw()
    largest = sorted(found, key=lambda program: -len(repr(program)))[:count]
    return {f"drawn {number}": program for number, program in enumerate(largest)}


def training(program: ProgramSpec) -> Body:
    """Return what runs a program on a device."""
    return lambda where: run_program(program, where)


def simulated(programs: dict[str, ProgramSpec]) -> dict[str, Trace]:
    """Return the traces of programs of one world on simulated ranks, without those that raise."""
    if not programs:
        return {}
    (world_size,) = {program.world_size for program in programs.values()}
    bodies = {name: training(program) for name, program in programs.items()}
    return simulated_bodies(bodies, world_size)


def simulated_bodies(bodies: dict[str, Body], world_size: int) -> dict[str, Trace]:
    """Return the traces of bodies on simulated ranks, without those that raise."""
    traces = {}
    for name, body in bodies.items():

        def rank_program(_rank: int, body: Body = body) -> None:
            body(torch.device("cpu"))

        with without_collector(), suppress(Exception):
            traces[name] = fsdp_sim.simulate(
                rank_program, world_size, trace=True, strict=False
            ).trace
    return traces


def on_host(run: RankRun) -> RankRun:
    """Return what a run holds, on the host."""

    def move(rows: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        return {key: None if row is None else row.cpu() for key, row in rows.items()}

    steps = [
        replace(
            step,
            losses=tuple(tuple(loss.cpu() for loss in one) for one in step.losses),
            gradients=move(step.gradients),
            parameters=move(step.parameters),
            exported=move(step.exported),
        )
        for step in run.steps
    ]
    return replace(run, steps=tuple(steps))


@contextmanager
def without_collector() -> Iterator[None]:
    """Run without the garbage collector and without warnings, as a simulated world does."""
    gc.collect()
    gc.freeze()  # the next collection looks at what is new alone
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gc.enable()


def train_fsdp2(device: torch.device) -> list[float]:
    """Train three layers under FSDP2 on this rank, and return the losses."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    with torch.device(device):
        layers = [nn.Linear(FSDP2_WIDTH, FSDP2_WIDTH) for _ in range(3)]
        model = nn.Sequential(*layers)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(number % 3 - 1)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6, foreach=True)
    losses = []
    for _ in range(FSDP2_STEPS):
        loss = model(torch.ones(2, FSDP2_WIDTH, device=device)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
