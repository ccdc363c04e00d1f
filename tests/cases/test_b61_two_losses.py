"""B61: two losses of one forward, one after the other, each have their gradients."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fsdp_core import FsdpModule
from fsdp_core.unit import ShardedUnit
from fsdp_core.uses import Use
from tests.cases.programs import (
    Row,
    Training,
    assert_resting,
    batch,
    check_parity,
    check_values,
    fill,
    gathered,
    loss_of,
    ops_by_step,
    reduced,
)


def losses(count: int, drops: Sequence[bool]) -> Training:
    """One forward, several backwards that retain the graph; gradients are dropped in between."""

    def step(model: nn.Module, rank: int, number: int) -> None:
        y = model(batch(rank, number))
        each = [loss_of(y, rank + other) for other in range(count)]
        before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        for position, loss in enumerate(each):
            loss.backward(retain_graph=position < count - 1)
            if isinstance(model, FsdpModule):
                assert_resting(model)
            if position < count - 1 and drops[position]:
                for parameter, gradient in zip(model.parameters(), before, strict=True):
                    parameter.grad = None if gradient is None else gradient.clone()

    return Training(lambda: fill(Row("a", "b")), step, ("a", "b", ""))


def test_the_second_loss_has_its_own_gradients() -> None:
    """pytorch#106637: gathered once forward and once for each backward, and reduced for each."""
    report = check_parity(losses(2, [True]))

    (ops,) = ops_by_step(report)
    assert gathered(ops) == ["a", "b", "b", "a", "b", "a"]
    assert reduced(ops) == ["b", "a", "b", "a"]


@pytest.mark.everywhere
@given(st.integers(1, 3), st.lists(st.booleans(), min_size=2, max_size=2))
@settings(max_examples=4)
def test_any_number_of_losses_adds_up(count: int, drops: list[bool]) -> None:
    """Where gradients are kept in between, they are summed."""
    check_values(losses(count, drops))


def test_a_second_loss_that_finds_no_weights_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect planted: a forward makes a unit's backward begin, once."""
    begun: set[Use] = set()
    pre_backward = ShardedUnit.pre_backward

    def only_once(unit: ShardedUnit, module: nn.Module, use: Use) -> None:
        if use not in begun:
            begun.add(use)
            pre_backward(unit, module, use)

    monkeypatch.setattr(ShardedUnit, "pre_backward", only_once)

    with pytest.raises(RuntimeError, match="storage of size 0"):
        check_parity(losses(2, [True]))
