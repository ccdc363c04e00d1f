"""B52: a step that raised can be made again, and one that raised on one rank is told to the others."""

import re
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fsdp_sim
from fsdp_core import FsdpModule, StateError, clip_grad_norm_, fully_shard_optimizer
from tests.cases.programs import (
    Row,
    Training,
    assert_resting,
    batch,
    check_parity,
    check_values,
    fill,
    loss_of,
    shard,
    units_in,
)

NAMES = ("A", "B", "C")


class OutOfMemory(Exception):
    """What a user catches."""


class Interrupt(BaseException):
    """What a key press raises."""


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *_gradients: Any) -> Any:
        raise OutOfMemory


class Fragile(nn.Module):
    """A layer that raises in its forward or its backward when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.raises_in = ""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, or raise."""
        y = x @ self.weight
        if self.raises_in == "forward":
            raise OutOfMemory
        if self.raises_in == "interrupt":
            raise Interrupt
        if self.raises_in == "backward":
            y = _Failing.apply(y)  # type: ignore[no-untyped-call]
        return y


def build() -> nn.Module:
    """A, B and C in a row; each can be told to raise."""
    return fill(Row(**{name: Fragile() for name in NAMES}))


def attempt(model: nn.Module, rank: int, number: int) -> None:
    """One forward and backward."""
    loss_of(model(batch(rank, number)), rank).backward()


def failing_once(unit: str, phase: str, resets: bool) -> Training:
    """In step 1 a unit raises on all ranks; it is caught and the step is made again."""

    def step(model: nn.Module, rank: int, number: int) -> None:
        if number == 1 and units_in(model):
            layer = model.get_submodule(unit)
            layer.raises_in = phase  # type: ignore[assignment]
            with pytest.raises(OutOfMemory):
                attempt(model, rank, number)
            layer.raises_in = ""  # type: ignore[assignment]
            recover(model, phase, resets)
        attempt(model, rank, number)

    return Training(build, step, (*NAMES, ""), steps=3)


def recover(model: nn.Module, phase: str, resets: bool) -> None:
    """Bring the units to rest as a user does: not at all, after a forward; by `reset` otherwise."""
    assert isinstance(model, FsdpModule)
    if phase == "forward":
        assert_resting(model)
    if resets:
        model.context.reset()
        assert_resting(model)
    elif phase == "backward":
        warnings.filterwarnings("ignore", "the last backward pass of this FsdpContext did not end")


@pytest.mark.everywhere
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_same_step_again_has_parity(phase: str) -> None:
    """mosaicml/composer#3866, accelerate#1675: everything rests, and nothing leaks."""
    check_values(failing_once("B", phase, resets=phase == "backward"))


def test_an_interrupt_in_forward_is_followed_by_a_reset() -> None:
    """PyTorch runs no hooks behind what is no `Exception`; the next forward says what to do."""

    def step(model: nn.Module, rank: int, number: int) -> None:
        if number == 1 and isinstance(model, FsdpModule):
            model.get_submodule("B").raises_in = "interrupt"  # type: ignore[assignment]
            with pytest.raises(Interrupt):
                attempt(model, rank, number)
            model.get_submodule("B").raises_in = ""  # type: ignore[assignment]
            with pytest.raises(
                StateError, match=re.escape("or context.reset() after an interrupt")
            ):
                attempt(model, rank, number)
            model.context.reset()
            assert_resting(model)
        attempt(model, rank, number)

    check_parity(Training(build, step, (*NAMES, ""), steps=3))


def test_the_next_forward_resets_by_itself_and_says_so_once() -> None:
    """Where nobody called `reset` after a backward that raised."""

    def program(rank: int) -> list[str]:
        model = build()
        shard(model, *NAMES, "")
        layer = model.get_submodule("B")
        layer.raises_in = "backward"  # type: ignore[assignment]
        with pytest.raises(OutOfMemory):
            attempt(model, rank, 0)
        layer.raises_in = ""  # type: ignore[assignment]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            attempt(model, rank, 0)
            attempt(model, rank, 0)
        assert_resting(model)
        return [str(each.message) for each in caught]

    message = (
        "the last backward pass of this FsdpContext did not end; the context was reset and all "
        "its gradients were dropped, since part of them may be missing"
    )
    assert fsdp_sim.simulate(program, 2).results == [[message]] * 2


@pytest.mark.parametrize("use", ["step", "clip"])
def test_gradients_of_a_backward_that_raised_are_not_used(use: str) -> None:
    """Part of them is missing, which no value shows; what to do stands in the error."""

    def program(rank: int) -> list[Tensor]:
        model = build()
        shard(model, *NAMES, "")
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        layer = model.get_submodule("B")
        layer.raises_in = "backward"  # type: ignore[assignment]
        with pytest.raises(OutOfMemory):
            attempt(model, rank, 0)
        with pytest.raises(
            StateError, match=r"^a backward pass must end before .* context\.reset\(\)"
        ):
            optimizer.step() if use == "step" else clip_grad_norm_(model.parameters(), 1.0)
        assert isinstance(model, FsdpModule)
        model.context.reset()
        return [weight.full_tensor() for weight in model.parameters()]  # type: ignore[attr-defined]

    expected = [weight.detach() for weight in build().parameters()]
    for weights in fsdp_sim.simulate(program, 2, checkers=("races",)).results:
        assert all(map(torch.equal, weights, expected))


@pytest.mark.everywhere
@given(st.sampled_from(NAMES), st.sampled_from(["forward", "backward"]), st.booleans())
@settings(max_examples=6)
def test_any_unit_may_raise_in_either_phase(unit: str, phase: str, resets: bool) -> None:
    """And whether or not the user resets the context."""
    check_values(failing_once(unit, phase, resets))


def test_the_rank_that_raised_is_named_to_the_one_that_waits() -> None:
    """One rank's exception comes out as itself, with what the other one was waiting for."""

    def program(rank: int) -> None:
        model = build()
        shard(model, *NAMES, "")
        model.get_submodule("B").raises_in = "forward" if rank == 1 else ""  # type: ignore[assignment]
        attempt(model, rank, 0)

    with pytest.raises(OutOfMemory) as caught:
        fsdp_sim.simulate(program, 2)

    notes = "\n".join(caught.value.__notes__)
    assert "raised on simulated rank 1" in notes
    assert "Deadlock" in notes
    assert "rank 0 waits" in notes
    assert "rank 1 ended with OutOfMemory()" in notes
