"""Determinism: one schedule is one run, in any process, whatever ran before."""

import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fsdp_sim
from tests.sim.programs import order_by_query, sum_of_ranks


def train(rank: int) -> list[float]:
    """Train a small sharded model with dropout for two steps."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(2)])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    losses = []
    for _ in range(2):
        loss = model(torch.randn(2, 8)).pow(2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def facts(report: Any) -> tuple[Any, ...]:
    """Return what two equal runs have in common."""
    return report.trace.digest, report.trace.order_digest, report.results, report.schedule


def test_the_second_run_is_the_first_one_again() -> None:
    """Also after unrelated runs, failed ones among them, and under another schedule in between."""
    first = facts(fsdp_sim.simulate(train, 2))
    fsdp_sim.simulate(sum_of_ranks, 3)
    with pytest.raises(ZeroDivisionError):
        fsdp_sim.simulate(lambda rank: 1 // rank, 2)
    fsdp_sim.simulate(train, 2, scheduler="uniform", seed=3)

    assert facts(fsdp_sim.simulate(train, 2)) == first


def test_what_pytorch_keeps_of_the_first_world_changes_nothing_in_the_second() -> None:
    """A mesh that some cache of PyTorch holds lives longer than an equal one of a later world."""

    def program(rank: int) -> float:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("only_here",))
        full = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]) * 2
        assert isinstance(full, DTensor)
        return float(full.to_local().sum())

    first, second = fsdp_sim.simulate(program, 2), fsdp_sim.simulate(program, 2)

    assert facts(first) == facts(second)


def test_a_random_schedule_is_repeated_by_its_seed_and_by_its_line() -> None:
    """The same seed gives the same run, and so does replaying the line."""
    first = fsdp_sim.simulate(train, 2, scheduler="uniform", seed=7)
    by_seed = fsdp_sim.simulate(train, 2, scheduler="uniform", seed=7)
    by_line = fsdp_sim.replay(train, first.schedule)

    assert ">" in first.schedule
    assert facts(by_seed) == facts(by_line) == facts(first)


def test_every_rank_does_the_same_under_every_schedule() -> None:
    """What one rank does depends on its values alone, so one run stands for all host orders."""
    seeds = [fsdp_sim.simulate(train, 2, scheduler="uniform", seed=seed) for seed in range(3)]

    assert len({report.schedule for report in seeds}) == 3
    assert len({report.trace.digest for report in seeds}) == 1
    assert len({str(report.results) for report in seeds}) == 1


def test_digests_do_not_depend_on_process_hash_seed_or_whether_a_world_is_the_first() -> None:
    """Two worlds in each of two fresh processes under other hash seeds are all the same."""
    code = (
        "import fsdp_sim; from tests.sim.test_determinism import train;"
        "print(*(fsdp_sim.simulate(train, 2).trace.digest for _ in range(2)))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=dict(os.environ, PYTHONHASHSEED=seed),
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("0", "12345")
    ]
    digests = " ".join(process.communicate()[0] for process in processes).split()

    assert digests == [fsdp_sim.simulate(train, 2).trace.digest] * 4


# ---------------------------------------------------------------------- the self-check


def test_recheck_accepts_what_is_deterministic() -> None:
    """Two equal runs give the report of the first."""
    plain = fsdp_sim.simulate(train, 2, scheduler="uniform", seed=1)

    checked = fsdp_sim.simulate(train, 2, scheduler="uniform", seed=1, recheck=True)

    assert facts(checked) == facts(plain)


def test_recheck_names_the_first_step_at_which_two_runs_differ() -> None:
    """A program that does something else the second time is no program to search schedules of."""
    runs = itertools.count()

    def program(rank: int) -> None:
        if rank == 0:
            for _ in range(next(runs)):
                dist.all_reduce(torch.ones(1))
        dist.barrier()

    with pytest.raises(fsdp_sim.Nondeterminism) as caught:
        fsdp_sim.simulate(program, 1, recheck=True)

    assert str(caught.value).startswith("two runs of one schedule must be the same, got ")


def test_recheck_notices_ops_that_differ_though_no_decision_does() -> None:
    """The ranks whose ops differ are named; with a trace, the first op that does."""
    runs = itertools.count(1)

    def program(rank: int) -> None:
        if rank == 1:
            torch.ones(next(runs))

    with pytest.raises(fsdp_sim.Nondeterminism, match=r"first differing op: .*rank 1"):
        fsdp_sim.simulate(program, 2, recheck=True, trace=True)


def test_a_search_checks_one_run_in_twenty() -> None:
    """A program that keeps state is noticed, though every run of it is clean."""

    def search(schedules: int) -> Any:
        runs = itertools.count(1)
        return fsdp_sim.explore(lambda rank: torch.ones(next(runs)), 1, schedules=schedules)

    assert search(19).failure is None
    with pytest.raises(
        fsdp_sim.Nondeterminism, match=r"^two runs of one schedule must be the same"
    ):
        search(20)


def test_recheck_raises_what_the_first_run_found() -> None:
    """A failure that comes up twice is the failure, not nondeterminism."""
    with pytest.raises(fsdp_sim.CollectiveMismatch):
        fsdp_sim.simulate(order_by_query, 2, schedule="v1;w2;2>1", recheck=True)
