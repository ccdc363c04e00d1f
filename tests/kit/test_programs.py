"""Generated programs on simulated ranks: parity bit for bit, and no finding."""

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings

from fsdp_sim.program import ProgramSpec
from fsdp_sim.program.parity import verify
from fsdp_sim.program.spec import Strategy
from fsdp_sim.strategies import programs

PROGRAMS_EACH = 150
FAMILIES: dict[str, Sequence[Strategy] | None] = {
    "fully sharded": ("zero3",),
    "one kind of state sharded": ("zero2", "zero1", "no_shard"),
    "hybrid": ("hsdp", "hfsdp", "zero1_zero2"),
    "any": None,
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_generated_programs_train_as_unsharded_and_clean(family: str) -> None:
    """Values, races, lifetime, capture, matching and rest: every check on every program."""

    @settings(
        max_examples=PROGRAMS_EACH,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(programs(kinds=FAMILIES[family]))
    def trains(program: ProgramSpec) -> None:
        verify(program)

    trains()
