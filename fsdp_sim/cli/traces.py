"""``fsdp-sim trace`` and ``check``: stored traces, read and judged."""

import sys
from collections.abc import Iterator, Sequence

import click

from fsdp_sim.analysis import analyse
from fsdp_sim.checkers import CHECKERS, make
from fsdp_sim.cli.outcome import CLEAN, FINDINGS, OUTPUT, PICTURE, judging, show
from fsdp_sim.errors import ConfigError, Finding
from fsdp_sim.replay_file import read
from fsdp_sim.trace import Trace, diff
from fsdp_sim.views.report import finding_text

stored = click.Path(exists=True, dir_okay=False)


@click.group(short_help="Read, draw and compare stored traces.")
def trace() -> None:
    """Read traces that `fsdp-sim run --trace FILE` or `fsdp_sim.record` wrote."""


@trace.command()
@click.argument("file", type=stored)
def text(file: str) -> None:
    """Print one line an operation."""
    with judging([file]):
        click.echo(_load(file).to_text())


@trace.command(short_help="Write a timeline for Perfetto.")
@click.argument("file", type=stored)
@click.argument("output", type=OUTPUT)
def perfetto(file: str, output: str) -> None:
    """Write a timeline for Perfetto: a row for each rank and stream, an arrow for each wait."""
    with judging([file]):
        _load(file).to_chrome(output)


@trace.command(short_help="Draw the first finding, as PNG or SVG.")
@click.argument("file", type=stored)
@click.argument("output", type=PICTURE)
def picture(file: str, output: str) -> None:
    """Draw the first finding, or else a gather and the compute it overlaps (PNG or SVG)."""
    with judging([file]):
        loaded = _load(file)
        draw_run(loaded, _errors_of(loaded), output)


def draw_run(run: Trace, findings: Sequence[Finding], path: str) -> bool:
    """Draw the first finding of a run, or else an overlap; say so where there is neither, and return False."""
    from fsdp_sim.views.finding_picture import draw_finding
    from fsdp_sim.views.picture import draw

    if findings:
        draw_finding(run.ops, findings[0], run.world_size, path)
        return True
    try:
        draw(run.ops, range(run.world_size), path)
    except ValueError as error:
        show(f"no picture: {error}")
        return False
    return True


def _load(file: str) -> Trace:
    """Read a trace; say so where it is a replay file, which also lies about after a failure.

    Raises:
        ConfigError: it is no trace.
    """
    try:
        return Trace.load(file)
    except ConfigError as error:
        if not _is_replay_file(file):
            raise
        advice = f"follow it with: fsdp-sim replay {file}"
        raise ConfigError(f"{file} must be a trace, got a replay file; {advice}") from error


def _is_replay_file(file: str) -> bool:
    try:
        read(file)
    except ConfigError:
        return False
    return True


def _findings_of(run: Trace) -> Sequence[Finding]:
    return analyse(run.ops, make(CHECKERS), run.world_size, stands=run.stands).findings


def _errors_of(run: Trace) -> list[Finding]:
    return [finding for finding in _findings_of(run) if not finding.is_notice]


@trace.command("diff")
@click.argument("one", type=stored)
@click.argument("other", type=stored)
@click.option("--order", is_flag=True, help="compare the order of streams and collectives alone")
def difference(one: str, other: str, *, order: bool) -> None:
    """Print the first operation that differs."""
    with judging([one, other]):
        found = diff(_load(one), _load(other), order_only=order)
        click.echo("the same" if found is None else str(found))
        sys.exit(CLEAN if found is None else FINDINGS)


@trace.command(short_help="Join the recordings of all processes of a run.")
@click.argument("output", type=OUTPUT)
@click.argument("files", type=stored, nargs=-1, required=True)
def merge(output: str, files: tuple[str, ...]) -> None:
    """Join the recordings of all processes of one run, one file each, into OUTPUT."""
    with judging(files):
        Trace.merged([_load(file) for file in files]).save(output)


@click.command(short_help="Run every checker on stored traces.")
@click.argument("files", type=stored, nargs=-1, required=True)
def check(files: tuple[str, ...]) -> None:
    """Run every checker on stored traces; recordings of single processes are judged as one run."""
    is_clean = True
    with judging(files):
        for name, loaded in _runs(files):
            findings = _findings_of(loaded)
            for finding in findings:
                show(f"{finding_text(finding)}\n")
            errors = [finding for finding in findings if not finding.is_notice]
            show(f"{name}: {len(errors) or 'no'} findings, digest {loaded.digest}")
            is_clean = is_clean and not errors
    sys.exit(CLEAN if is_clean else FINDINGS)


def _runs(files: tuple[str, ...]) -> Iterator[tuple[str, Trace]]:
    """Give each run, with the names of its files."""
    parts: dict[str, Trace] = {}
    for file in files:
        loaded = _load(file)
        if len(loaded.ranks) == loaded.world_size:
            yield file, loaded
        else:
            parts[file] = loaded
    if parts:
        yield " ".join(parts), Trace.merged(list(parts.values()))
