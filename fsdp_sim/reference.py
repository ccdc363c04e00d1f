"""The oracle: the same program unsharded in one process.

Each rank's batches are run in turn on the whole model, in rank order; the ranks' gradients are added in
that order and divided by the number of ranks and the unit's divisor; then the optimizer steps once.

Note [absent gradients]
    A unit takes part in a step if backward entered it on some rank: a gradient came to what one of its
    modules returned. Then every trainable parameter of it has a gradient on all ranks, zeros where nobody
    used it; else none has. This is what a runtime that reduces whole units must do, so that ranks agree
    without asking each other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_sim.program.check import check_program
from fsdp_sim.program.model import DTYPES, Node, Plan, PlannedError, build_model, unwrap
from fsdp_sim.program.optimizer import make_optimizer
from fsdp_sim.program.passes import run_pass, set_frozen
from fsdp_sim.program.results import FullRun, FullStep, Losses, Tensors, floats
from fsdp_sim.program.spec import PrecisionSpec, ProgramSpec
from fsdp_sim.program.tree import Unit, units

_CPU = torch.device("cpu")


@dataclass
class _Unsharded:
    """The unsharded program while it runs.

    Attributes:
        entered: paths of modules of units that backward has entered in this step.
    """

    program: ProgramSpec
    model: Node
    optimizer: torch.optim.Optimizer
    units: tuple[Unit, ...]
    entered: set[str]


@dataclass(frozen=True)
class _RankStep:
    """What one rank's batches gave in a step."""

    losses: tuple[Losses, ...]
    gradients: Tensors
    failed: bool


def run_reference(program: ProgramSpec) -> FullRun:
    """Return what ``program`` computes without sharding.

    Raises:
        SpecError: the program cannot be built.
    """
    check_program(program)
    model = build_model(program, Plan())
    parts = units(program)
    for unit in parts:
        _hold_main_weights(model, unit)
    optimizer = make_optimizer(program.optimizer, model.parameters())
    unsharded = _Unsharded(program, model, optimizer, parts, set())
    for unit in parts:
        for path in unit.paths:
            model.get_submodule(path).register_forward_hook(_watch(path, unsharded.entered))
    return FullRun(tuple(_run_step(unsharded, number) for number in range(len(program.steps))))


def _watch(path: str, entered: set[str]) -> Callable[[nn.Module, tuple[Tensor], Any], None]:
    """Return a forward hook that notes when a gradient comes to what the module returned."""

    def hook(_module: nn.Module, inputs: tuple[Tensor], output: Any) -> None:
        y = unwrap(output)
        if y.requires_grad and y is not inputs[0]:
            y.register_hook(lambda _grad: entered.add(path))

    return hook


def _hold_main_weights(model: Node, unit: Unit) -> None:
    """Keep the unit's parameters in the dtype of its main weights, and compute in its compute dtype."""
    precision = unit.spec.precision or PrecisionSpec()
    for path in unit.members:
        node = model.get_submodule(path)
        assert isinstance(node, Node), "a program's modules are nodes"
        for name, parameter in node.named_parameters(recurse=False):
            own = node.cast_to.setdefault(name, parameter.dtype)
            node.cast_to[name] = own if precision.compute is None else DTYPES[precision.compute]
            main = own if precision.main_params is None else DTYPES[precision.main_params]
            parameter.data = parameter.data.to(main)


def _run_step(unsharded: _Unsharded, number: int) -> FullStep:
    """Run every rank's passes in turn, then the optimizer on the averages, and ``zero_grad``."""
    program, model, optimizer = unsharded.program, unsharded.model, unsharded.optimizer
    step = program.steps[number]
    set_frozen(model, step)
    unsharded.entered.clear()
    before = {name: parameter.grad for name, parameter in model.named_parameters()}
    ranks = [_run_rank(unsharded, number, rank) for rank in range(program.world_size)]
    failed = any(rank.failed for rank in ranks)
    if failed:
        optimizer.zero_grad(set_to_none=True)
    else:
        _set_averages(unsharded, [rank.gradients for rank in ranks], before)
    gradients = _copies(model, of_gradients=True)
    if step.optimize and not failed:
        optimizer.step()
    parameters = _copies(model, of_gradients=False)
    optimizer.zero_grad(set_to_none=step.set_to_none)
    return FullStep(tuple(floats(rank.losses) for rank in ranks), gradients, parameters)


def _run_rank(unsharded: _Unsharded, number: int, rank: int) -> _RankStep:
    """Return the losses and gradients of one rank's passes of one step."""
    model = unsharded.model
    model.plan.rank = rank
    model.zero_grad(set_to_none=True)
    losses: list[Losses] = []
    for position in range(len(unsharded.program.steps[number].passes)):
        try:
            losses.append(run_pass(unsharded.program, model, (number, position), _CPU))
        except PlannedError:
            return _RankStep((*losses, ()), {}, failed=True)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return _RankStep(tuple(losses), gradients, failed=False)


def _set_averages(unsharded: _Unsharded, ranks: Sequence[Tensors], before: Tensors) -> None:
    """Give every parameter the average of the ranks' gradients. See Note [absent gradients]."""
    parameters = dict(unsharded.model.named_parameters())
    for unit in unsharded.units:
        names = [name for name in parameters if name.rpartition(".")[0] in unit.members]
        used = any(path in unsharded.entered for path in unit.paths)
        for name in names:
            parameter = parameters[name]
            given = [rank[name] for rank in ranks]
            divisor = unsharded.program.world_size * unit.spec.grad_divisor
            if used and parameter.requires_grad:
                parameter.grad = _average(parameter, given, divisor)
            else:
                parameter.grad = before[name]


def _average(parameter: Tensor, given: Sequence[Tensor | None], divisor: int) -> Tensor:
    total = torch.zeros_like(parameter, dtype=torch.float32)
    for gradient in given:
        if gradient is not None:
            total += gradient
    return (total / divisor).to(parameter.dtype)


def _copies(model: Node, *, of_gradients: bool) -> Tensors:
    held = {n: p.grad if of_gradients else p.detach() for n, p in model.named_parameters()}
    return {name: None if tensor is None else tensor.clone() for name, tensor in held.items()}
