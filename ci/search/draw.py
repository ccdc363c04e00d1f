"""Draw: programs from a number, each handed to a body; one that fails is made as small as it goes.

Note [rounds]
    Once Hypothesis has drawn ten examples, five of six are near copies of the one before: half of a hundred
    programs were then drawn before. So programs are drawn in rounds of ten, and none is run twice.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from torch.distributed.checkpoint.api import CheckpointException

from fsdp_sim.program import ProgramSpec
from fsdp_sim.program.parity import verify
from fsdp_sim.simulation import Report
from fsdp_sim.strategies import programs

ROUND = 10
"""Examples of a round. See Note [rounds]."""

Body = Callable[[ProgramSpec], None]


class CheckpointFailed(RuntimeError):
    """Saving or loading failed on some rank."""


def run(program: ProgramSpec, **options: Any) -> Report:
    """Run ``program`` with every check, and compare it with the unsharded run.

    Raises:
        CheckpointFailed: instead of PyTorch's exception, which is no ``Exception``: Hypothesis would let it
            through.
        Exception: whatever ``verify`` raises else.
    """
    try:
        return verify(program, **options)
    except CheckpointException as error:
        raise CheckpointFailed(str(error)) from error


def draw(body: Body, number: int, count: int) -> Exception | None:
    """Run ``body`` on ``count`` different programs, and on smaller ones when it raises.

    The same number draws the same programs, on any machine, with one version of Hypothesis.

    Returns:
        What Hypothesis ended with: the error of the smallest program, or its own; None if all passed.
    """
    torch.set_num_threads(1)
    passed: dict[ProgramSpec, None] = {}

    def once(program: ProgramSpec) -> None:
        if program not in passed and len(passed) < count:
            body(program)
            passed[program] = None

    for position in range(count):  # each round draws a new program, or Hypothesis has no more
        if len(passed) < count and (error := _round(once, number * count + position)):
            return error
    return None


def _round(body: Body, number: int) -> Exception | None:
    """Run one round, which stops at its first failure."""
    options = settings(
        max_examples=ROUND,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    search = seed(number)(options(given(programs())(body)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            search()
        except Exception as error:
            return error
    return None
