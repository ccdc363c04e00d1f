"""Draw: programs from a number, each handed to a body; one that fails is made as small as it goes."""

import warnings
from collections.abc import Callable

import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from fsdp_sim.program import ProgramSpec
from fsdp_sim.strategies import programs


def draw(body: Callable[[ProgramSpec], None], number: int, count: int) -> Exception | None:
    """Run ``body`` on up to ``count`` programs, and on smaller ones when it raises.

    The same number draws the same programs, on any machine, with one version of Hypothesis.

    Returns:
        What Hypothesis ended with: the error of the smallest program, or its own; None if all passed.
    """
    torch.set_num_threads(1)
    options = settings(
        max_examples=count,
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
