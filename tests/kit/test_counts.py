"""Counts: the collectives that a step of each strategy costs; prefetches and bytes add up."""

import warnings
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from fsdp_sim.op import Kind, Op
from fsdp_sim.program import LayerSpec, ModuleSpec, PassSpec, ProgramSpec, StepSpec, UnitSpec
from fsdp_sim.program.parity import verify
from fsdp_sim.program.spec import Strategy
from fsdp_sim.strategies import programs

LEAF = ModuleSpec(LayerSpec(), UnitSpec())


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
