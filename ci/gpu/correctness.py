"""Correctness: the tests of the runtime, run where a GPU is; those for GPUs are not skipped there."""

import subprocess
import sys

BODIES = ("tests/core",)


def run() -> dict[str, object]:
    """Run the tests of the runtime and return pytest's last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *BODIES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout[-6000:])
    return {"exit": done.returncode, "summary": done.stdout.strip().splitlines()[-1:]}
