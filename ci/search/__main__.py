"""Search for programs that fail: ``python -m ci.search``; what was found lies in ``out/search``."""

import json
import multiprocessing
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from importlib import metadata
from itertools import count
from pathlib import Path

try:
    import click
    import hypothesis  # noqa: F401  the workers need it; say so before they start
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
except ImportError as missing:
    sys.exit(f"the search needs hypothesis, click and rich, got {missing}; pip install them")

from ci.search.batch import PROGRAMS_EACH, Failure, Result, run_batch
from ci.search.coverage import Coverage

BATCHES_OF_A_PROCESS = 20
"""Batches after which a worker starts afresh, so that no state of one lasts."""


class Search:
    """What all batches gave so far.

    Attributes:
        failures: the smallest program of each kind and message, by these two, the first found first.
        repeats: how often each came up.
    """

    def __init__(self) -> None:
        self.batches = self.programs = 0
        self.seconds = 0.0
        self.coverage = Coverage()
        self.failures: dict[tuple[str, str], Failure] = {}
        self.repeats: Counter[tuple[str, str]] = Counter()

    def add(self, result: Result) -> bool:
        """Take one batch in; return whether it failed as none did before."""
        self.batches += 1
        self.programs += result.programs
        self.seconds += result.seconds
        self.coverage.merge(result.coverage)
        if result.failure is None:
            return False
        key = result.failure.kind, result.failure.message
        self.repeats[key] += 1
        known = self.failures.get(key)
        if known is None or len(result.failure.text) < len(known.text):
            self.failures[key] = result.failure
        return known is None

    def lines(self) -> Iterator[str]:
        """Yield the summary."""
        rate = self.programs / max(self.seconds, 1e-9)
        yield (
            f"{self.programs} programs in {self.batches} batches of {PROGRAMS_EACH}, "
            f"{self.seconds:.0f} s of processor time, {rate:.1f} programs a second and worker"
        )
        yield from self.coverage.lines()
        yield f"failures: {len(self.failures)}"
        for key, failure in self.failures.items():
            yield f"  {failure.kind}: {failure.message}  ({self.repeats[key]} times)"
            yield f"    batch {failure.batch}: {failure.text}"


@click.command()
@click.option("--minutes", default=30.0, help="Start no batch after so many minutes.")
@click.option("--programs", default=0, help="Start no batch beyond so many programs; 0: no limit.")
@click.option("--workers", default=os.cpu_count() or 1, help="Processes.", show_default=True)
@click.option("--first", default=0, help="Number of the first batch.", show_default=True)
@click.option("--out", default=Path("out/search"), type=click.Path(path_type=Path))
def main(minutes: float, programs: int, workers: int, first: int, out: Path) -> None:
    """Draw programs, run them with every check, and say what was found and what never came up."""
    limits = {"minutes": minutes, "programs": programs, "workers": workers}
    for name, value in limits.items():
        if value < 0 or (name == "workers" and value < 1):
            raise click.BadParameter(f"{name} must be positive, got {value}")
    out.mkdir(parents=True, exist_ok=True)
    numbers = range(first, first + -(-programs // PROGRAMS_EACH)) if programs else count(first)
    end = time.monotonic() + 60 * minutes
    search = Search()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("programs", total=programs or None)
        for result in _results(iter(numbers), workers, end):
            if search.add(result) and result.failure is not None:
                print(f"{result.failure.kind}: {result.failure.message}", flush=True)
            _write(out, search)
            text = f"{search.programs} programs, {len(search.failures)} failures"
            progress.update(task, completed=search.programs, description=text)
    print("\n".join(search.lines()))
    sys.exit(1 if search.failures else 0)


def _results(numbers: Iterator[int], workers: int, end: float) -> Iterator[Result]:
    """Run batches, as many at once as there are workers, and yield each when it is done."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        workers, mp_context=spawn, max_tasks_per_child=BATCHES_OF_A_PROCESS
    ) as pool:
        running: set[Future[Result]] = set()
        while True:
            while len(running) < workers and time.monotonic() < end:
                number = next(numbers, None)
                if number is None:
                    break
                running.add(pool.submit(run_batch, number))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()


def _write(out: Path, search: Search) -> None:
    """Write the summary, and each failing program as ``load_program`` reads it."""
    facts = {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "hypothesis")},
    }
    head = " ".join(f"{name} {version}" for name, version in facts.items())
    (out / "summary.txt").write_text("\n".join([head, *search.lines()]) + "\n")
    for number, failure in enumerate(search.failures.values()):
        (out / f"failure_{number}.json").write_text(failure.program)
    (out / "coverage.json").write_text(
        json.dumps({"features": search.coverage.features, "sometimes": search.coverage.sometimes})
    )


if __name__ == "__main__":
    main()
