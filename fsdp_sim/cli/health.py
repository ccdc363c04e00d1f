"""``fsdp-sim doctor``: versions, replaced names, and whether the simulator finds here what it must."""

import platform
import sys
from importlib import metadata
from typing import Any

import click

PACKAGES = ("torch", "numpy", "hypothesis", "pytest", "pytest-xdist", "rich", "matplotlib")
TORCH_TESTED = ("2.11", "2.13")
UNSEEN = (
    "races inside one kernel or inside NCCL; kernels that bypass PyTorch's dispatcher",
    "code that runs only on CUDA devices, and what is inside compiled code",
    "control flow that depends on time; state that ranks share through imported modules",
)


@click.command()
def doctor() -> None:
    """Show versions, what is replaced while a world runs, and try a correct and a wrong program."""
    click.echo(f"fsdp-sim {metadata.version('fsdp-sim')}, Python {platform.python_version()}")
    for package in PACKAGES:
        click.echo(f"  {package:<13} {_version(package)}")
    if not _version("torch").startswith(tuple(f"{version}." for version in TORCH_TESTED)):
        click.echo(f"  this torch is none of those tested: {', '.join(TORCH_TESTED)}")
    replaced, is_well = _try_programs()
    click.echo(f"names of PyTorch that are replaced while a world runs: {len(replaced)}")
    for name in replaced:
        click.echo(f"  {name}")
    click.echo("what a clean run does not show (docs/limits.md has all of it):")
    for line in UNSEEN:
        click.echo(f"  {line}")
    click.echo("a correct program is clean, a wrong one is found" if is_well else "NOT WELL")
    sys.exit(0 if is_well else 1)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _try_programs() -> tuple[list[str], bool]:
    """Return the names that a world replaces, and whether the right one of two programs is found wrong."""
    import fsdp_sim
    from fsdp_sim import patches

    names: dict[str, None] = {}
    replace = patches.Patches.replace

    def noting(self: Any, owner: Any, name: str, value: Any) -> None:
        if hasattr(owner, name):
            names[f"{_name_of(owner)}.{name}"] = None
        replace(self, owner, name, value)

    undo = patches.Patches()
    undo.replace(patches.Patches, "replace", noting)
    try:
        right, wrong = (
            fsdp_sim.simulate(_program, 2, args=(waits,), strict=False) for waits in (True, False)
        )
    finally:
        undo.undo()
    is_well = not right.findings and "Race" in {finding.kind for finding in wrong.findings}
    return sorted(names), is_well


def _name_of(owner: Any) -> str:
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}"
    return str(getattr(owner, "__name__", type(owner).__name__))


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
