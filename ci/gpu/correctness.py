"""Correctness: the test bodies that say what the runtime does, run where the tensors are on a GPU."""

import os
import subprocess
import sys

BODIES = ("tests/core",)


def run() -> dict[str, object]:
    """Run the conformance tests with CUDA visible and return pytest's last line."""
    environment = {**os.environ, "FSDP_TEST_DEVICE": "cuda"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *BODIES]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    print(done.stdout[-6000:])
    return {"exit": done.returncode, "summary": done.stdout.strip().splitlines()[-1:]}
