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

from fsdp_sim.errors import ConfigError, FindingError, RunError
from fsdp_sim.views.report import report_text

if TYPE_CHECKING:
    from fsdp_sim.simulation import Report

CLEAN, FINDINGS, NOT_SIMULATED = 0, 1, 3

console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
"""Reports go to standard error, since standard output is the script's."""


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
        console.print(f"not simulated: {error}")
        sys.exit(NOT_SIMULATED)
    except FindingError as error:
        conclude(error.report, subject)
    except Exception:
        console.print(traceback.format_exc())
        sys.exit(FINDINGS)


def conclude(report: "Report", subject: Sequence[str]) -> None:
    """Print what was found and how to run it again, and leave with the exit status that says so."""
    replay = shlex.join(["fsdp-sim", "replay", report.schedule, *subject])
    console.print(report_text(report, replay=replay))
    sys.exit(FINDINGS if report.findings else CLEAN)
