"""B58: a sharded module says at once that it cannot be copied, and what to do instead."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import fsdp_sim
from fsdp_core import StateError
from tests.cases.programs import assert_equal, batch, fill, linear, local_rows, loss_of, shard

COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "averaged weights": AveragedModel,
}


def build() -> nn.Module:
    """A unit inside a container that is none."""
    model = fill(nn.Sequential(linear()))
    shard(model, "0")
    return model


@pytest.mark.parametrize("way", list(COPIES))
def test_a_copy_of_a_unit_is_refused(way: str) -> None:
    """pytorch#82070, #149138, #117776: not deep inside, by something that cannot be pickled."""

    def program(rank: int) -> str:
        with pytest.raises(StateError) as caught:
            COPIES[way](build()[0])  # type: ignore[index]
        return str(caught.value)

    message = (
        "a sharded module must not be copied or pickled, got a FsdpLinear, unit '<root>'; build a "
        "second model, shard it and load_state_dict the first one's state, or copy the model before "
        "sharding"
    )
    assert fsdp_sim.simulate(program, 2).results == [message, message]


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "averaged weights"])
def test_a_copy_of_a_container_around_a_unit_is_refused(way: str) -> None:
    """With the unit named."""

    def program(rank: int) -> None:
        with pytest.raises(
            StateError, match="must not be copied or pickled, got a FsdpLinear, unit"
        ):
            COPIES[way](build())

    fsdp_sim.simulate(program, 2)


def test_what_the_message_says_works() -> None:
    """A second model with the first one's state is independent of it."""

    def program(rank: int) -> None:
        first, second = build(), build()
        loss_of(first(batch(rank)), rank).backward()
        torch.optim.SGD(first.parameters(), lr=1.0).step()
        second.load_state_dict(first.state_dict())
        assert_equal(local_rows(second), local_rows(first))
        before = local_rows(second)
        torch.optim.SGD(first.parameters(), lr=1.0).step()
        assert_equal(local_rows(second), before)

    fsdp_sim.simulate(program, 2)
