"""PyTorch's own parallelism runs unmodified, without findings, and with the values that gloo gives."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

import fsdp_sim
from tests.sim.parallel_programs import DDP, DTENSOR, FSDP1, FSDP2, pipeline, save_and_load
from tests.sim.processes import on_gloo

PROGRAMS = {
    f"{family} {name}": program
    for family, programs in (
        ("FSDP2", FSDP2),
        ("FSDP1", FSDP1),
        ("DDP", DDP),
        ("DTensor", DTENSOR),
    )
    for name, program in programs.items()
}

OF_PYTORCHS_OWN = (
    []
    if hasattr(schedules._PipelineSchedule, "_initialize_pp_stages")
    else [("Race", (2,)), ("Race", (3,))]
)
"""Up to torch 2.11 a middle stage warms up by receiving from both neighbours at once into one buffer, whose
value it never reads: the ranks of the middle stage."""


@pytest.fixture(scope="module")
def on_processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What four real processes give."""
    return on_gloo(PROGRAMS, 4, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_clean_and_gives_what_processes_give(
    name: str, on_processes: dict[str, list[Any]]
) -> None:
    """Outputs are NaN until they are complete; values agree bit for bit."""
    report = fsdp_sim.simulate(PROGRAMS[name], 4, poison=True)

    assert report.results == on_processes[name]


def test_checkpoints_are_saved_and_loaded(tmp_path: Path) -> None:
    """Every rank has the weights again that it saved."""
    report = fsdp_sim.simulate(partial(save_and_load, folder=tmp_path), 4, poison=True)
    expected = fsdp_sim.simulate(FSDP2["plain"], 4).results

    weights, count = report.results[0][:-1], [result[-1] for result in report.results]
    assert len(weights) == len(expected[0]) - 2
    assert any(weights)
    assert all(result[:-1] == weights for result in report.results)
    assert count == [8.0, 0.0, 0.0, 0.0]


def test_a_pipeline_of_sharded_stages_is_clean_and_gives_what_processes_give(
    tmp_path: Path,
) -> None:
    """3 stages x 2 data-parallel ranks under FSDP2."""
    report = fsdp_sim.simulate(pipeline, 6, poison=True, strict=False)

    assert [(finding.kind, finding.ranks) for finding in report.findings] == OF_PYTORCHS_OWN
    assert all("'recv' and 'recv' of one batch" in each.message for each in report.findings)
    assert report.results == on_gloo({"pipeline": pipeline}, 6, tmp_path)["pipeline"]
