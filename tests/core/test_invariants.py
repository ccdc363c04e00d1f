"""The invariants that every test is watched for: each finds what breaks it."""

import pytest
import torch

import fsdp_core
from fsdp_core.gradients import Gradients
from fsdp_core.parameter_group import ParameterGroup
from fsdp_core.unit import ShardedUnit
from fsdp_core.weights import Weights
from tests.cases.programs import Row, batch, fill, loss_of, shard
from tests.core import invariants
from tests.core.worlds import on_simulated_ranks


def train(rank: int) -> None:
    """Two steps of two units in a third."""
    shard(model := fill(Row("a", "b")), "a", "b", "")
    optimizer = fsdp_core.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    for number in range(2):
        loss_of(model(batch(rank, number)), rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def breaks(message: str) -> None:
    """Check that the training breaks an invariant."""
    with pytest.raises(AssertionError, match=message):
        on_simulated_ranks(train, 2, strict=False)


def test_a_clean_run_breaks_none() -> None:
    """The control of the tests below."""
    on_simulated_ranks(train, 2)


def test_a_unit_that_is_not_resharded_behind_its_forward_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its weights would have their memory through all other forwards."""
    monkeypatch.setattr(ShardedUnit, "_leave_forward", lambda _unit, _call, *, failed: None)

    breaks(r"^b is unsharded|^a is unsharded")


def test_a_unit_that_is_not_resharded_in_its_backward_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No unit is gathered once a pass is complete."""
    monkeypatch.setattr(ShardedUnit, "_leave_weights", lambda _unit: None)
    monkeypatch.setattr(ShardedUnit, "come_to_rest", lambda _unit: None)

    breaks(r"^\w is unsharded")


def test_a_second_reduction_in_a_window_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group is reduced once in a pass."""
    reduce = Gradients.reduce

    def twice(gradients: Gradients) -> None:
        reduce(gradients)
        reduce(gradients)

    monkeypatch.setattr(Gradients, "reduce", twice)

    breaks(r"^\w was reduced 2 times")


def test_a_window_that_is_not_reduced_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit that backward has entered."""

    def drop(gradients: Gradients) -> None:
        gradients.window.reduced = True
        for member in gradients._members:
            member.full.grad = None

    monkeypatch.setattr(Gradients, "reduce", drop)

    breaks(r"^\w was entered, and not reduced")


def test_gradients_that_are_not_dropped_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were copied, so they would be copied again."""
    copy_in = ParameterGroup.copy_in

    def keep(group: ParameterGroup) -> None:
        grads = [member.full.grad for member in group.members]
        copy_in(group)
        for member, grad in zip(group.members, grads, strict=True):
            member.full.grad = grad

    monkeypatch.setattr(ParameterGroup, "copy_in", keep)

    breaks(r"^\w has gradients")


def test_a_forward_on_weights_of_an_earlier_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were never freed, and nobody asks whether they are stale."""
    monkeypatch.setattr(ParameterGroup, "is_stale", False)
    monkeypatch.setattr(Weights, "reshard", lambda _weights: None)
    monkeypatch.setattr(invariants, "check_rest", lambda _unit: None)
    monkeypatch.setattr(invariants, "check_behind_forward", lambda _context: None)

    breaks(r"^\w runs on weights of an earlier step")


def test_gathers_that_nobody_asked_for_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """And that were not early either."""
    demand = Weights.demand

    def after_two_more(weights: Weights) -> None:
        if not weights.is_unsharded:
            for _ in range(2):
                weights._gather(early=False)
                weights.reshard()
        demand(weights)

    monkeypatch.setattr(Weights, "demand", after_two_more)

    breaks(r"^\d+ gathers for \d+ uses")
