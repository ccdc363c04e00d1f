"""programs: whole training programs, valid by construction."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from fsdp_sim.program.exactness import is_exact
from fsdp_sim.program.spec import (
    ModuleSpec,
    OwnerSpec,
    ProgramSpec,
    Strategy,
    TieSpec,
)
from fsdp_sim.program.tree import owning_unit, parameter_names, replace_module, walk
from fsdp_sim.strategies.arguments import chance
from fsdp_sim.strategies.mesh import meshes
from fsdp_sim.strategies.owner import owner_maps
from fsdp_sim.strategies.placement import placements
from fsdp_sim.strategies.policy import contexts, optimizers, policies
from fsdp_sim.strategies.step import steps
from fsdp_sim.strategies.tree import module_trees


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
    meshes(ranks_max=ranks_max)
    module_trees(depth_max=depth_max, modules_max=modules_max)
    steps(ModuleSpec(), 1, steps_max=steps_max)
    return _programs(limits)


@st.composite
def _programs(draw: Any, limits: _Limits) -> ProgramSpec:
    kinds = limits.kinds
    hybrid = kinds is not None and all(kind in ("hsdp", "hfsdp", "zero1_zero2") for kind in kinds)
    mesh = draw(meshes(ranks_max=limits.ranks_max).filter(lambda m: len(m) > 1 or not hybrid))
    context = draw(contexts(recorded=limits.recorded))
    model = draw(
        module_trees(
            depth_max=limits.depth_max,
            modules_max=limits.modules_max,
            low_precision=limits.low_precision,
        )
    )
    model = _with_options(draw, model, mesh, limits)
    bare = ProgramSpec(
        model,
        mesh,
        width=draw(st.integers(1, 4)),
        batch=draw(st.integers(1, 2)),
        context=context,
        optimizer=draw(optimizers()),
    )
    tied = _tied(draw, bare)
    world = bare.world_size
    ran = steps(
        tied.model, world, context, steps_max=limits.steps_max, exceptions=limits.exceptions
    )
    program = replace(tied, owners=_owners(draw, tied), steps=draw(ran))
    return program if is_exact(program) else _in_full_precision(program)


def _with_options(
    draw: Any, model: ModuleSpec, mesh: tuple[int, ...], limits: _Limits
) -> ModuleSpec:
    """Return ``model`` with a strategy and options for each unit; most programs have one strategy."""
    kinds = limits.kinds
    if kinds is not None and len(mesh) > 1:
        kinds = tuple(kind for kind in kinds if kind != "tensor_atomic")
    if kinds is not None and len(mesh) == 1:
        kinds = tuple(kind for kind in kinds if kind not in ("hsdp", "hfsdp", "zero1_zero2"))
    if kinds is None and len(mesh) == 1 and draw(chance(14)):
        kinds = ("tensor_atomic",)
    drawn = placements(mesh, kinds=kinds)
    common = draw(drawn)
    each = draw(chance(20))

    def options(module: ModuleSpec) -> ModuleSpec:
        unit = module.unit
        if unit is not None:
            strategy = draw(drawn) if each else common
            said = draw(policies(strategy, low_precision=limits.low_precision))
            unit = replace(said, group=unit.group)
        return replace(module, unit=unit, children=tuple(options(c) for c in module.children))

    return options(model)


def _tied(draw: Any, program: ProgramSpec) -> ProgramSpec:
    """Return ``program`` with two layers of one unit tied, sometimes; the second becomes as the first."""
    owner = owning_unit(program)
    layers = [(path, module.layer) for path, module in walk(program.model) if module.layer]
    pairs = [
        TieSpec(left, right)
        for n, (left, _) in enumerate(layers)
        for right, _ in layers[n + 1 :]
        if owner[left] == owner[right]
    ]
    if not pairs or not draw(chance(25)):
        return program
    tie = draw(st.sampled_from(pairs))
    model = replace_module(program.model, tie.module, layer=dict(layers)[tie.source])
    return replace(program, model=model, ties=(tie,))


def _owners(draw: Any, program: ProgramSpec) -> tuple[OwnerSpec, ...]:
    """Draw an owner map for the parameters of units that keep whole tensors."""
    modules = [module.unit.strategy for _, module in walk(program.model) if module.unit]
    if "tensor_atomic" not in modules:
        return ()
    owners: tuple[OwnerSpec, ...] = draw(
        owner_maps(parameter_names(program), program.world_size)
    ).owners
    return owners


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
