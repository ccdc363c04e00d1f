"""Counts: the collectives that a step of each strategy costs; what is done twice or for nothing is reported."""

import math
import warnings
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from ci.search.plants import plants
from fsdp_core.gradients import Gradients
from fsdp_core.unit import ShardedUnit
from fsdp_sim.errors import ParityError
from fsdp_sim.mutation.change import replaced
from fsdp_sim.op import Kind, Op
from fsdp_sim.program import LayerSpec, ModuleSpec, PassSpec, ProgramSpec, StepSpec, UnitSpec
from fsdp_sim.program.parity import verify
from fsdp_sim.program.spec import Strategy
from fsdp_sim.program.tree import parameter_shapes, units, walk
from fsdp_sim.strategies import programs

LEAF = ModuleSpec(LayerSpec(), UnitSpec())
THREE = ModuleSpec(LayerSpec(), UnitSpec(), (LEAF, LEAF))


def collectives(program: ProgramSpec) -> dict[str, int]:
    """Return how often each kind of labelled collective comes on rank 0."""
    counts: dict[str, int] = {}
    for op in verify(program, trace=True).trace.ops:
        if op.rank == 0 and op.kind is Kind.COLLECTIVE and _is_labelled(op):
            counts[op.name] = counts.get(op.name, 0) + 1
    return counts


def _is_labelled(op: Op) -> bool:
    return (op.annotation or "").startswith(("fsdp_core::unshard", "fsdp_core::reduce_gradients"))


