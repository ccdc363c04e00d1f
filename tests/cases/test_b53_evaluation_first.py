"""B53: evaluation before, between and after training steps leaves nothing behind."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fsdp_sim
from fsdp_core import SchedulePolicy
from fsdp_core.parameter_group import ParameterGroup
from tests.cases.programs import (
    ZERO_1,
    Row,
    Training,
    assert_resting,
    batch,
    check_values,
    fill,
    loss_of,
    shard,
    units_in,
)

Mode = Callable[[], AbstractContextManager[Any]]


def evaluate(model: nn.Module, rank: int, mode: Mode) -> None:
    """A forward without gradients, after which everything rests."""
    with mode():
        model(batch(rank))
    assert_resting(model)


def load(model: nn.Module, mode: Mode) -> None:
    """Load other integers."""
    state = {name: torch.ones_like(each) for name, each in model.state_dict().items()}
    with mode():
        model.load_state_dict(state)


def train(model: nn.Module, rank: int, number: int) -> None:
    """A forward and backward."""
    loss_of(model(batch(rank, number)), rank).backward()


def mixed(**options: Any) -> Training:
    """The program of the report."""

    def step(model: nn.Module, rank: int, number: int) -> None:
        if number == 0:
            evaluate(model, rank, torch.inference_mode)
        else:
            evaluate(model, rank, torch.no_grad)
            load(model, torch.inference_mode)
        train(model, rank, number)

    return Training(lambda: fill(Row("a", "b")), step, ("a", "b", ""), steps=2, options=options)


@pytest.mark.everywhere
def test_training_after_inference_mode_has_parity() -> None:
    """pytorch#113203, #95957, #146709, #197327; pytorch-lightning#16908."""
    check_values(mixed())


@pytest.mark.everywhere
def test_it_has_parity_where_weights_are_whole() -> None:
    """Under ZeRO-1 the loaded weights must reach the full ones."""
    check_values(mixed(placements=ZERO_1))


@pytest.mark.everywhere
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weights_that_an_evaluation_keeps_do_not_hide_what_is_loaded(mode: Mode) -> None:
    """With `reshard_after_forward=False` they stay gathered until the training's backward."""

    def step(model: nn.Module, rank: int, number: int) -> None:
        with mode():
            model(batch(rank))
        if number:
            load(model, mode)
        train(model, rank, number)

    kept = {"schedule_policy": SchedulePolicy(reshard_after_forward=False)}
    check_values(Training(lambda: fill(Row("a", "b")), step, ("a", "b", ""), 3, options=kept))


def test_weights_that_an_evaluation_keeps_are_freed_by_reshard() -> None:
    """With `reshard_after_forward=False`; nothing else is needed before the next step."""
    kept = SchedulePolicy(reshard_after_forward=False)

    def program(rank: int) -> list[int]:
        context = shard(model := fill(Row("a")), "a", schedule_policy=kept)
        with torch.no_grad():
            model(batch(rank))
        held = [context.stats.full_nbytes]
        for module in units_in(model):
            module.reshard()
        assert_resting(model)
        return [*held, context.stats.full_nbytes]

    # One weight [2, 2] in fp32.
    assert fsdp_sim.simulate(program, 2).results == [[16, 0]] * 2


ACTS: dict[str, Callable[[nn.Module, int], None]] = {
    "nothing": lambda model, rank: None,
    "no_grad": lambda model, rank: evaluate(model, rank, torch.no_grad),
    "inference_mode": lambda model, rank: evaluate(model, rank, torch.inference_mode),
    "load": lambda model, rank: load(model, torch.no_grad),
    "load in inference_mode": lambda model, rank: load(model, torch.inference_mode),
}


@pytest.mark.everywhere
@given(st.lists(st.sampled_from(sorted(ACTS)), min_size=1, max_size=3))
@settings(max_examples=6)
def test_any_order_of_evaluation_training_and_loading_has_parity(order: list[str]) -> None:
    """One act before the training of each step."""

    def step(model: nn.Module, rank: int, number: int) -> None:
        ACTS[order[number]](model, rank)
        train(model, rank, number)

    check_values(Training(lambda: fill(Row("a", "b")), step, ("a", "b", ""), len(order)))


def test_weights_that_an_evaluation_left_behind_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect planted: what was gathered once is taken for current, whatever was loaded since."""
    never_gathered = property(lambda group: group._main_version == -1)
    monkeypatch.setattr(ParameterGroup, "is_stale", never_gathered)

    def program(rank: int) -> torch.Tensor:
        shard(model := fill(Row("a", "b")), "a", "b", "", placements=ZERO_1)
        evaluate(model, rank, torch.no_grad)
        load(model, torch.no_grad)
        with torch.no_grad():
            return model(batch(rank))

    # Each rank holds one row of a layer: that one it sees loaded, the other as it was.
    for rank, output in enumerate(fsdp_sim.simulate(program, 2).results):
        half_loaded = fill(Row("a", "b"))
        with torch.no_grad():
            for parameter in half_loaded.parameters():
                parameter[rank] = 1
        assert torch.equal(output, half_loaded(batch(rank)))
