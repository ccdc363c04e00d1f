"""PyTorch's FSDP2, unmodified: code that nobody here wrote, with and without its synchronisation."""

from typing import Any

import pytest
import torch

import fsdp_sim
from tests.system import fsdp2_program
from tests.system.fsdp2_program import train
from tests.system.launch import on_processes, on_simulated_ranks

RANKS = 4
SCRIPT = fsdp2_program.__file__


def without(method: str) -> Any:
    """Return the training with one of the stream's methods doing nothing."""

    def broken(rank: int) -> list[float]:
        setattr(torch.cpu.Stream, method, lambda _stream, _other: None)
        return train(rank)

    return broken


def test_simulated_ranks_compute_what_processes_compute() -> None:
    """Sums are exact, so the order of additions is no excuse."""
    assert on_simulated_ranks(RANKS, SCRIPT) == on_processes(RANKS, SCRIPT)


def test_nothing_is_found() -> None:
    """Correct code has no findings, and all ranks end with the same weights."""
    report = fsdp_sim.simulate(train, RANKS)
    weights = [values[fsdp2_program.STEPS :] for values in report.results]

    assert report.findings == ()
    assert all(of_rank == weights[0] for of_rank in weights)


@pytest.mark.parametrize("method", ["wait_event", "wait_stream"])
def test_a_method_that_does_nothing_is_found(method: str) -> None:
    """Values stay right on a CPU; the missing order is seen all the same, with the user's own lines."""
    report = fsdp_sim.simulate(without(method), RANKS, strict=False)

    assert {"Race", "UseAfterFree"} & {finding.kind for finding in report.findings}
    sites = [site for finding in report.findings for site in finding.ops]
    in_pytorch = [site.source for site in sites if site.source and "/torch/" in site.source.file]
    assert {source.user and source.user.file for source in in_pytorch} == {SCRIPT}


def test_a_replaced_method_does_not_outlive_its_world() -> None:
    """The next world is whole again, and so are PyTorch's own classes."""
    original = torch.cpu.Stream.wait_event
    fsdp_sim.simulate(without("wait_event"), RANKS, strict=False)

    assert torch.cpu.Stream.wait_event is original
    assert fsdp_sim.simulate(train, RANKS).findings == ()
