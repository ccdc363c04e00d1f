"""The tests that are marked `everywhere`, on real processes: all in one set, which starts slowly."""

import os
import subprocess
import sys


def test_everywhere_includes_processes_on_cpus() -> None:
    """Two processes that speak gloo pass what simulated ranks pass."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/core", "tests/cases"]
    run = subprocess.run(
        [*launcher, *tests, "--ranks=cpu"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 0, run.stdout
