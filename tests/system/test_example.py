"""The example script: one text, real processes and simulated ranks, the same losses."""

import re
from pathlib import Path

import pytest

from tests.system.launch import on_processes, on_simulated_ranks

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "examples" / "train_lm.py")
LOSS = re.compile(r"^step +\d+ +loss [\d.]+ +(\S+)$", re.MULTILINE)


def losses(output: str) -> list[str]:
    """Return the exact losses that the example printed."""
    return LOSS.findall(output)


@pytest.mark.parametrize("arguments", [(), ("--tied", "--dtype", "bfloat16")])
def test_two_processes_and_two_simulated_ranks_agree_bit_for_bit(
    arguments: tuple[str, ...],
) -> None:
    """Two summands have one order, so not a bit of any loss may differ."""
    real = losses(on_processes(2, SCRIPT, "--steps", "4", *arguments))

    assert len(real) == 4
    assert losses(on_simulated_ranks(2, SCRIPT, "--steps", "4", *arguments)) == real


def test_a_simulated_run_repeats_itself() -> None:
    """Four ranks print the same losses in each run."""
    first = losses(on_simulated_ranks(4, SCRIPT, "--steps", "2"))

    assert losses(on_simulated_ranks(4, SCRIPT, "--steps", "2")) == first


def test_the_script_knows_nothing_of_the_simulator() -> None:
    """What runs simulated is what would run for real."""
    assert "sim" not in Path(SCRIPT).read_text().lower()
