"""``fsdp-sim run``, ``explore`` and ``replay``: scripts on simulated ranks."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import fsdp_sim
from fsdp_sim.cli.outcome import (
    CLEAN,
    FINDINGS,
    OUTPUT,
    PICTURE,
    conclude,
    failure_text,
    judging,
    show,
)
from fsdp_sim.cli.traces import draw_run
from fsdp_sim.errors import ConfigError, SimulationError
from fsdp_sim.script import Script
from fsdp_sim.views.report import error_text

if TYPE_CHECKING:
    from fsdp_sim.simulation import Report

SCRIPT_FIRST = {"allow_interspersed_args": False}

ranks_option = click.option(
    "--ranks", type=click.IntRange(min=1), default=4, show_default=True, help="simulated ranks"
)
as_option = click.option(
    "--as", "device", type=click.Choice(["cuda"]), help="the script says cuda and nccl"
)
fault_option = click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="FAULT",
    help="what is to go wrong, such as 'crash:issue@rank=1,at=3'",
)
OUTPUTS = {
    "trace": "write all operations here",
    "timeline": "write a timeline for Perfetto here",
    "picture": "draw the first finding here, or else an overlap (PNG or SVG)",
}


def output_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of ``OUTPUTS``."""
    for name, what in reversed(OUTPUTS.items()):
        kind = PICTURE if name == "picture" else OUTPUT
        command = click.option(f"--{name}", type=kind, help=what)(command)
    return command


script_argument = click.argument("script", type=click.Path(exists=True, dir_okay=False))
rest_argument = click.argument("arguments", nargs=-1, type=click.UNPROCESSED)


@click.command(context_settings=SCRIPT_FIRST)
@ranks_option
@as_option
@fault_option
@click.option(
    "--scheduler",
    default="program_order",
    show_default=True,
    help="who runs next: program_order, pct or uniform",
)
@click.option("--seed", type=int, default=0, show_default=True, help="of the scheduler")
@output_options
@script_argument
@rest_argument
def run(ranks: int, device: str | None, script: str, arguments: Any, **how: Any) -> None:
    """Run SCRIPT once on each rank, and check the run."""
    with _program(script, arguments) as program:
        outputs = _outputs(how)
        how |= {"knobs": _knobs(device), "strict": False, "trace": bool(outputs)}
        with _writing_failures(outputs):
            report = fsdp_sim.simulate(program, ranks, **how)
        _write(report, outputs)
        conclude(report, [script, *arguments])


@click.command(context_settings=SCRIPT_FIRST, short_help="Run SCRIPT under many schedules.")
@ranks_option
@as_option
@fault_option
@click.option("--schedules", type=click.IntRange(min=1), default=200, show_default=True)
@click.option(
    "--scheduler",
    default="pct",
    show_default=True,
    help="how schedules are drawn: pct, uniform, portfolio or exhaustive",
)
@click.option("--seed", type=int, default=0, show_default=True, help="of the first schedule")
@click.option("--save", type=OUTPUT, help="write a failure here, as a file that replay takes")
@script_argument
@rest_argument
def explore(
    ranks: int, device: str | None, save: str | None, script: str, arguments: Any, **how: Any
) -> None:
    """Run SCRIPT under many schedules; show the first failure, made minimal."""
    with _program(script, arguments) as program:
        how |= {"knobs": _knobs(device), "strict": False}
        search = fsdp_sim.explore(program, ranks, **how)
        show(search.summary())
        if search.failure is not None:
            if save is not None:
                _save(search.failure, save, script, arguments)
            raise search.failure
        show("clean: no schedule failed")


@click.command(context_settings=SCRIPT_FIRST, short_help="Run a failure again.")
@output_options
@click.argument("what")
@click.argument("script", required=False, type=click.Path(exists=True, dir_okay=False))
@rest_argument
def replay(what: str, script: str | None, arguments: Any, **outputs: Any) -> None:
    """Run a failure again: a schedule such as 'v1;w4;17>2' and SCRIPT, or a replay file."""
    outputs = _outputs(outputs)
    if script is None:
        _follow(what, outputs)
        return
    with _program(script, arguments) as program:
        with _writing_failures(outputs):
            report = fsdp_sim.replay(program, what, strict=False, trace=bool(outputs))
        _write(report, outputs)
        conclude(report, [script, *arguments])


def _outputs(how: dict[str, Any]) -> dict[str, str]:
    """Take out of a command's options the files that it is to write, by name."""
    files = {name: how.pop(name) for name in OUTPUTS}
    return {name: path for name, path in files.items() if path is not None}


def _knobs(device: str | None) -> tuple[str, ...]:
    """Return the knob of a device's name: a replay line holds it too."""
    return () if device is None else (device,)


@contextmanager
def _program(script: str, arguments: tuple[str, ...]) -> Iterator[Script]:
    """Give a script as a rank function, able to import what lies beside it."""
    with judging([script, *arguments]):
        program = Script(script, arguments)
        with program.importing():
            yield program


@contextmanager
def _writing_failures(outputs: dict[str, str]) -> Iterator[None]:
    """Write what was asked for also of a run that raises: it is then that people look."""
    try:
        yield
    except Exception as error:
        report = getattr(error, "report", None)
        if report is not None:
            _write(report, outputs)
        raise


def _write(report: "Report", outputs: dict[str, str]) -> None:
    writers: dict[str, Callable[[str], object]] = {
        "trace": report.trace.save,
        "timeline": report.trace.to_chrome,
        "picture": lambda path: draw_run(report.trace, report.findings, path),
    }
    for name, path in outputs.items():
        if writers[name](path) is not False:
            show(f"{name}: {path}")


def _save(failure: BaseException, path: str, script: str, arguments: tuple[str, ...]) -> None:
    from fsdp_sim.replay_file import ScriptCall, dump, of_failure

    file = of_failure(failure, script=ScriptCall(script, arguments))
    Path(path).write_text(dump(file), encoding="utf-8")
    show(f"replay file: {path}")


def _follow(path: str, outputs: dict[str, str]) -> None:
    """Follow a replay file and say how what came up compares with what it expects."""
    if not Path(path).is_file():
        raise click.UsageError(
            "replay takes a schedule and a script, or a replay file that is there, got "
            f"{path!r} alone and no such file"
        )
    if path.endswith(".py"):
        raise click.UsageError(
            f"replay takes a schedule and a script, or a replay file, got {path!r} alone; put the "
            "schedule before it"
        )
    from fsdp_sim.follow import follow
    from fsdp_sim.replay_file import read, verdict

    with judging([path]):
        file = read(path)
        if file.test is not None:
            if outputs:
                raise ConfigError(
                    f"a replay file of a test must be followed without --{next(iter(outputs))}; its timeline "
                    "and picture are written beside the test's replay file"
                )
            sys.exit(_follow_test(file.test.node, path))
        failure: Exception | None = None
        try:
            with _writing_failures(outputs):
                report = follow(file, trace=bool(outputs))
            _write(report, outputs)
        except (ConfigError, fsdp_sim.RunError):
            raise
        except Exception as error:
            failure = error
            text = error_text(error) if isinstance(error, SimulationError) else failure_text(error)
            show(text)
        show(verdict(file, failure))
        sys.exit(CLEAN if failure is None else FINDINGS)


def _follow_test(node: str, path: str) -> int:
    """Let pytest follow a replay file that is about a test; return its exit status."""
    import pytest

    # This process has imported fsdp_sim, whose asserts pytest then cannot rewrite; nobody needs them to be.
    quiet = ("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning")
    return int(pytest.main([node, *quiet, "--fsdp-sim-replay", str(Path(path).resolve())]))
