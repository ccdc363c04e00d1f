"""The oracle: the same program unsharded in one process.

Each rank's batches are run in turn on the whole model, in rank order; the ranks' gradients are added in
that order and divided by the number of ranks and the unit's divisor; then the optimizer steps once. Where
units have copies of their own on some axes of the mesh, ranks with other copies have models of their own.

Note [absent gradients]
    A unit takes part in a step if backward entered it on some rank: a gradient came to what one of its
    modules returned. Then every trainable parameter of it has a gradient on all ranks, zeros where nobody
    used it; else none has. This is what a runtime that reduces whole units must do, so that ranks agree
    without asking each other. Nobody sees backward enter a unit without hooks: it takes part if some
    parameter of it got a gradient on some rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_sim.program.check import check_program
from fsdp_sim.program.copies import Copy, copies, copy_of, name_in_copy
from fsdp_sim.program.model import DTYPES, Node, Plan, PlannedError, build_model, unwrap
from fsdp_sim.program.optimizer import make_optimizer
from fsdp_sim.program.passes import run_pass, set_frozen
from fsdp_sim.program.results import FullRun, FullStep, Losses, Tensors, floats
from fsdp_sim.program.spec import PrecisionSpec, ProgramSpec
from fsdp_sim.program.tree import Unit, parameter_dtype, unit_specs, units, walk

_CPU = torch.device("cpu")


@dataclass
class _Whole:
    """The unsharded model of some ranks.

    Attributes:
        ranks: whose copies of all units it holds.
        entered: paths of modules of units that backward has entered in the batches that run now.
    """

    ranks: list[int]
    model: Node
    optimizer: torch.optim.Optimizer
    entered: dict[str, None] = field(default_factory=dict)


@dataclass(frozen=True)
class _RankStep:
    """What one rank's batches gave in a step.

    Attributes:
        entered: paths of modules of units that backward entered.
    """

    losses: tuple[Losses, ...]
    gradients: Tensors
    entered: tuple[str, ...]
    failed: bool


def run_reference(program: ProgramSpec) -> FullRun:
    """Return what ``program`` computes without sharding.

    Raises:
        SpecError: the program cannot be built.
    """
    check_program(program)
    wholes = [_make_whole(program, ranks) for ranks in _alike(program)]
    return FullRun(tuple(_run_step(program, wholes, n) for n in range(len(program.steps))))


def _alike(program: ProgramSpec) -> list[list[int]]:
    """Return the ranks grouped by the copies of units that they hold."""
    groups: dict[tuple[Copy, ...], list[int]] = {}
    for rank in range(program.world_size):
        held = tuple(copy_of(unit.spec, program.mesh, rank) for unit in units(program))
        groups.setdefault(held, []).append(rank)
    return list(groups.values())


def _make_whole(program: ProgramSpec, ranks: list[int]) -> _Whole:
    model = build_model(replace(program, meta=False), Plan(ranks[0]))
    own = {name: each.dtype for name, each in model.named_parameters(remove_duplicate=False)}
    for unit in units(program):
        _hold_main_weights(model, unit, own)
    whole = _Whole(ranks, model, make_optimizer(program.optimizer, model.parameters()))
    for unit in units(program):
        for path in unit.paths:
            model.get_submodule(path).register_forward_hook(_watch(path, whole.entered))
    return whole


def _watch(path: str, entered: dict[str, None]) -> Callable[[nn.Module, tuple[Tensor], Any], None]:
    """Return a forward hook that notes when a gradient comes to what the module returned."""

    def hook(_module: nn.Module, inputs: tuple[Tensor], output: Any) -> None:
        y = unwrap(output)
        if y.requires_grad and y is not inputs[0]:
            y.register_hook(lambda _grad: entered.__setitem__(path, None))

    return hook


def _hold_main_weights(model: Node, unit: Unit, dtypes: dict[str, torch.dtype]) -> None:
    """Keep the unit's parameters in the dtype of its main weights, and compute in its compute dtype.

    Args:
        model: the whole model.
        unit: one of its units.
        dtypes: those of the parameters as they were made, by each of their names.
    """
    precision = unit.spec.precision or PrecisionSpec()
    for path in unit.members:
        node = model.get_submodule(path)
        assert isinstance(node, Node), "a program's modules are nodes"
        for name, parameter in node.named_parameters(recurse=False):
            own = dtypes[f"{path}.{name}" if path else name]
            node.cast_to[name] = own if precision.compute is None else DTYPES[precision.compute]
            main = own if precision.main_params is None else DTYPES[precision.main_params]
            parameter.data = parameter.data.to(main)


def _run_step(program: ProgramSpec, wholes: Sequence[_Whole], number: int) -> FullStep:
    """Run every rank's passes in turn, then the optimizer on the averages, and ``zero_grad``."""
    step = program.steps[number]
    before = []
    ran: dict[int, _RankStep] = {}
    for whole in wholes:
        set_frozen(whole.model, step)
        if step.resume is not None:
            whole.optimizer.zero_grad(set_to_none=True)  # a checkpoint holds no gradients
        before.append({name: each.grad for name, each in whole.model.named_parameters()})
        ran |= {rank: _run_rank(program, whole, number, rank) for rank in whole.ranks}
    ranks = [ran[rank] for rank in range(program.world_size)]
    failed = any(rank.failed for rank in ranks)
    for whole, held in zip(wholes, before, strict=True):
        if failed:
            whole.optimizer.zero_grad(set_to_none=True)
        else:
            _set_averages(program, whole, ranks, held)
    gradients = _full(program, wholes, of_gradients=True)
    for whole in wholes:
        if step.optimize and not failed:
            whole.optimizer.step()
    parameters = _full(program, wholes, of_gradients=False)
    for whole in wholes:
        whole.optimizer.zero_grad(set_to_none=step.set_to_none)
    whole_state = wholes[0].model.state_dict() if step.export else {}
    exported: list[Tensors] = [{name: each.clone() for name, each in whole_state.items()}]
    exported += [{} for _ in ranks[1:]]
    losses = tuple(floats(rank.losses) for rank in ranks)
    return FullStep(losses, gradients, parameters, tuple(exported))


