"""``fsdp-sim doctor``: versions, replaced names, and whether the simulator finds here what it must."""

import platform
import sys
from importlib import metadata

import click

from fsdp_sim.doctor import blind_spots, patched_names

PACKAGES = ("torch", "numpy", "hypothesis", "pytest", "pytest-xdist", "rich", "matplotlib")
TORCH_TESTED = ("2.11", "2.13")
UNSEEN = (
    "races inside one kernel or inside NCCL; kernels that bypass PyTorch's dispatcher",
    "code that runs only on CUDA devices, and what is inside compiled code",
    "control flow that depends on time; state that ranks share through imported modules",
)


@click.command(short_help="Show versions, and try a correct and a wrong program.")
def doctor() -> None:
    """Show versions, try a correct and a wrong program, and list what a world replaces meanwhile."""
    click.echo(f"fsdp-sim {metadata.version('fsdp-sim')}, Python {platform.python_version()}")
    for package in PACKAGES:
        click.echo(f"  {package:<13} {_version(package)}")
    if not _version("torch").startswith(tuple(f"{version}." for version in TORCH_TESTED)):
        click.echo(f"  this torch is none of those tested: {', '.join(TORCH_TESTED)}")
    is_well = _finds_what_it_must()
    click.echo("a correct program is clean, a wrong one is found" if is_well else "NOT WELL")
    click.echo("what a clean run does not show (docs/limits.md has all of it):")
    for line in UNSEEN:
        click.echo(f"  {line}")
    for line in blind_spots():
        click.echo(f"  {line}")
    _show_names()
    sys.exit(0 if is_well else 1)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _show_names() -> None:
    """List the names that a world replaces, and those that this version of PyTorch lacks."""
    names = patched_names()
    absent = [each.name for each in names if each.state == "absent"]
    present = sorted(each.name for each in names if each.state != "absent")
    click.echo(f"names of PyTorch that are replaced while a world runs: {len(present)}")
    for name in present:
        click.echo(f"  {name}")
    if absent:
        click.echo(f"absent in this version: {', '.join(absent)}")


def _finds_what_it_must() -> bool:
    """Whether the right one of two programs is clean and the wrong one is found."""
    import fsdp_sim

    right, wrong = (
        fsdp_sim.simulate(_program, 2, args=(waits,), strict=False) for waits in (True, False)
    )
    return not right.findings and "Race" in {finding.kind for finding in wrong.findings}


def _program(_rank: int, waits: bool) -> float:  # noqa: FBT001
    import torch
    import torch.distributed as dist

    tensor, side = torch.ones(4), torch.cpu.Stream()
    side.wait_stream(torch.cpu.current_stream())
    with torch.cpu.stream(side):
        dist.all_reduce(tensor)
    if waits:
        torch.cpu.current_stream().wait_stream(side)
    return tensor.sum().item()
