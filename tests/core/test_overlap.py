"""Overlap: how many gathers and reductions of a step some matrix product is not ordered with."""

from collections.abc import Sequence
from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import fsdp_core
from fsdp_core import FsdpModule, Placements, RuntimePolicy, SchedulePolicy
from fsdp_sim.mutation.graph import Graph
from fsdp_sim.op import Kind, Op
from tests.cases.programs import Row, Training, batch, check_parity, fill, loss_of, ops_by_step

NAMES = ("a", "b", "c", "d")
N = len(NAMES)
R, P, S = Replicate(), Partial("avg"), Shard(0)
ZERO_1 = Placements((0,), (R,), (P,), (S,))
ZERO_2 = Placements((0,), (R,), (S,), (S,))
ZERO_3 = Placements((0,), (S,), (S,), (S,))


def two_microbatches(model: nn.Module, rank: int, number: int) -> None:
    """Two forwards and backwards, of which the second ends the window."""
    for is_last in (False, True):
        if isinstance(model, FsdpModule):
            with fsdp_core.microbatch(model.context, is_last=is_last):
                loss_of(model(batch(rank, number)), rank).backward()
        else:
            loss_of(model(batch(rank, number)), rank).backward()


def second_step(**options: Any) -> list[Op]:
    """The ops of rank 0 in a step whose weights the optimizer has just written."""
    training = Training(
        lambda: fill(Row(*NAMES)), two_microbatches, (*NAMES, ""), steps=2, options=options
    )
    return ops_by_step(check_parity(training))[1]


def counts(ops: Sequence[Op], label: str) -> tuple[int, int]:
    """How many collectives of a label there are, and how many of them overlap a matrix product."""
    graph = Graph(ops)
    products = [graph.nodes[op.index] for op in ops if op.name.startswith("mm")]
    labelled = [
        graph.nodes[op.index]
        for op in ops
        if op.kind is Kind.COLLECTIVE and (op.annotation or "").startswith(f"fsdp_core::{label} ")
    ]
    overlapping = [
        each
        for each in labelled
        if any(not each.is_after(product) and not product.is_after(each) for product in products)
    ]
    return len(labelled), len(overlapping)


@pytest.mark.parametrize(
    ("placements", "gathers", "reductions"),
    [
        (ZERO_1, (N, N - 1), (N, N - 1)),
        # The last reduction of the first microbatch runs beside the second one's forward.
        (ZERO_2, (N, N - 1), (2 * N, 2 * (N - 1) + 1)),
        (ZERO_3, (4 * N, 4 * (N - 1)), (2 * N, 2 * (N - 1) + 1)),
    ],
    ids=["ZeRO-1", "ZeRO-2", "ZeRO-3"],
)
def test_all_but_the_outermost_collectives_overlap_compute(
    placements: Placements, gathers: tuple[int, int], reductions: tuple[int, int]
) -> None:
    """What a pass begins with has nothing before it to hide behind, what it ends with nothing behind."""
    ops = second_step(placements=placements)

    assert counts(ops, "unshard") == gathers
    assert counts(ops, "reduce_gradients") == reductions


def test_without_a_budget_no_gather_overlaps_compute() -> None:
    """Each is issued when its weights are needed."""
    policy = SchedulePolicy(forward_prefetch_size=0, backward_prefetch_size=0)
    ops = second_step(placements=ZERO_3, schedule_policy=policy)

    assert counts(ops, "unshard") == (4 * N, 0)


@pytest.mark.parametrize(("overlap", "number"), [(True, 3), (False, 2)])
def test_gathers_reductions_and_products_have_a_stream_each(*, overlap: bool, number: int) -> None:
    """Or gathers and reductions share one, where the policy says so."""
    policy = RuntimePolicy(overlap_allgather_reduction=overlap)
    ops = second_step(placements=ZERO_3, runtime_policy=policy)

    streams = {op.stream for op in ops if op.kind is Kind.COLLECTIVE or op.name.startswith("mm")}
    assert len(streams) == number
