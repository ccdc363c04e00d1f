"""B55: a unit whose inputs require no gradient is reduced as soon as its gradients exist."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.profiler import record_function

from fsdp_core.torch_private import queue_backward_callback
from fsdp_core.unit import ShardedUnit
from fsdp_sim.op import Kind, Op
from tests.cases.programs import (
    Training,
    batch,
    check_parity,
    check_values,
    fill,
    linear,
    loss_of,
    ops_by_step,
    reduced,
)


class TwoTables(nn.Module):
    """Two embeddings of ids under a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.E1, self.E2 = nn.Embedding(3, 2), nn.Embedding(4, 2)
        self.top = linear(2, 4)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Look both up."""
        y: Tensor = self.top(torch.cat([self.E1(first), self.E2(second)], 1))
        return y


END = "fsdp_core::end of backward"


def end_backward() -> None:
    """Mark in the trace that no gradient is still to come; queued before the runtime's callback."""
    with record_function(END):
        pass


def step(model: nn.Module, rank: int, number: int) -> None:
    """Other ids on each rank and in each step."""
    ids = torch.tensor([rank, (rank + number) % 3])
    loss = loss_of(model(ids, ids + 1), rank)
    loss.register_hook(lambda _grad: queue_backward_callback(end_backward))
    loss.backward()


TABLES = Training(lambda: fill(TwoTables()), step, ("E1", "E2", "top", ""), steps=2)


def reduced_in_time(ops: Sequence[Op]) -> list[str]:
    """The units that were reduced before the callbacks at the end of backward, in order."""
    is_end = (op.kind is Kind.RANGE_PUSH and op.name == END for op in ops)
    return reduced(ops[: list(is_end).index(True)])


def test_both_tables_are_reduced_before_the_end_of_backward() -> None:
    """pytorch#129259: not put off to the callback that ends it."""
    for ops in ops_by_step(check_parity(TABLES)):
        assert sorted(reduced_in_time(ops)) == ["E1", "E2", "top"]
        assert len(reduced(ops)) == 3


def test_reductions_that_are_put_off_to_the_end_of_backward_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The defect planted: gradients are counted, and only the callback at the end acts on them."""
    monkeypatch.setattr(ShardedUnit, "retry", lambda _unit: None)
    monkeypatch.setattr(ShardedUnit, "leave_section", lambda _unit: None)

    for ops in ops_by_step(check_parity(TABLES)):
        assert reduced_in_time(ops) == []
        assert len(reduced(ops)) == 3


@pytest.mark.everywhere
@given(st.lists(st.booleans(), min_size=2, max_size=4))
@settings(max_examples=5)
def test_inputs_may_switch_between_requiring_gradients_and_not(requires: list[bool]) -> None:
    """From step to step."""

    def switching(model: nn.Module, rank: int, number: int) -> None:
        x = batch(rank, number).requires_grad_(requires[number])
        loss_of(model(x), rank).backward()
        assert (x.grad is not None) is requires[number]

    check_values(
        Training(
            lambda: fill(nn.Sequential(linear(), linear())),
            switching,
            ("0", "1", ""),
            len(requires),
        )
    )
