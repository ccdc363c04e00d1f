"""Counts: the collectives that a step of each strategy costs; what is done twice or for nothing is reported."""

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
