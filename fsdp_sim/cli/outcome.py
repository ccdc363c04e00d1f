"""How a command ends: what it prints, and the exit status that says so."""

import os
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

import fsdp_sim
from fsdp_sim.errors import ConfigError, FindingError, RunError
from fsdp_sim.views.report import report_text

if TYPE_CHECKING:
    from fsdp_sim.simulation import Report

CLEAN, FINDINGS, NOT_SIMULATED = 0, 1, 3
PICTURE_SUFFIXES = (".png", ".svg")
PACKAGE = str(Path(fsdp_sim.__file__).parent)

console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
"""Reports go to standard error, since standard output is the script's."""


def show(text: str) -> None:
    """Print to standard error, after all that the script has printed to standard output."""
    sys.stdout.flush()
    console.print(text)


class _Output(click.Path):
    """A file to write at the end of a run: that it can be written is found out before."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Check the file if it is there, else its folder."""
        path = super().convert(value, param, ctx)
        folder = Path(os.fsdecode(path)).resolve().parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            why = f"its folder must be there and writable, got {path!r}; make it first"
            self.fail(why, param, ctx)
        return path


OUTPUT = _Output(dir_okay=False, writable=True)


class _Picture(_Output):
    """A picture to write: its form is one that can be drawn."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Check the suffix, and then the file."""
        if Path(os.fsdecode(value)).suffix not in PICTURE_SUFFIXES:
            self.fail(f"a picture must be a .png or .svg file, got {value!r}", param, ctx)
        return super().convert(value, param, ctx)


PICTURE = _Picture(dir_okay=False, writable=True)


@contextmanager
def judging(subject: Sequence[str]) -> Iterator[None]:
    """Print what the body raises, and leave with the exit status that says so.

    Args:
        subject: what is run, as words of a command line: a script and its arguments.
    """
    try:
        yield
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    except RunError as error:
        show(f"not simulated: {error}")
        sys.exit(NOT_SIMULATED)
    except FindingError as error:
        conclude(error.report, subject)
    except Exception as error:
        show(failure_text(error))
        sys.exit(FINDINGS)


def conclude(report: "Report", subject: Sequence[str]) -> None:
    """Print what was found and how to run it again, and leave with the exit status that says so."""
    replay = shlex.join(["fsdp-sim", "replay", report.schedule, *subject])
    show(report_text(report, replay=replay))
    sys.exit(FINDINGS if report.findings else CLEAN)


def failure_text(error: Exception) -> str:
    """Return a script's own failure as Python prints it, without the frames that led to the script."""
    own = error.__traceback__
    while own is not None and own.tb_frame.f_code.co_filename.startswith(PACKAGE):
        own = own.tb_next
    shown = error.__traceback__ if own is None else own
    return "".join(traceback.format_exception(type(error), error, shown)).rstrip()
