"""What a program must hold before it is built: its paths, numbers and ranks mean something; pure."""

import math
from collections.abc import Iterable

from fsdp_sim.errors import ConfigError
from fsdp_sim.program.copies import unit_axes
from fsdp_sim.program.flow import untrained_ends
from fsdp_sim.program.placements import strategies
from fsdp_sim.program.spec import (
    LayerSpec,
    ModuleSpec,
    PassSpec,
    ProgramSpec,
    StepSpec,
    Strategy,
    UnitSpec,
)
from fsdp_sim.program.tree import owning_unit, units, walk

RANKS_MAX = 1024
MODULES_MAX = 512
ELEMENTS_MAX = 64
STEPS_MAX = 256


class SpecError(ConfigError):
    """A program that says something impossible.

    Attributes:
        where: the field that says it, such as ``steps[0].passes[1].calls[0].order``.
    """

    def __init__(self, where: str, message: str) -> None:
        super().__init__(f"{where}: {message}")
        self.where = where


def check_program(program: ProgramSpec) -> None:
    """Raise unless the program can be built as it stands.

    What a runtime must refuse (a tied weight over two units, a divisor of 0) passes: refusing it is the
    runtime's business.

    Raises:
        SpecError: the first thing that does not hold, by its field.
    """
    _check_sizes(program)
    nodes = dict(walk(program.model))
    _within("model", len(nodes), 1, MODULES_MAX, "modules")
    for path, module in nodes.items():
        _check_module(f"model at {path!r}", module, program)
    _check_layers_owned(program, nodes)
    _check_ties(program, nodes)
    _check_owners(program)
    _within("steps", len(program.steps), 0, STEPS_MAX, "steps")
    if program.steps and program.steps[0].resume is not None:
        raise SpecError(
            "steps[0].resume", "must be null: there is no checkpoint before the first step"
        )
    for number, step in enumerate(program.steps):
        _check_step(f"steps[{number}]", step, program, nodes)
    for number, position in untrained_ends(program):
        advice = "it ends the window of the passes before it; give it other calls, or none"
        raise SpecError(
            f"steps[{number}].passes[{position}]", f"must train something on every rank; {advice}"
        )


def _check_sizes(program: ProgramSpec) -> None:
    _within("mesh", len(program.mesh), 1, 3, "axes")
    for axis, size in enumerate(program.mesh):
        _within(f"mesh[{axis}]", size, 1, RANKS_MAX, "ranks")
    _within("mesh", program.world_size, 1, RANKS_MAX, "ranks")
    _within("width", program.width, 1, ELEMENTS_MAX, "elements")
    _within("batch", program.batch, 1, ELEMENTS_MAX, "rows")
    for name in ("lr", "momentum", "weight_decay"):
        value = getattr(program.optimizer, name)
        if not math.isfinite(value) or value < 0:
            raise SpecError(f"optimizer.{name}", f"must be finite and not negative, got {value}")


def _check_module(where: str, module: ModuleSpec, program: ProgramSpec) -> None:
    if module.layer is not None:
        _check_layer(f"{where}, layer", module.layer)
    if module.unit is not None:
        _check_unit(f"{where}, unit", module.unit, program)


def _check_unit(where: str, unit: UnitSpec, program: ProgramSpec) -> None:
    axes = unit_axes(unit, program.mesh)
    _indices(f"{where}.axes", axes, len(program.mesh))
    if not axes or list(axes) != sorted(set(axes)):
        raise SpecError(
            f"{where}.axes", f"must be one axis at least, in rising order, got {list(axes)}"
        )
    known = strategies(len(axes))
    if unit.strategy not in known:
        got = f"got {unit.strategy} on a mesh of {len(axes)} axes"
        raise SpecError(f"{where}.strategy", f"must be one of {', '.join(known)}; {got}")


def _check_layer(where: str, layer: LayerSpec) -> None:
    rows_min = 1 if layer.kind == "embed" else 0
    _within(f"{where}.rows", layer.rows, rows_min, ELEMENTS_MAX, "rows")
    if layer.delayed and layer.kind != "linear":
        raise SpecError(f"{where}.delayed", f"must be said of a linear alone, got {layer.kind}")


def _check_layers_owned(program: ProgramSpec, nodes: dict[str, ModuleSpec]) -> None:
    """Raise for a layer outside every unit: its gradients would not be reduced."""
    owner = owning_unit(program)
    for path, module in nodes.items():
        if module.layer is not None and owner[path] is None:
            raise SpecError(
                f"model at {path!r}", "a layer must be in a unit; set unit on it or above"
            )
    for unit in units(program):
        for path in unit.paths:
            if any(other != path and _above(other, path) for other in unit.paths):
                raise SpecError(f"model at {path!r}", "modules of one unit must not be nested")


