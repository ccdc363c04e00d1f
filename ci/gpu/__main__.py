"""What one GPU shows, in named parts: ``python -m ci.gpu PART... --out FILE``.

Each part takes under 8 minutes on one GPU and writes its table under its name into the same JSON file,
so that parts can be repeated one by one on any machine.  ``docs/gpu.md`` holds the results.
"""

import json
import platform
from pathlib import Path

import click
import torch

from ci.gpu import (
    correctness,
    findings,
    graphs,
    litmus,
    memory,
    orders,
    overlap,
    profile,
    sanitizer,
    timing,
)

PARTS = {
    "correctness": correctness.run,
    "time-small": lambda: timing.run("small"),
    "time-large": lambda: timing.run("large"),
    "profile": profile.run,
    "graphs": graphs.run,
    "memory": memory.run,
    "orders": orders.run,
    "overlap": overlap.run,
    "litmus": litmus.run,
    "findings": findings.run,
    "sanitizer": sanitizer.run,
}


def machine() -> dict[str, object]:
    """Return the hardware and the versions that results belong to."""
    return {
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version()))
        if torch.cuda.is_available()
        else None,
        "python": platform.python_version(),
    }


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice(sorted(PARTS)))
@click.option("--out", type=click.Path(path_type=Path), default=Path("out/gpu.json"))
def main(parts: tuple[str, ...], out: Path) -> None:
    """Run the parts named (all of them when none is) and merge their results into one file."""
    results = json.loads(out.read_text()) if out.exists() else {}
    out.parent.mkdir(parents=True, exist_ok=True)
    for part in parts or sorted(PARTS):
        click.echo(f"== {part}")
        results[part] = {"machine": machine(), "table": PARTS[part]()}
        out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
