"""Programs under drawn schedules and faults: what must not be noticed, and what must."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_sim.program import LayerSpec, ModuleSpec, ProgramSpec, StepSpec, UnitSpec
from fsdp_sim.program.parity import verify
from fsdp_sim.strategies import FAULT_ACTIONS, FaultPlan, fault_plans, schedules

LEAF = ModuleSpec(LayerSpec(), UnitSpec())
PROGRAM = ProgramSpec(ModuleSpec(children=(LEAF, LEAF)), steps=(StepSpec(), StepSpec()))


@settings(max_examples=15)
@given(schedules(2, step_max=60))
def test_a_correct_program_is_clean_under_any_schedule(line: str) -> None:
    """The order of hosts changes nothing."""
    verify(replace(PROGRAM, schedule=line))


@settings(max_examples=10)
@given(fault_plans(2))
def test_a_correct_program_does_not_notice_delays(plan: FaultPlan) -> None:
    """Whoever comes late, values and order are the same."""
    verify(replace(PROGRAM, faults=plan.faults))


@settings(max_examples=30)
@given(fault_plans(2, actions=FAULT_ACTIONS, faults_max=1), st.just(PROGRAM))
def test_a_fault_ends_in_nothing_else_than_what_is_attached(
    plan: FaultPlan, program: ProgramSpec
) -> None:
    """A fault that strikes is reported as what it is; it is never a wrong value or a hang."""
    try:
        verify(replace(program, faults=plan.faults))
    except Exception as error:
        names = [one.__name__ for one in type(error).__mro__]
        if not set(plan.errors) & set(names):
            pytest.fail(f"{plan.faults} ended in {type(error).__name__}: {error}")