def _check_ties(program: ProgramSpec, nodes: dict[str, ModuleSpec]) -> None:
    targets = [tie.module for tie in program.ties]
    for number, tie in enumerate(program.ties):
        where = f"ties[{number}]"
        source = _layer_at(f"{where}.source", tie.source, nodes)
        module = _layer_at(f"{where}.module", tie.module, nodes)
        if source != module:
            raise SpecError(where, f"tied layers must be equal, got {source} and {module}")
        if targets.count(tie.module) > 1 or tie.source in targets:
            raise SpecError(where, f"a layer is tied once and to one that is not, got {tie}")


def _layer_at(where: str, path: str, nodes: dict[str, ModuleSpec]) -> LayerSpec:
    _known(where, path, nodes)
    layer = nodes[path].layer
    if layer is None:
        raise SpecError(where, f"must name a module with a layer, got {path!r}")
    return layer


def _check_owners(program: ProgramSpec) -> None:
    for number, owner in enumerate(program.owners):
        _check_ranks(f"owners[{number}].ranks", owner.ranks, program)


def _check_step(
    where: str, step: StepSpec, program: ProgramSpec, nodes: dict[str, ModuleSpec]
) -> None:
    for name in ("freeze", "unfreeze"):
        for path in getattr(step, name):
            _layer_at(f"{where}.{name}", path, nodes)
    if step.resume is not None:
        _check_resume(f"{where}.resume", step.resume, program)
    if step.export:
        _check_on_whole_mesh(f"{where}.export", program)
    for number, one in enumerate(step.passes):
        _check_pass(f"{where}.passes[{number}]", one, program, nodes)


def _check_resume(where: str, strategy: Strategy, program: ProgramSpec) -> None:
    """Raise unless every unit can have the strategy, and a checkpoint can hold all of its weights."""
    known = [each for each in strategies(len(program.mesh)) if each != "tensor_atomic"]
    if strategy not in known:
        got = f"got {strategy} on a mesh of {len(program.mesh)} axes"
        raise SpecError(where, f"must be one of {', '.join(known)}; {got}")
    _check_on_whole_mesh(where, program)


def _check_on_whole_mesh(where: str, program: ProgramSpec) -> None:
    """Raise unless each weight has one value on all ranks."""
    split = [unit.paths[0] for unit in units(program) if unit.spec.axes is not None]
    if split:
        advice = "a checkpoint has one weight of each name"
        raise SpecError(
            where, f"all units must be on the whole mesh, got axes of {split[0]!r}; {advice}"
        )


def _check_pass(
    where: str, one: PassSpec, program: ProgramSpec, nodes: dict[str, ModuleSpec]
) -> None:
    _within(f"{where}.forwards", one.forwards, 1, STEPS_MAX, "forwards")
    if one.side_stream and one.forwards == 1:
        raise SpecError(
            f"{where}.side_stream", "must be false where there is one forward; it runs on the first"
        )
    said: set[tuple[str, int]] = set()
    for number, calls in enumerate(one.calls):
        place = f"{where}.calls[{number}]"
        _known(f"{place}.path", calls.path, nodes)
        _indices(f"{place}.order", calls.order, len(nodes[calls.path].children))
        _indices(f"{place}.dropped", calls.dropped, len(calls.order))
        _check_ranks(f"{place}.ranks", calls.ranks, program)
        for rank in range(program.world_size) if calls.ranks is None else calls.ranks:
            if (calls.path, rank) in said:
                raise SpecError(place, f"rank {rank} has its calls of {calls.path!r} already")
            said.add((calls.path, rank))
    if one.raises is not None:
        _known(f"{where}.raises.path", one.raises.path, nodes)
        _check_ranks(f"{where}.raises.ranks", one.raises.ranks, program)


def _check_ranks(where: str, ranks: tuple[int, ...] | None, program: ProgramSpec) -> None:
    if ranks is not None:
        _indices(where, ranks, program.world_size)


def _indices(where: str, numbers: Iterable[int], count: int) -> None:
    for number in numbers:
        if not 0 <= number < count:
            raise SpecError(where, f"must be in 0..{count - 1}, got {number}")


def _known(where: str, path: str, nodes: dict[str, ModuleSpec]) -> None:
    if path not in nodes:
        raise SpecError(where, f"must be the path of a module, got {path!r}; see the model's tree")


def _within(where: str, value: int, low: int, high: int, what: str) -> None:
    if not low <= value <= high:
        raise SpecError(where, f"must be {low} to {high} {what}, got {value}")


def _above(ancestor: str, path: str) -> bool:
    return ancestor == "" or path.startswith(f"{ancestor}.")
