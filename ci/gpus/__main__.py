"""What several GPUs show: ``torchrun --nproc-per-node N -m ci.gpus PART... --out FILE``.

One process for each GPU, on any number of nodes.  Each part runs on all ranks, and rank 0 writes its
table under its name into the same JSON file.  Without GPUs the parts run on CPUs over gloo, to see that
they do run.  ``docs/gpu.md`` holds the results.
"""

import json
from pathlib import Path

import click
import torch.distributed as dist

from ci.gpu.__main__ import machine
from ci.gpus import checkpoints, example, litmus, orders, parity, timing
from ci.gpus.launch import joined, meet

PARTS = {
    "parity": parity.run,
    "orders": orders.run,
    "example": example.run,
    "checkpoints": checkpoints.run,
    "litmus": litmus.run,
    "timing": timing.run,
}


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice(sorted(PARTS)))
@click.option("--out", type=click.Path(path_type=Path), default=Path("out/gpus.json"))
def main(parts: tuple[str, ...], out: Path) -> None:
    """Run the parts named (all of them when none is) and merge their results into one file."""
    with joined():
        results = json.loads(out.read_text()) if out.exists() else {}
        for part in parts or PARTS:
            meet()
            if dist.get_rank() == 0:
                click.echo(f"== {part}")
            table = PARTS[part]()
            results[part] = {"machine": machine(), "ranks": dist.get_world_size(), "table": table}
            if dist.get_rank() == 0:
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
