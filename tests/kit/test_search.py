"""The search for failing programs: what counts, what is summed up, and that planted bugs are found."""

from ci.search.batch import run_batch
from ci.search.coverage import Coverage
from ci.search.draw import draw
from ci.search.overlap import gather_levels
from ci.search.planted import find
from fsdp_sim.program import LayerSpec, ModuleSpec, ProgramSpec, UnitSpec
from fsdp_sim.program.parity import verify

LEAF = ModuleSpec(LayerSpec(), UnitSpec())
TWO = ProgramSpec(ModuleSpec(children=(LEAF, LEAF), unit=UnitSpec()))
QUICK = "the optimizer does not wait for reductions"


def test_a_prefetched_unit_overlaps_compute_and_a_lone_one_does_not() -> None:
    """The second unit is gathered while the first computes."""
    assert gather_levels(verify(TWO, trace=True).trace.ops) == 1
    assert gather_levels(verify(ProgramSpec(LEAF), trace=True).trace.ops) == 0


def test_levels_are_those_of_units_whose_gathers_overlap_compute() -> None:
    """A unit with a layer and two units inside: while it computes, the first of these is gathered."""
    inner = ModuleSpec(LayerSpec(), UnitSpec(), children=(LEAF, LEAF))
    nested = ProgramSpec(ModuleSpec(children=(LEAF, inner, LEAF)))

    assert gather_levels(verify(nested, trace=True).trace.ops) == 2


def test_a_program_without_overlap_does_not_count() -> None:
    """It is counted apart."""
    coverage = Coverage()
    for program in (TWO, ProgramSpec(LEAF)):
        coverage.add(program, verify(program, trace=True))

    assert (coverage.programs, coverage.without_overlap) == (1, 1)
    assert coverage.features["several units"] == 1


def test_what_never_came_up_is_named_with_the_pairs_that_can() -> None:
    """A pair that no valid program has is no hole."""
    never = Coverage().never()

    assert "tied" in never
    assert "tied + frozen" in never
    assert "ranks differ + one rank" not in never


def test_a_batch_is_the_same_programs_each_time() -> None:
    """By its number alone."""
    one, other = run_batch(0, 4), run_batch(0, 4)

    assert one.coverage == other.coverage
    assert one.programs == other.programs == 4
    assert one.failure is None


def test_no_program_is_drawn_twice() -> None:
    """Hypothesis alone repeats itself."""
    drawn: list[ProgramSpec] = []

    assert draw(drawn.append, 0, 60) is None
    assert len(drawn) == len(set(drawn)) == 60


def test_a_failing_program_is_drawn_until_it_is_small() -> None:
    """The simplest of all, where every program fails."""
    drawn: list[ProgramSpec] = []

    def fails(program: ProgramSpec) -> None:
        drawn.append(program)
        raise ArithmeticError(program)

    assert isinstance(draw(fails, 0, 60), ArithmeticError)
    assert drawn[-1] == ProgramSpec(LEAF, mesh=(1,), width=1)


def test_a_planted_bug_is_found_and_shrinks_to_a_small_program() -> None:
    """One unit is enough for a missing wait behind the reductions, which is a race with the optimizer."""
    found = find(QUICK)

    assert found.is_good
    assert found.kind == "Race"
