"""``fsdp-sim doctor``: what is installed, and whether the simulator finds what it must here."""

import platform
import sys
from importlib import metadata

import click

from fsdp_sim.doctor import blind_spots, patched_names

PACKAGES = ("torch", "numpy", "hypothesis", "pytest", "pytest-xdist", "rich", "matplotlib")
TORCH_TESTED = ("2.11", "2.13")


@click.command()
@click.option("--names", is_flag=True, help="list every name of PyTorch that a world replaces")
def doctor(**shown: bool) -> None:
    """Show versions and what is not seen here, and try a correct and a wrong program."""
    click.echo(f"fsdp-sim {metadata.version('fsdp-sim')}, Python {platform.python_version()}")
    for package in PACKAGES:
        click.echo(f"  {package:<13} {_version(package)}")
    tested = any(_version("torch").startswith(f"{version}.") for version in TORCH_TESTED)
    if not tested:
        click.echo(f"  this torch is none of those tested: {', '.join(TORCH_TESTED)}")
    _show_names(in_full=shown["names"])
    for line in blind_spots():
        click.echo(f"not seen: {line}")
    is_well = _finds_what_it_must()
    click.echo("a correct program is clean, a wrong one is found" if is_well else "NOT WELL")
    click.echo("what the simulator cannot see: docs/limits.md")
    sys.exit(0 if is_well else 1)


def _show_names(*, in_full: bool) -> None:
    """Say which names a world replaces, and name those that this PyTorch lacks."""
    found = patched_names()
    absent = [each.name for each in found if each.state == "absent"]
    click.echo(f"a world replaces {len(found) - len(absent)} names")
    for each in found if in_full else ():
        click.echo(f"  {each.state:<8} {each.name}")
    if absent:
        click.echo(f"  absent in this version: {', '.join(absent)}")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _finds_what_it_must() -> bool:
    import torch
    import torch.distributed as dist

    import fsdp_sim

    def program(_rank: int, waits: bool) -> float:  # noqa: FBT001
        tensor, side = torch.ones(4), torch.cpu.Stream()
        side.wait_stream(torch.cpu.current_stream())
        with torch.cpu.stream(side):
            dist.all_reduce(tensor)
        if waits:
            torch.cpu.current_stream().wait_stream(side)
        return tensor.sum().item()

    right, wrong = (
        fsdp_sim.simulate(program, 2, args=(waits,), strict=False) for waits in (True, False)
    )
    return not right.findings and "Race" in {finding.kind for finding in wrong.findings}
