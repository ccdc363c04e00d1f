"""programs: whole training programs, valid by construction."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from fsdp_sim.program.copies import unit_mesh
from fsdp_sim.program.exactness import is_exact
from fsdp_sim.program.flow import untrained_ends
from fsdp_sim.program.placements import ONE_AXIS, TWO_AXES, strategies
from fsdp_sim.program.spec import (
    ContextSpec,
    ModuleSpec,
    OptimizerSpec,
    OwnerSpec,
    ProgramSpec,
    Strategy,
    TieSpec,
    UnitSpec,
)
from fsdp_sim.program.tree import (
    owning_unit,
    parameter_names,
    parameter_shapes,
    replace_module,
    unit_specs,
    units,
    walk,
)
from fsdp_sim.schedule import Schedule
from fsdp_sim.strategies.arguments import Draw, check_kinds, maybe, number, pick
from fsdp_sim.strategies.fault import fault_plans
from fsdp_sim.strategies.mesh import meshes
from fsdp_sim.strategies.owner import draw_owners
from fsdp_sim.strategies.placement import SIMPLEST_FIRST
from fsdp_sim.strategies.policy import draw_context, draw_optimizer, draw_policy
from fsdp_sim.strategies.schedule import schedules
from fsdp_sim.strategies.step import draw_steps, steps
from fsdp_sim.strategies.tree import draw_tree, module_trees

_BUDGET_MAX = 24
_DEVIATIONS_MAX = 2
_SHUFFLES_MAX = 9


@dataclass(frozen=True)
class _Limits:
    """The arguments of ``programs``."""

    ranks_max: int
    modules_max: int
    depth_max: int
    steps_max: int
    kinds: tuple[Strategy, ...] | None
    recorded: bool
    exceptions: bool
    low_precision: bool
    disturbed: bool


def programs(
    *,
    ranks_max: int = 4,
    modules_max: int = 7,
    depth_max: int = 2,
    steps_max: int = 3,
    kinds: Sequence[Strategy] | None = None,
    recorded: bool = True,
    exceptions: bool = True,
    low_precision: bool = True,
    disturbed: bool = True,
) -> st.SearchStrategy[ProgramSpec]:
    """Draw a whole program that must run clean and equal the unsharded run bit for bit.

    Shrinks to one rank that trains one unit with one 1 x 1 weight for one step.

    Args:
        ranks_max: most ranks; worlds are powers of two, so that averages are exact.
        modules_max: most modules.
        depth_max: most levels of modules below the top.
        steps_max: most optimizer steps.
        kinds: the strategies of units; by default all that the mesh allows.
        recorded: whether RECORDED prefetch may be drawn.
        exceptions: whether passes may raise.
        low_precision: whether bf16 may be drawn.
        disturbed: whether it may run under another schedule or with late ranks, which no correct program
            notices.

    Example:
        >>> @given(programs(kinds=("zero3",)))
        ... def test_it_trains_as_unsharded(program):
        ...     fsdp_sim.program.parity.verify(program)

    Raises:
        ConfigError: a number is out of range, an unknown strategy.
    """
    limits = _Limits(
        ranks_max,
        modules_max,
        depth_max,
        steps_max,
        tuple(kinds) if kinds is not None else None,
        recorded,
        exceptions,
        low_precision,
        disturbed,
    )
    if kinds is not None:
        check_kinds("kinds", kinds, tuple(dict.fromkeys((*ONE_AXIS, *TWO_AXES))))
    module_trees(depth_max=depth_max, modules_max=modules_max)
    steps(ModuleSpec(), 1, steps_max=steps_max)
    return _programs(meshes(ranks_max=ranks_max, axes_min=2 if _hybrid(kinds) else 1), limits)


def _hybrid(kinds: Sequence[Strategy] | None) -> bool:
    """Return whether all the strategies need two axes."""
    return kinds is not None and not any(kind in ONE_AXIS for kind in kinds)


@st.composite
def _programs(
    draw: Draw, mesh_shapes: st.SearchStrategy[tuple[int, ...]], limits: _Limits
) -> ProgramSpec:
    mesh = draw(mesh_shapes)
    context = draw_context(draw, recorded=limits.recorded)
    model = draw_tree(
        draw, limits.depth_max, limits.modules_max, low_precision=limits.low_precision
    )
    bare = ProgramSpec(
        _with_options(draw, model, mesh, context, limits),
        mesh,
        width=number(draw, 1, 4),
        batch=number(draw, 1, 2),
        meta=maybe(draw, 14),
        context=context,
        optimizer=draw_optimizer(draw),
    )
    program = _with_owners(draw, _delayed(draw, _tied(draw, bare)))
    ran = draw_steps(
        draw,
        program.model,
        program.world_size,
        limits.steps_max,
        recorded=context.prefetch_order == "recorded",
        exceptions=limits.exceptions,
    )
    program = _adaptive(draw, _with_trained_ends(replace(program, steps=ran)))
    program = _declared(draw, program)
    program = _resumed(draw, program, limits)
    program = _disturbed(draw, program) if limits.disturbed else program
    return program if is_exact(program) else _in_full_precision(program)


def _with_options(
    draw: Draw, model: ModuleSpec, mesh: tuple[int, ...], context: ContextSpec, limits: _Limits
) -> ModuleSpec:
    """Return ``model`` with a strategy and options for each unit; most programs have one strategy.

    Where all weights stay whole nothing is ever gathered, so ``no_shard`` mostly comes beside another one.

    Units are driven by hand only where the runtime allows it, and where autograd runs as one piece: the
    gradients of a reentrant checkpoint come before those of the backward around it.
    """
    allowed, on_one_axis = _allowed(len(mesh), limits), _allowed(1, limits)
    common = pick(draw, allowed)
    each = maybe(draw, 80 if common == "no_shard" else 20)
    split = len(mesh) > 1 and on_one_axis and maybe(draw, 25)
    in_one_piece = all(module.checkpoint != "reentrant" for _, module in walk(model))
    by_hand = context.prefetch_order != "recorded" and in_one_piece and maybe(draw, 20)

    def options(unit: UnitSpec) -> UnitSpec:
        axes: tuple[int, ...] | None = None
        strategy = pick(draw, allowed) if each else common
        if split and maybe(draw, 50):
            axes, strategy = (number(draw, 0, len(mesh) - 1),), pick(draw, on_one_axis)
        said = draw_policy(draw, strategy, _BUDGET_MAX, low_precision=limits.low_precision)
        return replace(said, axes=axes, group=unit.group, hooks=not (by_hand and maybe(draw, 60)))

    def with_options(module: ModuleSpec) -> ModuleSpec:
        unit = module.unit and options(module.unit)
        return replace(module, unit=unit, children=tuple(map(with_options, module.children)))

    return with_options(model)


def _allowed(axes: int, limits: _Limits) -> tuple[Strategy, ...]:
    """Return the strategies to choose from on a mesh of so many axes, the simplest first."""
    wanted = limits.kinds or ("zero3", *SIMPLEST_FIRST, "tensor_atomic")
    return tuple(kind for kind in wanted if kind in strategies(axes))


def _tied(draw: Draw, program: ProgramSpec) -> ProgramSpec:
    """Return ``program`` with two layers of one unit tied, sometimes; the second becomes as the first.

    Where one of two lies in a reentrant checkpoint, whose gradients come apart, such two are tied mostly.
    """
    owner = owning_unit(program)
    layers = [(path, module.layer) for path, module in walk(program.model) if module.layer]
    pairs = [
        TieSpec(left, right)
        for n, (left, _) in enumerate(layers)
        for right, _ in layers[n + 1 :]
        if owner[left] == owner[right]
    ]
    apart = [
        tie
        for tie in pairs
        if _in_reentrant(program, tie.source) != _in_reentrant(program, tie.module)
    ]
    if not pairs or not maybe(draw, 60 if apart else 25):
        return program
    tie = pick(draw, apart or pairs)
    model = replace_module(program.model, tie.module, layer=dict(layers)[tie.source])
    return replace(program, model=model, ties=(tie,))


def _in_reentrant(program: ProgramSpec, path: str) -> bool:
    """Return whether a module runs in a reentrant checkpoint."""
    return any(
        module.checkpoint == "reentrant" and (path == above or path.startswith(f"{above}."))
        for above, module in walk(program.model)
    )


def _with_owners(draw: Draw, program: ProgramSpec) -> ProgramSpec:
    """Return ``program`` with an owner for each parameter, if some unit keeps whole tensors."""
    specs = unit_specs(program)
    if all(unit.strategy != "tensor_atomic" for unit in specs.values()):
        return program
    owners: list[OwnerSpec] = []
    for name in parameter_names(program):
        ranks = math.prod(unit_mesh(specs[name.rpartition(".")[0]], program.mesh))
        owners += draw_owners(draw, (name,), ranks).owners
    return replace(program, owners=tuple(owners))


def _delayed(draw: Draw, program: ProgramSpec) -> ProgramSpec:
    """Return ``program`` with the gradient of one weight delayed, sometimes.

    The caller must wait for it, and each call of its unit must use it: it is the unit's own, untied. The
    unit has hooks, which tell the runtime of its backward before that gradient comes.
    """
    tied = {path for tie in program.ties for path in (tie.source, tie.module)}
    alone = {u.paths[0] for u in units(program) if len(u.paths) == 1 and u.spec.hooks}
    can = [
        path
        for path, module in walk(program.model)
        if path in alone - tied and module.layer is not None and module.layer.frozen == "none"
    ]
    if not can or not program.context.caller_managed_grad_sync or not maybe(draw, 50):
        return program
    path = pick(draw, can)
    layer = dict(walk(program.model))[path].layer
    assert layer is not None, "only modules with layers were kept"
    linear = replace(layer, kind="linear", rows=1, delayed=True)
    return replace(program, model=replace_module(program.model, path, layer=linear))


def _adaptive(draw: Draw, program: ProgramSpec) -> ProgramSpec:
    """Return ``program`` with Adam, mostly, where a layer is frozen that the optimizer has state of."""
    if not any(step.freeze for step in program.steps[1:]) or not maybe(draw, 75):
        return program
    return replace(program, optimizer=OptimizerSpec("adam", lr=0.5))


def _declared(draw: Draw, program: ProgramSpec) -> ProgramSpec:
    """Return ``program`` with the number of gradients in a window declared by its units, sometimes.

    Every step is then as the first, and every gradient comes in each of its backwards.
    """
    nodes = dict(walk(program.model))
    in_one_piece = all(module.checkpoint != "reentrant" for module in nodes.values())
    if not in_one_piece or not maybe(draw, 15):
        return program
    passes = tuple(replace(one, calls=(), raises=None) for one in program.steps[0].passes)
    step = replace(program.steps[0], passes=passes, freeze=(), unfreeze=())
    trained = [one for one in passes if one.kind == "train"]
    backwards = sum(1 if one.backward == "joint" else one.forwards for one in trained)
    counts = {
        path: backwards * count
        for unit in units(program)
        if (count := _trainable_count(program, unit.members))
        for path in unit.paths
    }
    for path, count in counts.items():
        unit = nodes[path].unit
        assert unit is not None, "a path of a unit has one"
        declared = replace(unit, grad_accumulation_count=count)
        program = replace(program, model=replace_module(program.model, path, unit=declared))
    return replace(program, steps=(step,) * len(program.steps))


def _trainable_count(program: ProgramSpec, members: tuple[str, ...]) -> int:
    """Return how many parameters of a unit require gradients, tied ones once."""
    nodes, tied = dict(walk(program.model)), {tie.module for tie in program.ties}
    layers = [layer for path in members if path not in tied and (layer := nodes[path].layer)]
    return sum(
        layer.frozen == "none" or (layer.frozen == "weight" and name == "bias")
        for layer in layers
        for name in parameter_shapes(layer, program.width)
    )


def _resumed(draw: Draw, program: ProgramSpec, limits: _Limits) -> ProgramSpec:
    """Return ``program`` with a step that goes on from a checkpoint, with any strategy, sometimes.

    No step in which a pass raised comes before it: what the runtime recovers by itself, it does later.
    """
    kinds = [kind for kind in _allowed(len(program.mesh), limits) if kind != "tensor_atomic"]
    whole = all(unit.spec.axes is None for unit in units(program))
    can = [
        number
        for number in range(1, len(program.steps))
        if not any(one.raises for one in program.steps[number - 1].passes)
    ]
    if not (kinds and whole and can) or not maybe(draw, 15):
        return program
    at, made = pick(draw, can), list(program.steps)
    made[at] = replace(made[at], resume=pick(draw, kinds))
    return replace(program, steps=tuple(made))


def _disturbed(draw: Draw, program: ProgramSpec) -> ProgramSpec:
    """Return ``program`` under another schedule, with sets in another order on each rank, or with late ranks.

    Only sometimes; a correct program notices none of it.
    """
    ranks = program.world_size
    if maybe(draw, 30):
        line = draw(schedules(ranks, deviations_max=_DEVIATIONS_MAX))
        program = replace(program, schedule=line if ">" in line else "")
    if maybe(draw, 15):
        at = Schedule.parse(program.schedule or f"v1;w{ranks}")
        shuffle = f"shuffle{number(draw, 1, _SHUFFLES_MAX)}"
        program = replace(program, schedule=str(replace(at, knobs=(shuffle,))))
    if maybe(draw, 12):
        program = replace(program, faults=draw(fault_plans(ranks)).faults)
    return program


def _with_trained_ends(program: ProgramSpec) -> ProgramSpec:
    """Return ``program`` with the default calls in each pass that must train and does not."""
    recorded = program.context.prefetch_order == "recorded"
    ends = set(untrained_ends(program))
    steps_made = tuple(
        replace(
            step,
            passes=tuple(
                replace(one, calls=()) if one.kind == "train" and (at in ends or recorded) else one
                for position, one in enumerate(step.passes)
                for at in ((number, position),)
            ),
        )
        for number, step in enumerate(program.steps)
    )
    return replace(program, steps=steps_made) if ends else program


def _in_full_precision(program: ProgramSpec) -> ProgramSpec:
    """Return ``program`` in fp32 throughout, where all its sums are exact."""

    def full(module: ModuleSpec) -> ModuleSpec:
        layer, unit = module.layer, module.unit
        return replace(
            module,
            layer=layer and replace(layer, dtype="float32", bias_dtype=None),
            unit=unit and replace(unit, precision=None),
            children=tuple(full(child) for child in module.children),
        )

    exact = replace(program, model=full(program.model))
    assert is_exact(exact), "fp32 holds the sums of small programs"
    return exact
