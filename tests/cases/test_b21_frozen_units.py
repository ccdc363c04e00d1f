"""B21: frozen units are freed during backward, not at its end."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fsdp_core.unit import ShardedUnit
from fsdp_sim.op import Kind, Op
from tests.cases.programs import (
    Row,
    Training,
    batch,
    check_parity,
    fill,
    loss_of,
    ops_by_step,
    reduced,
)


def frozen_row(frozen: Sequence[bool], root: bool = True) -> Training:
    """Units in a row, some of them frozen."""
    names = [f"u{number}" for number in range(len(frozen))]

    def build() -> nn.Module:
        model = fill(Row(*names))
        for name, is_frozen in zip(names, frozen, strict=True):
            model.get_submodule(name).requires_grad_(not is_frozen)
        return model

    def step(model: nn.Module, rank: int, number: int) -> None:
        loss_of(model(batch(rank, number)), rank).backward()

    return Training(build, step, [*names, ""] if root else names, steps=2)


def most_gathered_in_backward(ops: Sequence[Op]) -> int:
    """How many units had full weights at once, from the first unit's backward on."""
    full: dict[int, None] = {}
    most, is_backward = 0, False
    for op in ops:
        label = op.annotation or ""
        if op.kind is Kind.ALLOC and label.startswith("fsdp_core::unshard"):
            full[op.other] = None
        elif op.kind is Kind.FREE:
            full.pop(op.other, None)
        elif op.kind is Kind.RANGE_PUSH and op.name.startswith("fsdp_core::backward"):
            is_backward = True
        most = max(most, len(full) if is_backward else 0)
    return most


def test_at_most_two_units_are_gathered_at_once_behind_a_trainable_front() -> None:
    """pytorch#95805, #101982, fairscale#1159: the current one and the next."""
    report = check_parity(frozen_row([False, *[True] * 6, False]))

    for ops in ops_by_step(report):
        assert most_gathered_in_backward(ops) == 2
        assert reduced(ops) == ["u7", "u0"]


def test_frozen_units_that_stay_until_the_end_of_backward_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The defect planted: only a gradient ends a unit's backward, and six units never get one."""
    monkeypatch.setattr(ShardedUnit, "leave_section", lambda _unit: None)

    report = check_parity(frozen_row([False, *[True] * 6, False]))

    assert [most_gathered_in_backward(ops) for ops in ops_by_step(report)] == [7, 7]


@given(st.lists(st.booleans(), min_size=1, max_size=5), st.booleans())
@settings(max_examples=6)
def test_any_frozen_units_have_parity_and_bounded_memory(frozen: list[bool], root: bool) -> None:
    """Whatever is frozen, with and without a unit around them."""
    frozen = [False, *frozen]

    for ops in ops_by_step(check_parity(frozen_row(frozen, root))):
        assert most_gathered_in_backward(ops) <= 2
        assert len(reduced(ops)) == frozen.count(False)
