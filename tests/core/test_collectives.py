"""Which collectives a change of placements takes: no more than it needs, and none left out."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import fsdp_sim
from fsdp_core.dbuffer import DBuffer
from fsdp_core.layout import GlobalLayout
from fsdp_core.layout_builder import build_for_row_atomic, build_for_tensor_atomic
from fsdp_core.placement import TensorAtomic
from tests.core.worlds import make_mesh

R, S, AVG = Replicate(), Shard(0), Partial("avg")


def collectives_of(
    layout: GlobalLayout, source: list[Any], target: list[Any], *shape: int
) -> list[str]:
    """Names of what rank 0 issues, in order."""

    def program(rank: int) -> None:
        buffer = DBuffer.empty(make_mesh(*shape), source, layout, torch.float32)
        buffer.flat.zero_()
        buffer.redistribute(target)

    report = fsdp_sim.simulate(program, layout.dp_size, trace=True)
    return [op.call.name for op in report.trace.ops if op.rank == 0 and op.call is not None]


@pytest.mark.parametrize(
    ("source", "target", "names"),
    [
        ([S], [R], ["all_gather"]),
        ([AVG], [S], ["reduce_scatter"]),
        ([AVG], [R], ["all_reduce"]),
        ([R], [S], []),
        ([AVG], [AVG], []),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_equal_shards_take_one_collective_for_an_axis(
    source: list[Any], target: list[Any], names: list[str], world_size: int
) -> None:
    """At world size 1 too: what is not issued there would not be tested there."""
    layout = build_for_row_atomic([(3, 2)], world_size)

    assert collectives_of(layout, source, target, world_size) == names


@pytest.mark.parametrize(
    ("source", "target", "names"),
    [
        ([S, S], [R, R], ["all_gather", "all_gather"]),
        ([AVG, AVG], [S, S], ["reduce_scatter", "reduce_scatter"]),
        ([AVG, AVG], [R, S], ["reduce_scatter", "all_reduce"]),
        ([AVG, S], [R, S], ["all_reduce"]),
        ([AVG, S], [R, R], ["all_reduce", "all_gather"]),
    ],
)
def test_each_axis_of_two_takes_one_collective(
    source: list[Any], target: list[Any], names: list[str]
) -> None:
    """Inner reductions first, so that outer ones work on less."""
    layout = build_for_row_atomic([(8, 2)], 4)

    assert collectives_of(layout, source, target, 2, 2) == names


@pytest.mark.parametrize(
    ("source", "target", "name"),
    [([TensorAtomic()], [R], "broadcast"), ([AVG], [TensorAtomic()], "reduce")],
)
def test_unequal_shards_take_one_collective_for_each_that_is_not_empty(
    source: list[Any], target: list[Any], name: str
) -> None:
    """Rank 1 owns nothing here, and nobody waits for it."""
    layout = build_for_tensor_atomic([(4, 2), (1, 2)], 3, [0, 2])

    assert collectives_of(layout, source, target, 3) == [name, name]
