"""The two planted bugs: found, explained, and one of them replayed in a fresh process."""

import os
import subprocess
import sys
from pathlib import Path

import fsdp_sim
from fsdp_sim.script import Script

BUGS = Path("examples", "bugs")
MISSING_WAIT = str(BUGS / "missing_wait.py")
ORDER_BY_QUERY = str(BUGS / "order_by_query.py")
RANKS = 2
SCHEDULES = 200
OTHER_HASH_SEED = "4242"


def run_in_order(script: str) -> fsdp_sim.Report:
    """Run a script on the default schedule."""
    program = Script(script)
    with program.importing():
        return fsdp_sim.simulate(program, RANKS, strict=False)


def explore(script: str) -> fsdp_sim.Report:
    """Run a script under many schedules; return its first failure, made minimal."""
    program = Script(script)
    with program.importing():
        search = fsdp_sim.explore(program, RANKS, schedules=SCHEDULES, strict=False)
    assert isinstance(search.failure, fsdp_sim.FindingError), search.summary()
    return search.failure.report


def replay_command(script: str, schedule: str) -> list[str]:
    """Return what a user types to run a failure again."""
    return ["fsdp-sim", "replay", schedule, script]


def replay_elsewhere(command: list[str]) -> str:
    """Run a replay in a fresh process with another hash seed; return what it prints."""
    module = [sys.executable, "-m", "fsdp_sim.cli", *command[1:]]
    environment = {**os.environ, "PYTHONHASHSEED": OTHER_HASH_SEED}
    run = subprocess.run(module, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 1, f"a replay must find what it replays, got:\n{run.stderr}"
    return run.stderr
