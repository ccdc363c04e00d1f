"""B32: the number of reduction buffers alive does not grow with the number of layers."""

from collections.abc import Sequence
from weakref import WeakSet

import pytest
from torch import nn

import fsdp_sim
from fsdp_core import DBuffer, RuntimePolicy
from fsdp_core.parameter_group import ParameterGroup
from fsdp_sim.op import Kind, Op
from tests.cases.programs import begin_step, ops_by_step, shard
from tests.cases.test_b31_dropped_buffer import POLICY, Layers

BUFFER_NBYTES = 4 * 2 * 4
"""A whole gradient [4, 2] in fp32."""


def backward(rank: int, count: int, overlap: bool) -> None:
    """One step of so many equal units."""
    model: nn.Module = Layers(count)
    shard(
        model,
        *(f"layers.{number}" for number in range(count)),
        mesh=(2, 2),
        mixed_precision_policy=POLICY,
        runtime_policy=RuntimePolicy(overlap_outer_communication=overlap),
    )
    begin_step(0)
    model().backward()


def most_alive(ops: Sequence[Op]) -> int:
    """How many whole gradients in fp32 were allocated at once by reductions."""
    alive: dict[int, None] = {}
    most = 0
    for op in ops:
        if op.kind is Kind.ALLOC and (op.annotation or "").startswith("fsdp_core::reduce"):
            if op.nbytes == BUFFER_NBYTES:
                alive[op.other] = None
        elif op.kind is Kind.FREE:
            alive.pop(op.other, None)
        most = max(most, len(alive))
    return most


@pytest.mark.parametrize(
    ("count", "overlap"), [(2, True), (2, False), (8, True), (8, False), (32, True), (32, False)]
)
def test_two_buffers_serve_any_number_of_layers(count: int, overlap: bool) -> None:
    """pytorch#179443, #179129, #183617; that they live long enough is B31's test."""
    report = fsdp_sim.simulate(backward, 4, args=(count, overlap), trace=True)

    for rank in range(4):
        (ops,) = ops_by_step(report, rank)
        assert 1 <= most_alive(ops) <= 2


def test_a_buffer_that_each_layer_keeps_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect planted: what a reduction has read stays until the same layer reduces again."""
    kept: WeakSet[DBuffer] = WeakSet()
    reduce, release = ParameterGroup.reduce, DBuffer.release_storage

    def reduce_and_keep(group: ParameterGroup) -> None:
        kept.add(group._partial)
        reduce(group)

    def release_others(buffer: DBuffer) -> None:
        if buffer not in kept:
            release(buffer)

    monkeypatch.setattr(ParameterGroup, "reduce", reduce_and_keep)
    monkeypatch.setattr(DBuffer, "release_storage", release_others)

    report = fsdp_sim.simulate(backward, 4, args=(8, False), trace=True)

    assert [most_alive(ops_by_step(report, rank)[0]) for rank in range(4)] == [8] * 4
