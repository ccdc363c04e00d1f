"""Budgets: what a unit gathers early is what its budgets allow, in each direction."""

import pytest

from ci.search.plants import plants
from fsdp_sim.errors import ParityError
from fsdp_sim.program import LayerSpec, ModuleSpec, ProgramSpec, UnitSpec
from fsdp_sim.program.budget import gathered_beyond_budgets, shows_budgets
from fsdp_sim.program.parity import verify
from fsdp_sim.program.spec import Checkpoint

LEAF = ModuleSpec(LayerSpec(), UnitSpec())


def rooted(unit: UnitSpec, checkpoint: Checkpoint = "none") -> ProgramSpec:
    """Return a root with these options above three units of 4 elements, the first of them checkpointed or not."""
    first = ModuleSpec(LayerSpec(), UnitSpec(), checkpoint=checkpoint)
    return ProgramSpec(ModuleSpec(LayerSpec(), unit, (first, LEAF, LEAF)))


@pytest.mark.parametrize(
    ("unit", "place"),
    [
        (UnitSpec(forward_prefetch=0), "rank 0, forward of '<root>'"),
        (UnitSpec(backward_prefetch=0), "rank 0, backward of '<root>'"),
    ],
)
def test_a_gather_beyond_the_budget_is_reported(unit: UnitSpec, place: str) -> None:
    """Values and order are right; memory is not what was asked for."""
    with plants()["a budget of 0 is no limit"](), pytest.raises(ParityError) as caught:
        verify(rooted(unit))

    assert f"{place}: must gather no more early than its budget" in str(caught.value)


def test_a_gather_while_recomputing_is_reported() -> None:
    """What follows in the forward runs in another pass."""
    with plants()["prefetch during recomputation"](), pytest.raises(ParityError) as caught:
        verify(rooted(UnitSpec(), "non_reentrant"))

    assert "rank 0, recompute of '0': must gather no more early than its budget" in str(
        caught.value
    )


@pytest.mark.parametrize("budget", [1, 4, 5, 8, 9])
def test_the_last_unit_may_overshoot(budget: int) -> None:
    """A budget of 5 gathers two units of 4 elements, which is no more than it allows."""
    program = rooted(UnitSpec(forward_prefetch=budget))

    assert gathered_beyond_budgets(program, verify(program).trace.ops) == []


@pytest.mark.parametrize(("said", "ran"), [(None, 5), (4, 5), (8, 9), (0, 1)])
def test_one_unit_more_than_the_budget_allows_is_reported(said: int | None, ran: int) -> None:
    """The ops of a program with a larger budget, judged by the smaller one."""
    ops = verify(rooted(UnitSpec(forward_prefetch=ran))).trace.ops

    assert gathered_beyond_budgets(rooted(UnitSpec(forward_prefetch=said)), ops) == [
        "rank 0, forward of '<root>'",
        "rank 1, forward of '<root>'",
    ]


def test_who_asked_is_not_known_of_units_driven_by_hand_nor_below_several_roots() -> None:
    """Such programs are not judged."""
    by_hand = ModuleSpec(LayerSpec(), UnitSpec(hooks=False))

    assert shows_budgets(rooted(UnitSpec()))
    assert not shows_budgets(ProgramSpec(ModuleSpec(LayerSpec(), UnitSpec(), (by_hand,))))
    assert not shows_budgets(ProgramSpec(ModuleSpec(children=(LEAF, LEAF))))
