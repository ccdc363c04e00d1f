"""The tests that are marked `everywhere`, on real processes: each set at once, since it starts slowly."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("processes", "more_than"),
    [
        (2, 0),
        (5, 2),  # what two have passed is left out
    ],
)
def test_everywhere_includes_processes_on_cpus(processes: int, more_than: int) -> None:
    """Processes that speak gloo pass what simulated ranks pass, whatever number of them it takes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/core", "tests/cases"]
    run = subprocess.run(
        [sys.executable, *launcher, *tests, "--ranks=cpu", f"--more-than={more_than}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 0, run.stdout
