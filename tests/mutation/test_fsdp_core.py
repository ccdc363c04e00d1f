"""Every synchronisation of fsdp_core is needed: broken, it is found."""

from functools import cache

from fsdp_sim.corpus import load_corpus
from fsdp_sim.mutation import core_changes, core_functions, core_programs
from fsdp_sim.mutation.campaign import Campaign, mutate
from fsdp_sim.mutation.programs import FunctionProgram, Program, SpecProgram
from fsdp_sim.mutation.subject import find
from fsdp_sim.mutation.table import survivor_lines

SUBJECT = find("fsdp_core")


@cache
def campaign() -> Campaign:
    """Break every site that the small programs reach, once."""
    skipped = load_corpus()["b01_skipped_first"].program
    specs = {**core_programs.small_programs(), "skipped": skipped}.items()
    functions = core_functions.PROGRAMS
    programs: list[Program] = [SpecProgram(name, spec) for name, spec in specs]
    programs += [FunctionProgram(f.__name__, f, core_functions.RANKS) for f in functions]
    return mutate(SUBJECT, programs, changes=core_changes.changes(), schedules=1)


def test_every_broken_synchronisation_is_found() -> None:
    """No program is clean without it: what is not needed is taken out of the runtime."""
    survivors = campaign().survivors

    assert survivors == (), "\n".join("\n".join(survivor_lines(each)) for each in survivors)


def test_every_known_bug_is_found() -> None:
    """Bugs that runtimes like this one had, put into it."""
    bugs = [mutant for mutant in campaign().mutants if mutant.change is not None]

    assert len(bugs) == len(core_changes.changes())
    assert [bug.change.name for bug in bugs if bug.change and bug.status != "killed"] == []


def test_no_break_makes_python_fail() -> None:
    """An exception of a break's own making would hide whether the simulator sees it."""
    assert [mutant for mutant in campaign().mutants if mutant.status == "error"] == []


def test_no_survivor_is_a_hole_in_the_simulator() -> None:
    """Each pair that a survivor orders is ordered along another path."""
    pairs = [
        pair
        for survivor in campaign().survivors
        for proof in survivor.proofs.values()
        for pair in proof.pairs
    ]

    assert [pair.lines() for pair in pairs if pair.path is None] == []


def test_sites_are_callers_of_the_verbs() -> None:
    """The file of the verbs has no site of its own."""
    files = {site.file for mutant in campaign().mutants for site in mutant.sites}

    assert "fsdp_core/device.py" not in files
    callers = {f"fsdp_core/{name}.py" for name in ("context", "weights", "gradients")}
    assert callers <= files
