"""One batch: programs drawn from its number, run with every check, shrunk where one fails."""

import time
from dataclasses import dataclass, field

from ci.search.coverage import Coverage
from ci.search.draw import draw, run
from fsdp_sim.program import ProgramSpec, dump_program
from fsdp_sim.replay_file import failure_of

PROGRAMS_EACH = 100
AUDITED_EVERY = 20
"""Of so many programs the first is audited: what its operators do to bytes is compared with what is known of them."""


@dataclass(frozen=True)
class Failure:
    """A program that failed, as small as it could be made.

    Attributes:
        batch: number of the batch that drew it.
        kind: of the finding, or the class of what a rank raised.
        message: its first line.
        program: as JSON.
        text: as the code that makes it.
    """

    batch: int
    kind: str
    message: str
    program: str
    text: str


@dataclass
class Result:
    """What a batch gave.

    Attributes:
        programs: how many were run, up to the first that failed.
        seconds: processor time.
    """

    number: int
    programs: int = 0
    seconds: float = 0.0
    coverage: Coverage = field(default_factory=Coverage)
    failure: Failure | None = None


def run_batch(number: int, count: int = PROGRAMS_EACH) -> Result:
    """Draw and run the programs of one batch, up to the first that fails."""
    result = Result(number)
    start = time.process_time()
    last: list[tuple[ProgramSpec, Exception]] = []  # of the failures the last one is the smallest

    def each(program: ProgramSpec) -> None:
        try:
            report = run(program, trace=True, audit=result.programs % AUDITED_EVERY == 0)
        except Exception as error:
            last.append((program, error))
            raise
        if not last:
            result.programs += 1
            result.coverage.add(program, report)

    error = draw(each, number, count)
    if error is not None and not last:
        raise error
    if last:
        result.failure = _failure(number, *last[-1])
    result.seconds = time.process_time() - start
    return result


def _failure(number: int, program: ProgramSpec, error: Exception) -> Failure:
    expected = failure_of(error)
    lines = expected.message.splitlines() or [""]
    return Failure(number, expected.kind, lines[0], dump_program(program), repr(program))
