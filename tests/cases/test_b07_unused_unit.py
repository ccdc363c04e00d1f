"""B07: a unit that is not used in a step stays as it was."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_sim
from fsdp_core import SchedulePolicy
from fsdp_core.unit import ShardedUnit
from tests.cases.programs import (
    Row,
    Training,
    assert_resting,
    batch,
    check_parity,
    fill,
    gathered,
    linear,
    loss_of,
    ops_by_step,
    reduced,
    shard,
    train_shards,
)

NAMES = ("E1", "E2", "head")
NO_PREFETCH = SchedulePolicy(forward_prefetch_size=0, backward_prefetch_size=0)


def alternating(**options: Any) -> Training:
    """Encoder E1 on even steps and E2 on odd ones, on all ranks."""

    def step(model: nn.Module, rank: int, number: int) -> None:
        calls = (NAMES[number % 2], "head")
        loss_of(model(batch(rank, number), calls), rank).backward()

    return Training(lambda: fill(Row(*NAMES)), step, (*NAMES, ""), steps=4, options=options)


@pytest.mark.filterwarnings("ignore:step")
def test_a_unit_that_is_not_called_is_neither_gathered_nor_reduced() -> None:
    """pytorch#83107, #80245: its gradient is None and it rests; nothing is asserted about it."""
    report = check_parity(alternating(schedule_policy=NO_PREFETCH))

    for number, ops in enumerate(ops_by_step(report)):
        used, unused = NAMES[number % 2], NAMES[1 - number % 2]
        assert gathered(ops) == [used, "head", "head", used]
        assert reduced(ops) == ["head", used]
        for rank in report.results:
            assert rank[number].gradients[f"{unused}.weight"] is None


@pytest.mark.filterwarnings("ignore:step")
def test_a_unit_that_was_prefetched_in_vain_is_not_reduced_either() -> None:
    """pytorch#83129: one gather, in forward, and it rests after the step."""
    report = check_parity(alternating())

    for number, ops in enumerate(ops_by_step(report)):
        unused = NAMES[1 - number % 2]
        assert gathered(ops).count(unused) == 1
        assert unused not in reduced(ops)


class Untouched(nn.Module):
    """Has a weight, and returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` itself."""
        return x


@pytest.mark.filterwarnings("ignore:step")
def test_a_unit_that_returns_its_input_rests_and_lets_the_gradient_pass() -> None:
    """pytorch#83129: whether the units around it are trained or not."""

    def program(rank: int) -> tuple[Tensor, bool]:
        model = fill(nn.Sequential(linear(), Untouched(), linear()))
        shard(model, "0", "1", "2", "")
        x = batch(rank).requires_grad_()
        loss_of(model(x), rank).backward()
        assert_resting(model)
        assert x.grad is not None
        weight = model.get_submodule("1").weight
        assert isinstance(weight, nn.Parameter)
        return x.grad.clone(), weight.grad is None

    report = fsdp_sim.simulate(program, 2)

    for rank, (gradient, is_none) in enumerate(report.results):
        model = fill(nn.Sequential(linear(), Untouched(), linear()))
        x = batch(rank).requires_grad_()
        loss_of(model(x), rank).backward()
        assert x.grad is not None
        assert torch.equal(gradient, x.grad)
        assert is_none


def test_a_lone_unit_that_returns_its_input_rests() -> None:
    """Nothing of the runtime takes part in this backward."""

    def program(rank: int) -> Tensor:
        model = Untouched()
        shard(model, "")
        x = batch(rank).requires_grad_()
        loss_of(model(x), rank).backward()
        assert_resting(model)
        assert model.weight.grad is None
        assert x.grad is not None
        return x.grad.clone()

    results = fsdp_sim.simulate(program, 2).results

    for rank, gradient in enumerate(results):
        x = batch(rank).requires_grad_()
        loss_of(x, rank).backward()
        assert x.grad is not None
        assert torch.equal(gradient, x.grad)


@pytest.mark.filterwarnings("ignore:step")
def test_an_unused_unit_that_keeps_its_weights_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect planted: only a unit that was used is brought to rest."""
    monkeypatch.setattr(ShardedUnit, "come_to_rest", lambda _: None)

    training = replace(alternating(), steps=1, rests=False)

    with pytest.raises(fsdp_sim.NotAtRest, match="left in flight") as caught:
        fsdp_sim.simulate(train_shards, 2, args=(training,))

    assert "fsdp_core::unshard E2" in str(caught.value)
