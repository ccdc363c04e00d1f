"""Values alone: under the knob ``values`` operators run unseen, and collectives mean what they mean."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fsdp_sim
from fsdp_sim.errors import CollectiveMismatch, ConfigError, Deadlock
from fsdp_sim.op import Kind
from tests.sim.programs import gathered_on_a_side_stream

VALUES = ("values",)


def sums_asynchronously(rank: int) -> list[float]:
    """Reduce twice on the group's own stream, and wait."""
    tensor = torch.full((2,), float(rank + 1))
    dist.all_reduce(tensor, async_op=True)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    return [float(value) for value in tensor]


def exchanges(rank: int) -> float:
    """Pass the rank on around a ring."""
    world_size = dist.get_world_size()
    got, own = torch.empty(1), torch.full((1,), float(rank))
    ops = [
        dist.P2POp(dist.isend, own, (rank + 1) % world_size),
        dist.P2POp(dist.irecv, got, (rank - 1) % world_size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return got.item()


def reduces_functionally(rank: int) -> list[float]:
    """Reduce by a functional collective, whose kernel is C++."""
    everybody = dist.group.WORLD
    assert everybody is not None
    total = functional.all_reduce(torch.full((2,), float(rank)), "sum", everybody)
    return [float(value) for value in total]


def trains_replicated(rank: int) -> list[float]:
    """Average gradients by DDP's reducer, which waits for futures in C++."""
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    nn.init.ones_(model.module.weight)
    model(torch.full((1, 2), float(rank))).sum().backward()
    assert model.module.weight.grad is not None
    return [float(value) for value in model.module.weight.grad.flatten()]


def trains_sharded(rank: int) -> list[float]:
    """Train two steps of PyTorch's FSDP2."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for _ in range(2):
        loss = model(torch.full((2, 4), float(rank))).pow(2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "program",
    [sums_asynchronously, exchanges, reduces_functionally, trains_replicated, trains_sharded],
    ids=lambda program: program.__name__,
)
def test_values_are_those_of_a_run_that_sees_operators(program: Any) -> None:
    """Whatever way a collective is called and waited for."""
    unseen = fsdp_sim.simulate(program, 2, knobs=VALUES).results

    assert unseen == fsdp_sim.simulate(program, 2).results


def test_a_sum_is_the_sum_of_all_ranks() -> None:
    """1 + 2 = 3 on both ranks, and 3 + 3 = 6."""
    assert fsdp_sim.simulate(sums_asynchronously, 2, knobs=VALUES).results == [[6.0, 6.0]] * 2


def test_operators_are_no_ops() -> None:
    """Only collectives, streams and events are."""
    report = fsdp_sim.simulate(trains_sharded, 2, knobs=VALUES, trace=True)

    assert {op.kind for op in report.trace.ops} & {Kind.ATEN, Kind.ALLOC, Kind.FREE} == set()


def test_a_missing_wait_goes_unseen() -> None:
    """This is what the speed costs: with operators seen, the same program is a race."""
    program = gathered_on_a_side_stream
    unseen = fsdp_sim.simulate(lambda rank: program(rank, waits=False), 2, knobs=VALUES)

    assert unseen.findings == ()


def test_a_rank_that_stays_away_is_a_deadlock() -> None:
    """Rank 0 waits inside the collective, as with gloo."""

    def program(rank: int) -> None:
        if rank == 0:
            dist.all_reduce(torch.ones(1))

    with pytest.raises(Deadlock, match="missing: rank 1"):
        fsdp_sim.simulate(program, 2, knobs=VALUES)


def test_collectives_that_differ_are_a_mismatch() -> None:
    """They are compared as ever."""

    def program(rank: int) -> None:
        dist.all_reduce(torch.ones(1 + rank))

    with pytest.raises(CollectiveMismatch):
        fsdp_sim.simulate(program, 2, knobs=VALUES)


def test_a_collective_outside_the_ranks_is_refused() -> None:
    """A thread of the program has no rank."""
    from concurrent.futures import ThreadPoolExecutor

    def program(_: int) -> None:
        with ThreadPoolExecutor() as threads:
            threads.submit(dist.all_reduce, torch.ones(1)).result()

    with pytest.raises(fsdp_sim.UnseenThread, match="must be used on the rank's own thread"):
        fsdp_sim.simulate(program, 1, knobs=VALUES)


def test_the_schedule_line_holds_the_knob() -> None:
    """A replay makes the same decisions, and gives the same digest."""
    first = fsdp_sim.simulate(exchanges, 3, knobs=VALUES, scheduler="uniform", seed=1)

    assert "values" in first.schedule
    assert fsdp_sim.replay(exchanges, first.schedule).trace.digest == first.trace.digest


@pytest.mark.parametrize("other", ["late", "cuda"])
def test_what_needs_operators_is_refused(other: str) -> None:
    """Before the run begins."""
    message = (
        "the knob 'values', under which no operator is seen, must not be joined with "
        f"{other!r}, which needs them, got both"
    )
    with pytest.raises(ConfigError) as caught:
        fsdp_sim.simulate(exchanges, 2, knobs=(*VALUES, other))

    assert str(caught.value) == message


def test_the_audit_of_operators_is_refused() -> None:
    """It looks at nothing else."""
    with pytest.raises(ConfigError) as caught:
        fsdp_sim.simulate(exchanges, 2, knobs=VALUES, audit=True)

    assert str(caught.value) == "audit=True must not be joined with the knob 'values', got both"
