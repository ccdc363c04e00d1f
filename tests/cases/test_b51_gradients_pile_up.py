"""B51: gradients of earlier steps do not pile up under hybrid sharding."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import nn

import fsdp_core
import fsdp_sim
from fsdp_core import RuntimePolicy
from fsdp_sim.op import Kind, Op
from tests.cases.programs import (
    HYBRID,
    STEP,
    batch,
    begin_step,
    fill,
    linear,
    local_rows,
    loss_of,
    shard,
)

STEPS = 4


def train(rank: int, policy: RuntimePolicy) -> None:
    """Steps of one unit on 2 replicas of 2 shards; each drops its gradients at the end."""
    model: nn.Module = fill(nn.Sequential(linear(4, 4)))
    shard(model, "", mesh=(2, 2), placements=HYBRID, runtime_policy=policy)
    optimizer = fsdp_core.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    for number in range(STEPS):
        loss_of(model(batch(rank, number, width=4)), rank).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert all(parameter.grad is None for parameter in model.parameters())
        begin_step(number)


def keep_gradients(rank: int) -> None:
    """The same steps, by a program that holds a copy of each step's gradient."""
    model: nn.Module = fill(nn.Sequential(linear(4, 4)))
    shard(model, "", mesh=(2, 2), placements=HYBRID)
    kept = []
    for number in range(STEPS):
        loss_of(model(batch(rank, number, width=4)), rank).backward()
        kept.append(local_rows(model, grads=True))
        model.zero_grad(set_to_none=True)
        begin_step(number)


def live_blocks(ops: Sequence[Op], rank: int) -> list[list[int]]:
    """The sizes of the blocks that are allocated at each mark of `begin_step`."""
    live: dict[int, int] = {}
    steps = []
    for op in ops:
        if op.rank != rank:
            continue
        if op.kind is Kind.ALLOC:
            live[op.other] = op.nbytes
        elif op.kind is Kind.FREE:
            del live[op.other]
        elif op.kind is Kind.RANGE_PUSH and op.name.startswith(STEP):
            steps.append(sorted(live.values()))
    return steps


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_alive_after_a_step_is_the_same_for_every_step(overlap: bool) -> None:
    """pytorch#139234, #179443: one main gradient a group, and nothing of an earlier step."""
    policy = RuntimePolicy(overlap_outer_communication=overlap)

    report = fsdp_sim.simulate(train, 4, args=(policy,), trace=True)

    for rank in range(4):
        first, *others = live_blocks(report.trace.all_ops(), rank)
        assert others == [first] * (STEPS - 1)
        # This rank's weights and its main gradient: half of 16 elements of 4 bytes each.
        assert first.count(32) <= 2
        assert max(first) == 32


def test_gradients_that_a_program_keeps_are_seen_to_pile_up() -> None:
    """The defect planted: a shard more is alive after each step."""
    report = fsdp_sim.simulate(keep_gradients, 4, trace=True)

    for rank in range(4):
        counts = [blocks.count(32) for blocks in live_blocks(report.trace.all_ops(), rank)]
        assert [after - before for before, after in pairwise(counts)] == [1] * (STEPS - 1)
