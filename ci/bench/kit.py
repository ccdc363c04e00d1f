"""Cost of the property kit: of a drawn choice, of a drawn program, and of a program that is run."""

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from fsdp_sim.program import ProgramSpec
from fsdp_sim.program.parity import verify
from fsdp_sim.strategies import programs
from fsdp_sim.strategies.arguments import number

CHOICES, DRAWN, RUN = 2_000, 300, 60


def run() -> dict[str, dict[str, float]]:
    """Return microseconds of a choice, and programs a second: drawn, and run with every check."""
    torch.set_num_threads(1)
    choices = st.composite(_choices)
    one, many = (_seconds(choices(count), lambda _: None, 20) / 20 for count in (1, CHOICES))
    drawn = DRAWN / _seconds(programs(), lambda _: None, DRAWN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ran = RUN / _seconds(programs(), _verify, RUN)
    row = {
        "us_per_choice": 1e6 * (many - one) / (CHOICES - 1),
        "drawn_per_second": drawn,
        "run_per_second": ran,
    }
    print("  ".join(f"{name} {value:.1f}" for name, value in row.items()))
    return {"kit": row}


def _choices(draw: Any, count: int) -> None:
    for _ in range(count):
        number(draw, 0, 99)


def _verify(program: ProgramSpec) -> None:
    verify(program)


def _seconds(strategy: st.SearchStrategy[Any], use: Callable[[Any], None], count: int) -> float:
    """Return the processor time of as many examples."""

    @seed(0)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def each(value: Any) -> None:
        use(value)

    start = time.process_time()
    each()
    return time.process_time() - start