def _run_rank(program: ProgramSpec, whole: _Whole, number: int, rank: int) -> _RankStep:
    """Return the losses and gradients of one rank's passes of one step."""
    model = whole.model
    model.plan.rank = rank
    model.zero_grad(set_to_none=True)
    whole.entered.clear()
    losses: list[Losses] = []
    for position in range(len(program.steps[number].passes)):
        try:
            losses.append(run_pass(program, model, (number, position), _CPU))
        except PlannedError:
            return _RankStep((*losses, ()), {}, (), failed=True)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return _RankStep(tuple(losses), gradients, tuple(whole.entered), failed=False)


def _set_averages(
    program: ProgramSpec, whole: _Whole, ranks: Sequence[_RankStep], before: Tensors
) -> None:
    """Give every parameter the average of its ranks' gradients. See Note [absent gradients]."""
    parameters = dict(whole.model.named_parameters())
    for unit in units(program):
        names = [name for name in parameters if name.rpartition(".")[0] in unit.members]
        copy = copy_of(unit.spec, program.mesh, whole.ranks[0])
        sharers = [ranks[rank] for rank in copies(unit.spec, program.mesh)[copy]]
        used = _takes_part(unit, names, sharers)
        for name in names:
            parameter = parameters[name]
            given = [rank.gradients[name] for rank in sharers]
            if used and parameter.requires_grad:
                divisor = len(sharers) * unit.spec.grad_divisor
                parameter.grad = _average(parameter, given, divisor)
            else:
                parameter.grad = before[name]


def _takes_part(unit: Unit, names: Sequence[str], ranks: Sequence[_RankStep]) -> bool:
    if unit.spec.hooks:
        return any(path in rank.entered for rank in ranks for path in unit.paths)
    return any(rank.gradients[name] is not None for rank in ranks for name in names)


def _average(parameter: Tensor, given: Sequence[Tensor | None], divisor: int) -> Tensor:
    total = torch.zeros_like(parameter, dtype=torch.float32)
    for gradient in given:
        if gradient is not None:
            total += gradient
    return (total / divisor).to(parameter.dtype)


def _full(program: ProgramSpec, wholes: Sequence[_Whole], *, of_gradients: bool) -> Tensors:
    """Return copies of all gradients or parameters, those of each copy of a unit by its own name.

    Gradients come in the dtype in which a sharded run hands them to the optimizer.
    """
    specs = unit_specs(program)
    of_rank = {rank: dict(w.model.named_parameters()) for w in wholes for rank in w.ranks}
    held: Tensors = {}
    for name in of_rank[0]:
        unit = specs[name.rpartition(".")[0]]
        for copy, ranks in copies(unit, program.mesh).items():
            parameter = of_rank[ranks[0]][name]
            tensor = parameter.grad if of_gradients else parameter.detach()
            if tensor is not None:
                dtype = _gradient_dtype(program, name) if of_gradients else tensor.dtype
                tensor = tensor.to(dtype, copy=True)
            held[name_in_copy(name, copy)] = tensor
    return held


def _gradient_dtype(program: ProgramSpec, name: str) -> torch.dtype:
    """Return what the gradients of a parameter are accumulated in: its own dtype if nothing is said."""
    path, _, own_name = name.rpartition(".")
    layer = dict(walk(program.model))[path].layer
    assert layer is not None, "a parameter belongs to a layer"
    precision = unit_specs(program)[path].precision or PrecisionSpec()
    return DTYPES[precision.main_grads or parameter_dtype(layer, own_name)]
