"""The example script: one text, real processes and simulated ranks, the same losses."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from fsdp_sim.cli import main

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "examples" / "train_lm.py")
LOSS = re.compile(r"^step +\d+ +loss [\d.]+ +(\S+)$", re.MULTILINE)


def on_processes(world_size: int, *arguments: str) -> list[str]:
    """Run the example under torchrun and return its exact losses."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, f"--nproc-per-node={world_size}", SCRIPT, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return LOSS.findall(run.stdout)


def on_simulated_ranks(world_size: int, *arguments: str) -> list[str]:
    """Run the example under `fsdp-sim run` and return its exact losses."""
    command = ["run", "--ranks", str(world_size), SCRIPT, *arguments]
    result = CliRunner().invoke(main, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return LOSS.findall(result.output)


@pytest.mark.parametrize("arguments", [(), ("--tied", "--dtype", "bfloat16")])
def test_two_processes_and_two_simulated_ranks_agree_bit_for_bit(
    arguments: tuple[str, ...],
) -> None:
    """Two summands have one order, so not a bit of any loss may differ."""
    real = on_processes(2, "--steps", "4", *arguments)

    assert len(real) == 4
    assert on_simulated_ranks(2, "--steps", "4", *arguments) == real


def test_a_simulated_run_repeats_itself() -> None:
    """Four ranks print the same losses in each run."""
    first = on_simulated_ranks(4, "--steps", "2")

    assert on_simulated_ranks(4, "--steps", "2") == first


def test_the_script_knows_nothing_of_the_simulator() -> None:
    """What runs simulated is what would run for real."""
    assert "sim" not in Path(SCRIPT).read_text().lower()
