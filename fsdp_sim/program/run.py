"""Run a program sharded, on this rank of an initialised process group: simulated, gloo or NCCL."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp_core
from fsdp_core.full_state import full_state_dict
from fsdp_sim.errors import ConfigError
from fsdp_sim.program.check import check_program
from fsdp_sim.program.model import PlannedError
from fsdp_sim.program.passes import run_pass, set_frozen
from fsdp_sim.program.results import Losses, RankRun, StepRun, Tensors
from fsdp_sim.program.resume import Watch, shared_folder, start
from fsdp_sim.program.shard import Sharded
from fsdp_sim.program.spec import PassSpec, ProgramSpec, StepSpec
from fsdp_sim.program.tree import units


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
    watch = Watch()
    steps = _run_steps(program, device or _default_device(), watch)
    return RankRun(dist.get_rank(), steps, watch.alive())


def _run_steps(program: ProgramSpec, device: torch.device, watch: Watch) -> tuple[StepRun, ...]:
    """Train, and drop the model."""
    rank = dist.get_rank()
    sharded = start(program, 0, rank, device)
    watch.add(sharded)
    ran = []
    for number, step in enumerate(program.steps):
        if step.resume is not None:
            with shared_folder(device) as folder:
                fsdp_core.save_checkpoint(sharded.model, sharded.optimizer, folder)
                del sharded
                sharded = start(program, number, rank, device)
                fsdp_core.load_checkpoint(sharded.model, sharded.optimizer, folder)
            watch.add(sharded)
        ran.append(_run_step(program, sharded, number))
    return tuple(ran)


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
    gradients = _local_rows(sharded.parameters, of_gradients=True)
    if step.optimize and not failed:
        sharded.optimizer.step()
    parameters = _local_rows(sharded.parameters, of_gradients=False)
    sharded.optimizer.zero_grad(set_to_none=step.set_to_none)
    exported = full_state_dict(sharded.model) if step.export else {}
    unsharded = _unsharded(sharded) if _ends_at_rest(program, step, failed=failed) else ()
    return StepRun(losses, gradients, parameters, exported, unsharded, _stats(sharded.context))


def _ends_at_rest(program: ProgramSpec, step: StepSpec, *, failed: bool) -> bool:
    """Return whether all units must be at rest after the step.

    Not where some unit may be kept after a forward that no backward follows, nor where the recovery of a
    backward is left to the next forward.
    """
    planned = [one.raises for one in step.passes if one.raises and failed]
    left_open = any(raises.phase == "backward" and not raises.reset for raises in planned)
    return not left_open and all(unit.spec.reshard_after_forward for unit in units(program))


def _unsharded(sharded: Sharded) -> tuple[str, ...]:
    """Return the names under which the model does not show the sharded parameter."""
    shown = dict(sharded.model.named_parameters())
    return tuple(n for n, held in sharded.parameters.items() if shown.get(n) is not held)


def _run_passes(
    program: ProgramSpec, sharded: Sharded, number: int
) -> tuple[tuple[Losses, ...], bool]:
    """Return the losses of the passes, and whether a planned exception ended the step."""
    losses: list[Losses] = []

    @contextmanager
    def scope(is_last: bool) -> Iterator[None]:  # noqa: FBT001 - Scope is positional
        with fsdp_core.microbatch(sharded.context, is_last=is_last), sharded.driver.backward():
            yield

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


def _local_rows(parameters: dict[str, nn.Parameter], *, of_gradients: bool) -> Tensors:
    """Return copies of this rank's rows of each parameter or gradient, on its device."""
    rows: Tensors = {}
    with torch.no_grad():
        for name, parameter in parameters.items():
            tensor = parameter.grad if of_gradients else parameter.data
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            rows[name] = None if local is None else local.clone()
    return rows


def _stats(context: fsdp_core.FsdpContext) -> dict[str, int]:
    """Return the context's counters by name."""
    return {name: value for name, value in vars(context.stats).items() if isinstance(value, int)}
