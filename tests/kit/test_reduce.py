"""Reducing: a program is made smaller while it fails, and stays one that can be built."""

from hypothesis import given

from fsdp_sim.program import (
    CallsSpec,
    LayerSpec,
    ModuleSpec,
    OptimizerSpec,
    OwnerSpec,
    PassSpec,
    ProgramSpec,
    RaiseSpec,
    StepSpec,
    TieSpec,
    UnitSpec,
)
from fsdp_sim.program.features import features
from fsdp_sim.program.reduce import reduce_program, smaller_programs
from fsdp_sim.strategies import programs

LEAF = ModuleSpec(LayerSpec(), UnitSpec())


def test_all_that_a_failure_does_not_need_is_left_out() -> None:
    """What is looked for is a tie: its unit and its two layers stay."""
    tied = ModuleSpec(
        LayerSpec("rows", rows=4), UnitSpec("zero2"), (ModuleSpec(LayerSpec("rows", rows=4)),)
    )
    program = ProgramSpec(
        ModuleSpec(LayerSpec(), UnitSpec(), (LEAF, tied, LEAF)),
        (2, 2),
        ties=(TieSpec("1", "1.0"),),
        optimizer=OptimizerSpec("adam"),
        steps=(StepSpec(), StepSpec((PassSpec(), PassSpec("no_grad")))),
    )

    small = reduce_program(program, lambda each: "tied" in features(each))

    assert len(small.model.children) == 1
    assert small.model.children[0].unit is None or small.model.layer is None
    assert small.steps == ()
    assert small.optimizer == OptimizerSpec()
    assert len(small.ties) == 1


def test_what_speaks_of_a_module_goes_with_it_and_its_siblings_move_up() -> None:
    """Paths, calls, ties, owners and exceptions follow."""
    calls = (CallsSpec("", (0, 2, 1, 2), dropped=(1, 2)), CallsSpec("2", ()))
    program = ProgramSpec(
        ModuleSpec(children=(LEAF, LEAF, LEAF)),
        ties=(TieSpec("0", "2"),),
        owners=(OwnerSpec("1.weight", 0), OwnerSpec("2.weight", 1)),
        steps=(StepSpec((PassSpec(calls=calls, raises=RaiseSpec("1")),), freeze=("1", "2")),),
    )

    without_the_second = next(
        each for each in smaller_programs(program) if len(each.model.children) == 2 and each.ties
    )

    expected = (CallsSpec("", (0, 1, 1), dropped=(1,)), CallsSpec("1", ()))
    assert without_the_second == ProgramSpec(
        ModuleSpec(children=(LEAF, LEAF)),
        ties=(TieSpec("0", "1"),),
        owners=(OwnerSpec("1.weight", 1),),
        steps=(StepSpec((PassSpec(calls=expected),), freeze=("1",)),),
    )


@given(programs())
def test_a_program_whose_every_part_is_needed_stays(program: ProgramSpec) -> None:
    """Nothing smaller fails."""
    assert reduce_program(program, lambda _: False) == program


@given(programs(modules_max=4, steps_max=2))
def test_what_always_fails_ends_at_the_simplest(program: ProgramSpec) -> None:
    """No step, and one module."""
    small = reduce_program(program, lambda _: True)

    assert small.steps == ()
    assert small.model.children == ()
