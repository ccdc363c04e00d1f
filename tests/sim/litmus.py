"""Litmus: run a few lines on one simulated rank and see what is found."""

from collections.abc import Callable
from typing import Any

import torch

import fsdp_sim
from fsdp_sim.errors import Finding
from fsdp_sim.op import Op

cpu: Any = torch.cpu
accelerator: Any = torch.accelerator  # noqa: TID251  its equivalents are what is tested
"""Modules whose stream functions a world replaces; PyTorch's types for them are those of stubs."""


def on_one_rank(program: Callable[[], Any], **options: Any) -> Any:
    """Return what ``program()`` returns on the only rank of a world; findings are raised."""
    return fsdp_sim.simulate(lambda _rank: program(), 1, **options).results[0]


def findings(
    program: Callable[[], Any], world_size: int = 1, **options: Any
) -> tuple[Finding, ...]:
    """Return what is found wrong with ``program()`` run by every rank."""
    report = fsdp_sim.simulate(lambda _rank: program(), world_size, strict=False, **options)
    return report.findings


def is_racy(program: Callable[[], Any], **options: Any) -> bool:
    """Whether a race is found in ``program()``; early reuse of memory may be found beside it."""
    kinds = {finding.kind for finding in findings(program, **options)}
    assert kinds in (set(), {"Race"}, {"Race", "UseAfterFree"}), kinds
    return bool(kinds)


def ops_of(program: Callable[[], Any], **options: Any) -> list[Op]:
    """Return the ops of ``program()`` on one rank."""
    report = fsdp_sim.simulate(lambda _rank: program(), 1, trace=True, **options)
    return list(report.trace.ops)
