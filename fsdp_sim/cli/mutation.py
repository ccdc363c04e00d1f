"""``fsdp-sim mutate``: break one synchronisation of a package at a time; each break must be found."""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import click

from fsdp_sim.cli.outcome import CLEAN, FINDINGS, console, judging
from fsdp_sim.cli.scripts import ranks_option

if TYPE_CHECKING:
    from fsdp_sim.mutation.campaign import Campaign, Progress


@click.command(short_help="Break each synchronisation of PACKAGE in turn.")
@ranks_option
@click.option(
    "--program",
    "names",
    multiple=True,
    metavar="PROGRAM",
    help="module:function or file.py:function of a rank function, or a JSON file of a program or replay",
)
@click.option(
    "--schedules",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="of each program: program order, then drawn ones",
)
@click.option("--json", "as_json", is_flag=True, help="write only JSON, to standard output")
@click.argument("package")
def mutate(ranks: int, names: tuple[str, ...], schedules: int, package: str, **form: bool) -> None:
    """Break each synchronisation in PACKAGE while programs run; no file is changed.

    Without --program, what is known for the package is run.  Exit status: 0 if every break is found, 1 if
    one is not.
    """
    with judging([package]):
        campaign = _run(package, names, ranks, schedules)
        if form["as_json"]:
            from fsdp_sim.mutation.table import to_json

            click.echo(to_json(campaign))
        else:
            _print(campaign)
        sys.exit(CLEAN if all(m.status == "killed" for m in campaign.mutants) else FINDINGS)


def _run(package: str, names: tuple[str, ...], ranks: int, schedules: int) -> "Campaign":
    from fsdp_sim.mutation.campaign import mutate as break_all
    from fsdp_sim.mutation.programs import named
    from fsdp_sim.mutation.subject import find, known_changes, known_programs

    sys.path.insert(0, "")  # programs are named as seen from here
    subject = find(package)
    programs = [named(name, ranks) for name in names] or known_programs(package)
    changes = known_changes(package)
    with _progress() as progress:
        return break_all(subject, programs, changes=changes, schedules=schedules, progress=progress)


def _progress() -> "AbstractContextManager[Progress]":
    """Show a bar on a terminal, nothing elsewhere."""
    if not console.is_terminal:
        return nullcontext(lambda _what, _done, _all: None)
    return _Bar()


class _Bar:
    """A bar for each stage of a campaign."""

    def __init__(self) -> None:
        from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

        columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=console, transient=True)
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> "Progress":
        self._bars.start()
        return self._show

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def _show(self, what: str, done: int, of: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=of)
        self._bars.update(self._tasks[what], completed=done)


def _print(campaign: "Campaign") -> None:
    from rich.console import Console

    from fsdp_sim.mutation.table import summary, survivor_lines, to_table

    out = Console(soft_wrap=False, highlight=False)
    out.print(to_table(campaign))
    for survivor in campaign.survivors:
        out.print("\n".join(survivor_lines(survivor)), markup=False, soft_wrap=True)
    for call in campaign.unreached:
        out.print(f"no program makes the call {call}", markup=False, soft_wrap=True)
    out.print(summary(campaign), markup=False, soft_wrap=True)