@pytest.mark.parametrize(
    ("strategy", "mesh", "expected"),
    [
        ("zero3", (2,), {"all_gather": 12, "reduce_scatter": 6}),
        ("zero2", (2,), {"all_gather": 3, "reduce_scatter": 6}),
        ("zero1", (2,), {"all_gather": 3, "reduce_scatter": 3}),
        ("no_shard", (2,), {"all_reduce": 3}),
        ("hsdp", (2, 2), {"all_gather": 12, "reduce_scatter": 6, "all_reduce": 3}),
        ("hfsdp", (2, 2), {"all_gather": 15, "reduce_scatter": 9}),
    ],
)
def test_a_step_of_two_microbatches_over_three_units_costs(
    strategy: Strategy, mesh: tuple[int, ...], expected: dict[str, int]
) -> None:
    """The second step, behind one optimizer step: gathers of weights and reductions, nothing else."""
    unit = UnitSpec(strategy)
    leaf = ModuleSpec(LayerSpec(), unit)
    model = ModuleSpec(LayerSpec("scale"), unit, (leaf, leaf))
    step = StepSpec((PassSpec(), PassSpec()))
    two = collectives(ProgramSpec(model, mesh, steps=(step, step)))
    one = collectives(ProgramSpec(model, mesh, steps=(step,)))

    assert {name: count - one.get(name, 0) for name, count in two.items()} == expected


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(programs(exceptions=False, steps_max=1, ranks_max=2))
def test_counters_of_generated_programs_add_up(program: ProgramSpec) -> None:
    """No more prefetches end than began; the bytes of full weights are never above their peak."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = verify(replace(program, schedule="", faults=()))

    for run in report.results:
        for step in run.steps:
            stats = step.stats
            assert stats["used_prefetches"] + stats["unused_prefetches"] <= stats["prefetches"]
            assert 0 <= stats["full_nbytes"] <= stats["peak_full_nbytes"]


def reducing_twice() -> AbstractContextManager[None]:
    """Have each unit issue its reductions twice, of nothing the second time."""

    def twice(reduce: Any) -> Any:
        @wraps(reduce)
        def wrong(gradients: Any) -> None:
            reduce(gradients)
            reduce(gradients)

        return wrong

    return replaced(Gradients, "reduce", twice)


def test_a_unit_that_reduces_twice_is_reported() -> None:
    """Zeros change no value, so the count alone tells."""
    with reducing_twice(), pytest.raises(ParityError, match="at most 3 reductions, got 6"):
        verify(ProgramSpec(THREE))


def test_a_gather_that_nobody_uses_is_reported() -> None:
    """Where units run in the order of the tree, each prefetch is for the next one."""

    def twice(prefetch: Any) -> Any:
        @wraps(prefetch)
        def wrong(unit: Any) -> None:
            prefetch(unit)
            unit.come_to_rest()

        return wrong

    with replaced(ShardedUnit, "prefetch", twice), pytest.raises(ParityError) as caught:
        verify(ProgramSpec(THREE))

    assert "step 0, rank 0: must use all that it gathers early, got 4 units" in str(caught.value)


def test_gradients_beside_the_full_weights_are_reported() -> None:
    """Values and order are right; the peak of memory is higher than it must be."""
    plant = plants()["gradients are reduced before weights are freed"]

    with plant(), pytest.raises(ParityError) as caught:
        verify(ProgramSpec(LEAF))

    assert str(caught.value).splitlines()[0] == (
        "ParityError: rank 0, unit '<root>': its full weights must be freed before memory is taken for "
        "its gradients"
    )


def plainly_sharded(program: ProgramSpec) -> ProgramSpec:
    """Return ``program`` on one rank, where nothing is padded: ZeRO-3, one unit ahead, every child called."""

    def plain(module: ModuleSpec) -> ModuleSpec:
        children = tuple(plain(child) for child in module.children)
        unit = UnitSpec() if module.unit else None
        return replace(module, unit=unit, children=children, checkpoint="none")

    steps = tuple(
        replace(step, resume=None, passes=tuple(replace(one, calls=()) for one in step.passes))
        for step in program.steps
    )
    model = plain(program.model)
    return replace(program, model=model, mesh=(1,), ties=(), steps=steps, schedule="", faults=())


def full_nbytes_max(program: ProgramSpec) -> int:
    """Return the bytes of the heaviest chain of nested units, and of the heaviest unit beside it."""
    nodes, sizes = dict(walk(program.model)), dict[str, int]()
    for unit in units(program):
        layers = [nodes[path].layer for path in unit.members]
        sizes[unit.paths[0]] = sum(nbytes(layer, program.width) for layer in layers if layer)
    chains = [sum(size for above, size in sizes.items() if reaches(above, path)) for path in sizes]
    return max(chains) + max(sizes.values())


def nbytes(layer: LayerSpec, width: int) -> int:
    """Return the bytes of a layer's parameters."""
    each = {"float32": 4, "bfloat16": 2, "float16": 2}
    dtypes = {"bias": layer.bias_dtype or layer.dtype}
    return sum(
        math.prod(shape) * each[dtypes.get(name, layer.dtype)]
        for name, shape in parameter_shapes(layer, width).items()
    )


def reaches(above: str, path: str) -> bool:
    """Return whether a module is another one, or lies below it."""
    return above in ("", path) or path.startswith(f"{above}.")


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(programs(exceptions=False, kinds=("zero3",), low_precision=False))
def test_full_weights_of_generated_programs_stay_within_their_bound(program: ProgramSpec) -> None:
    """Those of a unit, of the units around it, and of one unit ahead: never more at once."""
    plain = plainly_sharded(program)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (run,) = verify(plain).results

    peak = run.steps[-1].stats["peak_full_nbytes"]
    assert peak <= full_nbytes_max(plain)


def test_the_bound_of_full_weights_is_met() -> None:
    """A chain of two and the next one: a program that gathers one unit ahead reaches it."""
    leaf = ModuleSpec(LayerSpec(), UnitSpec())
    program = ProgramSpec(ModuleSpec(LayerSpec(), UnitSpec(), (leaf, leaf)), mesh=(1,), width=3)

    (run,) = verify(program).results

    assert run.steps[0].stats["peak_full_nbytes"] == full_nbytes_max(program) == 3 * 36
