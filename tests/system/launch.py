"""Run a script on real processes, and on simulated ranks."""

import os
import subprocess
import sys

from click.testing import CliRunner

from fsdp_sim.cli import main


def on_processes(world_size: int, script: str, *arguments: str) -> str:
    """Run a script under torchrun and return what it prints."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, f"--nproc-per-node={world_size}", script, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def on_simulated_ranks(world_size: int, script: str, *arguments: str) -> str:
    """Run a script under `fsdp-sim run`, which must find nothing, and return what it prints."""
    command = ["run", "--ranks", str(world_size), script, *arguments]
    result = CliRunner().invoke(main, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout
