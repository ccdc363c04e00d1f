"""programs: whole training programs, valid by construction."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from fsdp_sim.program.exactness import is_exact
from fsdp_sim.program.flow import untrained_ends
from fsdp_sim.program.placements import ONE_AXIS, TWO_AXES, strategies
from fsdp_sim.program.spec import ModuleSpec, ProgramSpec, Strategy, TieSpec
from fsdp_sim.program.tree import owning_unit, parameter_names, replace_module, walk
from fsdp_sim.strategies.arguments import Draw, check_kinds, maybe, number, pick
from fsdp_sim.strategies.mesh import meshes
from fsdp_sim.strategies.owner import draw_owners
from fsdp_sim.strategies.placement import SIMPLEST_FIRST
from fsdp_sim.strategies.policy import draw_context, draw_optimizer, draw_policy
from fsdp_sim.strategies.step import draw_steps, steps
from fsdp_sim.strategies.tree import draw_tree, module_trees

_BUDGET_MAX = 24


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

    Example:
        >>> @given(programs(kinds=("zero3",)))
        ... def test_it_trains_as_unsharded(program):
        ...     fsdp_sim.reference.verify(program)

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
        _with_options(draw, model, len(mesh), limits),
        mesh,
        width=number(draw, 1, 4),
        batch=number(draw, 1, 2),
        context=context,
        optimizer=draw_optimizer(draw),
    )
    program = _with_owners(draw, _tied(draw, bare))
    ran = draw_steps(
        draw,
        program.model,
        program.world_size,
        limits.steps_max,
        recorded=context.prefetch_order == "recorded",
        exceptions=limits.exceptions,
    )
    program = _with_trained_ends(replace(program, steps=ran))
    return program if is_exact(program) else _in_full_precision(program)


def _with_options(draw: Draw, model: ModuleSpec, axes: int, limits: _Limits) -> ModuleSpec:
    """Return ``model`` with a strategy and options for each unit; most programs have one strategy."""
    allowed = _allowed(axes, limits)
    common, each = pick(draw, allowed), maybe(draw, 20)

    def options(module: ModuleSpec) -> ModuleSpec:
        unit = module.unit
        if unit is not None:
            strategy = pick(draw, allowed) if each else common
            said = draw_policy(draw, strategy, _BUDGET_MAX, low_precision=limits.low_precision)
            unit = replace(said, group=unit.group)
        return replace(module, unit=unit, children=tuple(options(c) for c in module.children))

    return options(model)


def _allowed(axes: int, limits: _Limits) -> tuple[Strategy, ...]:
    """Return the strategies to choose from on a mesh of so many axes, the simplest first."""
    wanted = limits.kinds or (*SIMPLEST_FIRST, "tensor_atomic")
    return tuple(kind for kind in wanted if kind in strategies(axes))


def _tied(draw: Draw, program: ProgramSpec) -> ProgramSpec:
    """Return ``program`` with two layers of one unit tied, sometimes; the second becomes as the first."""
    owner = owning_unit(program)
    layers = [(path, module.layer) for path, module in walk(program.model) if module.layer]
    pairs = [
        TieSpec(left, right)
        for n, (left, _) in enumerate(layers)
        for right, _ in layers[n + 1 :]
        if owner[left] == owner[right]
    ]
    if not pairs or not maybe(draw, 25):
        return program
    tie = pick(draw, pairs)
    model = replace_module(program.model, tie.module, layer=dict(layers)[tie.source])
    return replace(program, model=model, ties=(tie,))


def _with_owners(draw: Draw, program: ProgramSpec) -> ProgramSpec:
    """Return ``program`` with an owner for each parameter, if some unit keeps whole tensors."""
    modules = [module.unit.strategy for _, module in walk(program.model) if module.unit]
    if "tensor_atomic" not in modules:
        return program
    drawn = draw_owners(draw, parameter_names(program), program.world_size)
    return replace(program, owners=drawn.owners)


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
