"""Every check of the project; one that fails does not keep the later ones from running."""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
PYTEST_PROCESSES = 2
SLOWEST_SHOWN = 10


def checks(pytest_arguments: list[str]) -> dict[str, list[str]]:
    """Return the command of each check by name; pytest is last, so that its line closes the output."""
    spread = [f"--numprocesses={PYTEST_PROCESSES}", "--dist=worksteal"]
    pytest = ["pytest", *spread, f"--durations={SLOWEST_SHOWN}"]
    return {
        "format": ["ruff", "format", "--check", "."],
        "lint": ["ruff", "check", "."],
        "types": ["mypy"],
        "contracts": ["lint-imports", "--no-logo"],
        "tests": [*pytest, *pytest_arguments],
    }


def run_check(name: str, command: list[str]) -> bool:
    """Run one check from the root of the checkout, print its time, and say whether it passed."""
    print(f"== {name}: {' '.join(command)}", flush=True)
    start = time.perf_counter()
    returncode = subprocess.run([BIN / command[0], *command[1:]], cwd=ROOT, check=False).returncode
    if name != "tests":
        verdict = "ok" if returncode == 0 else "FAILED"
        print(f"== {name}: {verdict} in {time.perf_counter() - start:.1f} s\n", flush=True)
    return returncode == 0


def main() -> int:
    """Run all checks and return the exit status: 0 only when each passed."""
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    failed = [
        name for name, command in checks(sys.argv[1:]).items() if not run_check(name, command)
    ]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
