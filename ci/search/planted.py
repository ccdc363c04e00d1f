"""Plant bugs, and see after how many programs each is found and how small its program becomes.

``python -m ci.search.planted`` prints the table of ``docs/search.md``.
"""

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import click

from ci.search.draw import draw, run
from ci.search.plants import Plant, plants
from fsdp_sim.program import ProgramSpec
from fsdp_sim.program.reduce import reduce_program
from fsdp_sim.program.tree import units, walk
from fsdp_sim.replay_file import failure_of

PROGRAMS_MAX = 200
SHRINK_RUNS_MAX = 150
"""Of Hypothesis, which ends after five minutes at the latest."""
UNITS_MAX, DEVIATIONS_MAX = 3, 2
"""How small the program of a bug must become."""


@dataclass(frozen=True)
class Size:
    """How large a program is."""

    units: int
    modules: int
    steps: int
    deviations: int

    def __str__(self) -> str:
        """Return units/modules/steps/deviations."""
        return f"{self.units}/{self.modules}/{self.steps}/{self.deviations}"


@dataclass(frozen=True)
class Found:
    """How one bug was found.

    Attributes:
        programs: run up to the first that failed; None where none did.
        kind: of the failure of the smallest program.
        before, after: the first program that failed, and the smallest.
    """

    name: str
    programs: int | None = None
    kind: str = ""
    before: Size | None = None
    after: Size | None = None
    text: str = ""

    @property
    def is_good(self) -> bool:
        """Whether it was found, in a program that became small enough."""
        after = self.after
        return after is not None and after.units <= UNITS_MAX and after.deviations <= DEVIATIONS_MAX


def size_of(program: ProgramSpec) -> Size:
    """Return how large a program is."""
    modules = sum(1 for _ in walk(program.model))
    return Size(len(units(program)), modules, len(program.steps), program.schedule.count(">"))


def find(name: str) -> Found:
    """Search with the bug of this name planted, and shrink what fails first: by Hypothesis, then directly."""
    plant = plants()[name]
    runs = 0
    first: tuple[int, ProgramSpec] | None = None
    failed: dict[ProgramSpec, Exception] = {}

    def each(program: ProgramSpec) -> None:
        nonlocal runs, first
        if program in failed:
            failed[program] = failed.pop(program)  # the last one is the smallest
            raise failed[program]
        if first is not None and runs > first[0] + SHRINK_RUNS_MAX:
            return
        runs += 1
        if error := _failure(program, plant):
            first = first or (runs, program)
            failed[program] = error
            raise error

    error = draw(each, 0, PROGRAMS_MAX)
    if error is not None and not failed:
        raise error
    if first is None:
        return Found(name)
    runs_before, before = first
    program = reduce_program(list(failed)[-1], lambda each: _failure(each, plant) is not None)
    error = _failure(program, plant)
    assert error is not None, "the same program fails again"
    kind = failure_of(error).kind
    return Found(name, runs_before, kind, size_of(before), size_of(program), repr(program))


def _failure(program: ProgramSpec, plant: Plant) -> Exception | None:
    """Return what a bug makes of a program; None where it passes, or fails with nothing planted too."""
    try:
        with plant():
            run(program)
    except Exception as error:
        return None if _fails(program) else error
    return None


def _fails(program: ProgramSpec) -> bool:
    """Return whether a program fails with nothing planted: the search for failures finds that."""
    try:
        run(program)
    except Exception:
        return True
    return False


@click.command()
@click.option("--workers", default=os.cpu_count() or 1, help="Processes.", show_default=True)
@click.option("--only", default="", help="Plant only the bugs whose names contain this.")
@click.option("--texts", is_flag=True, help="Print the smallest programs too.")
def main(workers: int, only: str, texts: bool) -> None:  # noqa: FBT001 - as click calls it
    """Print a table: each bug, after how many programs, and units/modules/steps/deviations."""
    names = [name for name in plants() if only in name]
    if not names:
        raise click.BadParameter(f"--only must be part of a name of {list(plants())}, got {only!r}")
    spawn = multiprocessing.get_context("spawn")
    print("| bug | programs | finding | first failing | smallest |")
    print("|---|---|---|---|---|")
    good = True
    with ProcessPoolExecutor(workers, mp_context=spawn, max_tasks_per_child=1) as pool:
        for found in pool.map(find, names):
            good &= found.is_good
            cells = (found.name, found.programs, found.kind, found.before, found.after)
            print(
                f"| {' | '.join('not found' if c is None else str(c) for c in cells)} |", flush=True
            )
            if texts:
                print(found.text, file=sys.stderr, flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
