"""Speed as ratios within one run: ``python -m ci.bench [PART...]``; appends to ``out/bench.jsonl``.

Seconds of one machine say little; what one way costs over another, run in turns, says what changed.
"""

import json
import subprocess
from pathlib import Path

import click

from ci.bench import host, kit, simulator

PARTS = {"host": host.run, "kit": kit.run, "simulator": simulator.run}


def commit() -> str:
    """Return the commit that is measured."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice(sorted(PARTS)))
@click.option("--out", type=click.Path(path_type=Path), default=Path("out/bench.jsonl"))
def main(parts: tuple[str, ...], out: Path) -> None:
    """Run the parts named (all of them when none is) and append their tables."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for part in parts or sorted(PARTS):
        table = PARTS[part]()
        with out.open("a") as lines:
            lines.write(json.dumps({"commit": commit(), "part": part, "table": table}) + "\n")


if __name__ == "__main__":
    main()
