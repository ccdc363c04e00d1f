"""Generated programs on simulated ranks: parity bit for bit, and no finding."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from fsdp_sim.program import ProgramSpec
from fsdp_sim.program.parity import verify
from fsdp_sim.program.spec import Strategy
from fsdp_sim.strategies import programs, schedules

PARTS, PROGRAMS_EACH = 14, 10  # from its eleventh example on Hypothesis nearly copies others
FAMILIES: dict[str, Sequence[Strategy] | None] = {
    "fully sharded": ("zero3",),
    "one kind of state sharded": ("zero2", "zero1", "no_shard"),
    "hybrid": ("hsdp", "hfsdp", "zero1_zero2"),
    "any": None,
}


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_generated_programs_train_as_unsharded_and_clean(family: str, part: int) -> None:
    """Values, races, lifetime, capture, matching and rest: every check on every program."""

    @seed(part)
    @settings(
        max_examples=PROGRAMS_EACH,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(programs(kinds=FAMILIES[family]))
    def trains(program: ProgramSpec) -> None:
        verify(program)

    trains()


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_generated_programs_do_not_depend_on_the_order_of_hosts(data: st.DataObject) -> None:
    """The same, under a drawn schedule."""
    program = data.draw(programs(modules_max=4, steps_max=2))

    verify(replace(program, schedule=data.draw(schedules(program.world_size))))
