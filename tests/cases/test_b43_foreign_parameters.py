"""B43: an optimizer that holds parameters which training does not use says so at its step."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import fsdp_core
import fsdp_sim
from fsdp_core import ConfigError, Placements, SchedulePolicy
from tests.cases.programs import SHARDED, ZERO_1, linear, local_rows, shard

KEPT = SchedulePolicy(reshard_after_forward=False)


def build() -> nn.Module:
    """One layer of ones, so that a gradient of ones and a rate of 1 leave zeros."""
    model = nn.Sequential(linear(2, 1))
    nn.init.ones_(model[0].weight)  # type: ignore[arg-type]
    return model


def sgd(model: nn.Module, **options: Any) -> SGD:
    """A rate of 1."""
    return SGD(model.parameters(), lr=1.0, **options)


def train(model: nn.Module, optimizer: Optimizer) -> None:
    """One step with a gradient of ones."""
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()


def built_before_sharding() -> tuple[nn.Module, Optimizer]:
    """The usual mistake."""
    model = build()
    optimizer = sgd(model)
    shard(model, "0", "")
    return model, optimizer


def built_while_unsharded() -> tuple[nn.Module, Optimizer]:
    """After a forward that keeps the full parameters."""
    model = build()
    shard(model, "0", "", schedule_policy=KEPT)
    model(torch.ones(1, 1))
    return model, sgd(model)


MISTAKES = [built_before_sharding, built_while_unsharded]


@pytest.mark.parametrize("make", MISTAKES)
def test_a_step_with_full_parameters_is_refused(
    make: Callable[[], tuple[nn.Module, Optimizer]],
) -> None:
    """pytorch#149205, #107843: never a step that changes nothing."""

    def program(rank: int) -> str:
        model, optimizer = make()
        with pytest.raises(ConfigError) as caught:
            train(model, optimizer)
        return str(caught.value)

    message = (
        "an optimizer must hold the sharded parameters, got the full 'weight' of unit '0', whose "
        "gradient is taken away when it is reduced; build the optimizer after fully_shard and "
        "outside any forward"
    )
    assert fsdp_sim.simulate(program, 2).results == [message, message]


@pytest.mark.parametrize("make", MISTAKES)
def test_it_is_not_made_sharded_either(
    make: Callable[[], tuple[nn.Module, Optimizer]],
) -> None:
    """accelerate#3209, #3394: the error names the parameter and where the optimizer holds it."""

    def program(rank: int) -> None:
        _, optimizer = make()
        message = re.escape("got the full '0.weight' in param_groups[0]; build the optimizer after")
        with pytest.raises(ConfigError, match=message):
            fsdp_core.fully_shard_optimizer(optimizer)

    fsdp_sim.simulate(program, 2)


@pytest.mark.parametrize("is_made_sharded", [False, True])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("placements", [SHARDED, ZERO_1], ids=["zero3", "zero1"])
def test_an_optimizer_built_after_sharding_moves_the_weights(
    is_made_sharded: bool, foreach: bool, placements: Placements
) -> None:
    """Also one that was not handed to `fully_shard_optimizer`, and the next forward sees it."""

    def program(rank: int) -> tuple[float, Any]:
        model = build()
        shard(model, "0", "", placements=placements)
        optimizer: Optimizer = sgd(model, foreach=foreach)
        if is_made_sharded:
            optimizer = fsdp_core.fully_shard_optimizer(optimizer)
        train(model, optimizer)
        return model(torch.ones(1, 1)).sum().item(), local_rows(model)["0.weight"]

    for output, rows in fsdp_sim.simulate(program, 2).results:
        assert output == 0
        assert rows.tolist() == [[0.0]]


def test_an_optimizer_whose_step_was_replaced_is_not_made_sharded() -> None:
    """A scheduler that was built before would call the step of whole tensors, past the shards."""

    def program(rank: int) -> str:
        model = build()
        shard(model, "0", "")
        optimizer = sgd(model)
        LambdaLR(optimizer, lambda _step: 1.0)
        with pytest.raises(ConfigError) as caught:
            fsdp_core.fully_shard_optimizer(optimizer)
        return str(caught.value)

    message = (
        "an optimizer is made sharded before others change its step, got a SGD whose step was "
        "replaced (by a learning-rate scheduler, say), which would go past the shards; call "
        "fully_shard_optimizer first"
    )
    assert fsdp_sim.simulate(program, 2).results == [message, message]
