"""The command line: ``fsdp-sim run``, ``explore`` and ``replay`` a script on simulated ranks.

Exit status: 0 clean, 1 findings (or the script's own failure), 2 wrong usage, 3 not simulated: the run
could not be judged, which is neither clean nor a finding.
"""

import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click
from rich.console import Console

import fsdp_sim
from fsdp_sim.errors import ConfigError, FindingError, RunError
from fsdp_sim.report import report_text
from fsdp_sim.script import Script

if TYPE_CHECKING:
    from fsdp_sim.simulation import Report

FINDINGS, USAGE, NOT_SIMULATED = 1, 2, 3
console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)

SCRIPT_FIRST = {"ignore_unknown_options": True, "allow_interspersed_args": False}

ranks_option = click.option(
    "--ranks", type=click.IntRange(min=1), default=4, show_default=True, help="simulated ranks"
)
trace_option = click.option(
    "--trace", type=click.Path(dir_okay=False), help="write a timeline (Chrome, Perfetto) here"
)
script_argument = click.argument("script", type=click.Path(exists=True, dir_okay=False))
rest_argument = click.argument("arguments", nargs=-1, type=click.UNPROCESSED)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Run distributed PyTorch programs on simulated ranks and check every ordering."""


@main.command(context_settings=SCRIPT_FIRST)
@ranks_option
@click.option("--scheduler", default="program_order", show_default=True, help="who runs next")
@click.option("--seed", type=int, default=0, show_default=True, help="of the scheduler")
@trace_option
@script_argument
@rest_argument
def run(
    ranks: int,
    scheduler: str,
    seed: int,
    trace: str | None,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT once on each rank, and check the run."""
    with _judging(script, arguments) as program:
        keeps = trace is not None
        report = fsdp_sim.simulate(
            program, ranks, scheduler=scheduler, seed=seed, strict=False, trace=keeps
        )
        _conclude(program, report, trace)


@main.command(context_settings=SCRIPT_FIRST)
@ranks_option
@click.option("--schedules", type=click.IntRange(min=1), default=200, show_default=True)
@click.option("--scheduler", default="pct", show_default=True, help="how schedules are drawn")
@click.option("--seed", type=int, default=0, show_default=True, help="of the first schedule")
@script_argument
@rest_argument
def explore(
    ranks: int,
    schedules: int,
    scheduler: str,
    seed: int,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT under many schedules; show the first failure, made minimal."""
    with _judging(script, arguments) as program:
        search = fsdp_sim.explore(
            program, ranks, schedules=schedules, scheduler=scheduler, seed=seed, strict=False
        )
        console.print(search.summary())
        if search.failure is not None:
            raise search.failure


@main.command(context_settings=SCRIPT_FIRST)
@trace_option
@click.argument("schedule")
@script_argument
@rest_argument
def replay(trace: str | None, schedule: str, script: str, arguments: tuple[str, ...]) -> None:
    """Run SCRIPT again as SCHEDULE says, such as 'v1;w4;17>2'."""
    with _judging(script, arguments) as program:
        report = fsdp_sim.replay(program, schedule, strict=False, trace=trace is not None)
        _conclude(program, report, trace)


@contextmanager
def _judging(path: str, arguments: tuple[str, ...]) -> Iterator[Script]:
    """Give the script to run; what the body raises is printed and becomes the exit status."""
    program = _load(path, arguments)
    try:
        with program.importing():
            yield program
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    except RunError as error:
        console.print(f"not simulated: {error}")
        sys.exit(NOT_SIMULATED)
    except FindingError as error:
        _conclude(program, error.report, None)
    except Exception:
        console.print(traceback.format_exc())
        sys.exit(FINDINGS)


def _load(path: str, arguments: tuple[str, ...]) -> Script:
    try:
        return Script(path, arguments)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error


def _conclude(program: Script, report: "Report", trace: str | None) -> None:
    """Print what was found, write the timeline, and leave with the exit status that says so."""
    line = shlex.join(["fsdp-sim", "replay", report.schedule, program.path, *program.arguments])
    console.print(report_text(report, replay=line))
    if trace is not None:
        report.trace.to_chrome(trace)
        console.print(f"timeline: {trace}")
    sys.exit(FINDINGS if report.findings else 0)


def _not_built(name: str) -> None:
    @main.command(name, hidden=True, context_settings={"ignore_unknown_options": True})
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def command(arguments: tuple[str, ...]) -> None:  # noqa: ARG001  any command line gets this answer
        raise click.UsageError(f"'fsdp-sim {name}' is not built yet")


for _name in ("trace", "check", "doctor", "mutate"):
    _not_built(_name)


if __name__ == "__main__":
    main()
