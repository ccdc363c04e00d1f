"""The picture of a finding: both operations are pointed at, with what is wrong between them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fsdp_sim
from fsdp_sim.views.finding_picture import draw_finding


def race(_: int) -> None:
    """Use what a reduction on another stream still writes."""
    tensor, side = torch.ones(4), torch.cpu.Stream()
    side.wait_stream(torch.cpu.current_stream())
    with torch.cpu.stream(side):
        dist.all_reduce(tensor)
    tensor.mul_(2)


def mismatch(rank: int) -> None:
    """Reduce another size on each rank."""
    dist.all_reduce(torch.ones(4 + rank))


def deadlock(rank: int) -> None:
    """Reduce on one rank alone."""
    if rank == 1:
        dist.all_reduce(torch.ones(4))


def leak(_: int) -> None:
    """Keep memory of the device when the program has ended."""
    KEPT.append(torch.ones(4) + 1)


KEPT: list[torch.Tensor] = []


def picture(program: Callable[[int], None], path: Path) -> str:
    """Draw the first finding of a program and return the file's text."""
    report = fsdp_sim.simulate(program, 2, strict=False, trace=True)
    draw_finding(report.trace.ops, report.findings[0], 2, path)
    KEPT.clear()
    return path.read_text()


@pytest.mark.parametrize(
    ("program", "texts"),
    [
        (
            race,
            (
                "1  all_reduce",
                "dist.all_reduce(tensor)",
                "2  mul_.Tensor",
                "missing: nothing orders",
            ),
        ),
        (
            mismatch,
            ("1  all_reduce", "2  all_reduce", "differs in sizes: (4,) on one, (5,) on the other"),
        ),
        (deadlock, ("1  all_reduce", "never completes: all_reduce", "not issued by [0]")),
        (leak, ("rank 0  compute", "bytes")),
    ],
)
def test_a_finding_is_drawn_with_its_operations_and_its_cause(
    program: Callable[[int], None], texts: tuple[str, ...], tmp_path: Path
) -> None:
    """In the words of the report."""
    drawn = picture(program, tmp_path / "finding.svg")

    for text in texts:
        assert text in drawn


def test_the_same_finding_is_the_same_picture(tmp_path: Path) -> None:
    """Byte for byte, so that a picture can be kept beside a page and compared."""
    one, other = (picture(race, tmp_path / f"{name}.svg") for name in ("one", "other"))

    assert one == other
