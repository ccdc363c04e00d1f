"""Correctness: the tests of the runtime on the GPU, over NCCL alone and over gloo with several ranks on it."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from ci.gpu.process import has_gpu

BODIES = ("tests/core", "tests/cases")
WORLD_SIZES = (1, 2, 4)
TEST_SECONDS_MAX = 100
"""How long one test may take: a bound for one that hangs, nothing is measured."""


def run() -> dict[str, object]:
    """Run the bodies on 1, 2 and 4 ranks side by side, and return pytest's summary of each."""
    with ThreadPoolExecutor() as pool:
        tables = pool.map(on_ranks, WORLD_SIZES)
    return {f"{world_size} ranks": table for world_size, table in zip(WORLD_SIZES, tables)}


def on_ranks(world_size: int) -> dict[str, object]:
    """Run the bodies on ranks that have a GPU each, or share the first; on CPUs, if there is none."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    pytest = ["-m", "pytest", "-q", "-rsfE", "-p", "no:cacheprovider", "-p", "no:xdist"]
    hanging = ["-o", f"faulthandler_timeout={TEST_SECONDS_MAX}"]  # shows where each thread stands
    ranks = f"--ranks={'cuda' if has_gpu() else 'cpu'}"
    done = subprocess.run(
        [*launcher, f"--nproc-per-node={world_size}", *pytest, *hanging, *BODIES, ranks],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout[-20000:])
    lines = done.stdout.splitlines()
    return {
        "exit": done.returncode,
        "summary": [line for line in lines if re.search(r"\d+ (passed|failed)", line)][-1:],
        "left out": sorted({line for line in lines if line.startswith("SKIPPED")}),
        "failed": sorted({line for line in lines if line.startswith(("FAILED", "ERROR"))}),
    }
