"""B55: a unit whose inputs require no gradient is reduced as soon as its gradients exist."""

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fsdp_sim.op import Kind, Op
from tests.cases.programs import (
    Training,
    batch,
    check_parity,
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


def step(model: nn.Module, rank: int, number: int) -> None:
    """Other ids on each rank and in each step."""
    ids = torch.tensor([rank, (rank + number) % 3])
    loss_of(model(ids, ids + 1), rank).backward()


def completion(ops: Sequence[Op]) -> int:
    """Where the callback at the end of backward begins."""
    return next(
        position
        for position, op in enumerate(ops)
        if op.kind is Kind.RANGE_PUSH and op.name == "fsdp_core::complete"
    )


def test_both_tables_are_reduced_before_the_end_of_backward() -> None:
    """pytorch#129259: not put off to the callback that ends it."""
    training = Training(lambda: fill(TwoTables()), step, ("E1", "E2", "top", ""), steps=2)

    for ops in ops_by_step(check_parity(training)):
        assert sorted(reduced(ops[: completion(ops)])) == ["E1", "E2", "top"]
        assert len(reduced(ops)) == 3


@given(st.lists(st.booleans(), min_size=2, max_size=4))
@settings(max_examples=5)
def test_inputs_may_switch_between_requiring_gradients_and_not(requires: list[bool]) -> None:
    """From step to step."""

    def switching(model: nn.Module, rank: int, number: int) -> None:
        x = batch(rank, number).requires_grad_(requires[number])
        loss_of(model(x), rank).backward()
        assert (x.grad is not None) is requires[number]

    check_parity(
        Training(
            lambda: fill(nn.Sequential(linear(), linear())),
            switching,
            ("0", "1", ""),
            len(requires),
        )
    )
