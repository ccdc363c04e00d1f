"""A program's model, sharded as its units say."""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

import fsdp_core
from fsdp_sim.program.drive import Driver
from fsdp_sim.program.model import DTYPES, Node, Plan, build_model
from fsdp_sim.program.optimizer import make_optimizer
from fsdp_sim.program.placements import letters
from fsdp_sim.program.spec import DType, PrecisionSpec, ProgramSpec, UnitSpec
from fsdp_sim.program.tree import Unit, units

_PLACEMENTS: dict[str, Placement] = {
    "R": Replicate(),
    "P": Partial("avg"),
    "S": fsdp_core.RowAtomic(),
    "T": fsdp_core.TensorAtomic(),
}


@dataclass(frozen=True)
class Sharded:
    """A program ready to run on one rank.

    Attributes:
        parameters: the sharded parameters by name: what the model shows at rest.
        driver: drives the units without hooks.
    """

    model: Node
    plan: Plan
    parameters: dict[str, nn.Parameter]
    context: fsdp_core.FsdpContext
    driver: Driver
    optimizer: torch.optim.Optimizer
    device: torch.device


def shard_program(program: ProgramSpec, rank: int, device: torch.device) -> Sharded:
    """Build the model, shard its units children first, and make the optimizer.

    Ordering:
        Collective: every rank of the default process group calls it.
    """
    plan = Plan(rank)
    model = build_model(program, plan)
    mesh = init_device_mesh(device.type, program.mesh, mesh_dim_names=axis_names(program))
    with _context(program, model, rank, device) as context:
        for unit in units(program):
            _shard_unit(unit, model, mesh)
    by_hand = [unit.paths for unit in units(program) if not unit.spec.hooks]
    driver = Driver([[model.get_submodule(path) for path in paths] for paths in by_hand])
    parameters = dict(model.named_parameters())
    optimizer = make_optimizer(program.optimizer, parameters.values())
    fsdp_core.fully_shard_optimizer(optimizer)
    return Sharded(model, plan, parameters, context, driver, optimizer, device)


def axis_names(program: ProgramSpec) -> tuple[str, ...]:
    """Return a name for each axis of the mesh."""
    return tuple(f"dp{axis}" for axis in range(len(program.mesh)))


def _context(
    program: ProgramSpec, model: nn.Module, rank: int, device: torch.device
) -> AbstractContextManager[fsdp_core.FsdpContext]:
    """Return the open scope in which units are made."""
    said = program.context
    policy = fsdp_core.RuntimePolicy(
        use_symmetric_memory=said.use_symmetric_memory,
        overlap_allgather_reduction=said.overlap_allgather_reduction,
        overlap_outer_communication=said.overlap_outer_communication,
        caller_managed_grad_sync=said.caller_managed_grad_sync,
    )
    return fsdp_core.fully_shard_context(
        device=device,
        runtime_policy=policy,
        parameter_to_owner=_owners(program, model, rank),
        prefetch_order=fsdp_core.PrefetchOrder[said.prefetch_order.upper()],
    )


def _owners(program: ProgramSpec, model: nn.Module, rank: int) -> dict[nn.Parameter, int] | None:
    """Return this rank's owner map, by the original parameters; None where the program has none."""
    if not program.owners:
        return None
    here = [owner for owner in program.owners if owner.ranks is None or rank in owner.ranks]
    return {model.get_parameter(owner.parameter): owner.owner for owner in here}


def _shard_unit(unit: Unit, model: nn.Module, mesh: DeviceMesh) -> None:
    modules = [model.get_submodule(path) for path in unit.paths]
    if unit.spec.axes is not None:
        assert mesh.mesh_dim_names is not None, "the mesh was made with names"
        mesh = mesh[tuple(mesh.mesh_dim_names[axis] for axis in unit.spec.axes)]
    fsdp_core.fully_shard(
        modules[0] if len(modules) == 1 else modules,
        mesh,
        _placements(unit.spec, mesh.ndim),
        _precision(unit.spec.precision),
        unit.spec.grad_divisor,
        schedule_policy=fsdp_core.SchedulePolicy(
            forward_prefetch_size=unit.spec.forward_prefetch,
            backward_prefetch_size=unit.spec.backward_prefetch,
            register_hooks=unit.spec.hooks,
            grad_accumulation_count=unit.spec.grad_accumulation_count,
            reshard_after_forward=unit.spec.reshard_after_forward,
        ),
    )


def _placements(spec: UnitSpec, axis_count: int) -> fsdp_core.Placements:
    parameter, gradient, optimizer = (
        tuple(_PLACEMENTS[letter] for letter in role) for role in letters(spec.strategy, axis_count)
    )
    return fsdp_core.Placements(tuple(range(axis_count)), parameter, gradient, optimizer)


def _precision(spec: PrecisionSpec | None) -> fsdp_core.MixedPrecisionPolicy | None:
    if spec is None:
        return None
    return fsdp_core.MixedPrecisionPolicy(
        main_params_dtype=_dtype(spec.main_params),
        main_grads_dtype=_dtype(spec.main_grads),
        grad_comm_dtype=_dtype(spec.grad_comm),
        compute_dtype=_dtype(spec.compute),
    )


def _dtype(name: DType | None) -> torch.dtype | None:
    return None if name is None else DTYPES[name]
