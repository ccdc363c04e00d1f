"""Run a program sharded, on this rank of an initialised process group: simulated, gloo or NCCL."""

from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp_core
from fsdp_sim.errors import ConfigError
from fsdp_sim.program.check import check_program
from fsdp_sim.program.model import PlannedError
from fsdp_sim.program.passes import run_pass, set_frozen
from fsdp_sim.program.results import Losses, RankRun, StepRun, Tensors
from fsdp_sim.program.shard import Sharded, shard_program
from fsdp_sim.program.spec import PassSpec, ProgramSpec


def run_program(program: ProgramSpec, device: torch.device | None = None) -> RankRun:
    """Build, shard and train ``program`` on this rank.

    Args:
        program: what to run; checked before anything is built.
        device: where; by default the accelerator of the NCCL backend, else the CPU.

    Ordering:
        Collective: every rank of the default process group calls it.

    Raises:
        SpecError: the program cannot be built.
        ConfigError: the process group has another number of ranks.
    """
    check_program(program)
    if dist.get_world_size() != program.world_size:
        got = f"got a process group of {dist.get_world_size()}"
        raise ConfigError(f"the program's mesh {program.mesh} must have all the ranks, {got}")
    rank = dist.get_rank()
    sharded = shard_program(program, rank, device or _default_device())
    steps = [_run_step(program, sharded, number) for number in range(len(program.steps))]
    return RankRun(rank, tuple(steps))


def _default_device() -> torch.device:
    if "nccl" in dist.get_backend():
        return torch.device("cuda", dist.get_node_local_rank(fallback_rank=0))
    return torch.device("cpu")


def _run_step(program: ProgramSpec, sharded: Sharded, number: int) -> StepRun:
    """Run the passes of a step, the optimizer and ``zero_grad``."""
    step = program.steps[number]
    set_frozen(sharded.model, step)
    losses, failed = _run_passes(program, sharded, number)
    if program.context.caller_managed_grad_sync:
        sharded.context.finish_grad_sync()
    gradients = _local_rows(sharded.model, of_gradients=True)
    if step.optimize and not failed:
        sharded.optimizer.step()
    parameters = _local_rows(sharded.model, of_gradients=False)
    sharded.optimizer.zero_grad(set_to_none=step.set_to_none)
    return StepRun(losses, gradients, parameters, _stats(sharded.context))


def _run_passes(
    program: ProgramSpec, sharded: Sharded, number: int
) -> tuple[tuple[Losses, ...], bool]:
    """Return the losses of the passes, and whether a planned exception ended the step."""
    losses: list[Losses] = []

    def scope(is_last: bool) -> AbstractContextManager[object]:  # noqa: FBT001 - Scope is positional
        return fsdp_core.microbatch(sharded.context, is_last=is_last)

    for position, one in enumerate(program.steps[number].passes):
        place = (number, position)
        try:
            losses.append(run_pass(program, sharded.model, place, sharded.device, scope))
        except PlannedError:
            _recover(sharded, one)
            return (*losses, ()), True
    return tuple(losses), False


def _recover(sharded: Sharded, one: PassSpec) -> None:
    """Do what a user does after an exception in a pass."""
    assert one.raises is not None, "only a planned exception is caught"
    if one.raises.reset:
        sharded.context.reset()
    sharded.optimizer.zero_grad(set_to_none=True)


def _local_rows(model: nn.Module, *, of_gradients: bool) -> Tensors:
    """Return copies of this rank's rows of each parameter or gradient, on its device."""
    rows: Tensors = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = parameter.grad if of_gradients else parameter.data
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            rows[name] = None if local is None else local.clone()
    return rows


def _stats(context: fsdp_core.FsdpContext) -> dict[str, int]:
    """Return the context's counters by name."""
    return {name: value for name, value in vars(context.stats).items() if isinstance(value, int)}
