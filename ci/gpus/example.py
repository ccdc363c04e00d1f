"""Example: the losses of examples/train_lm.py on real ranks and on simulated ones of the same number."""

import json
import re
import subprocess
import sys

import torch.distributed as dist

from ci.gpus.launch import in_fresh_processes, shared

SCRIPT = "examples/train_lm.py"
LOSS = re.compile(r"step +(\d+) +loss \S+ +(\S+)")


def run() -> dict[str, object]:
    """Return the largest relative difference of a loss; 0 where all are equal bit for bit."""
    text = in_fresh_processes("ci.gpus.example")[0]
    losses = text if isinstance(text, list) else []
    expected = shared(_simulated() if dist.get_rank() == 0 else None)
    row: dict[str, object] = {
        "steps": len(losses),
        "expected steps": len(expected),
        "largest relative difference": max(
            (abs(got / want - 1) for got, want in zip(losses, expected, strict=False)),
            default=None,
        ),
    }
    if not losses:
        row["raised"] = text
    if dist.get_rank() == 0:
        print(row)
    return row


def _simulated() -> list[float]:
    return losses_of(
        ["-m", "fsdp_sim.cli", "run", "--ranks", str(dist.get_world_size()), SCRIPT],
    )


def losses_of(command: list[str]) -> list[float]:
    """Return the losses that a command of Python's prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command], capture_output=True, text=True, check=True
    )
    return [float.fromhex(loss) for _, loss in LOSS.findall(done.stdout)]


if __name__ == "__main__":
    print(json.dumps(losses_of([SCRIPT])))
