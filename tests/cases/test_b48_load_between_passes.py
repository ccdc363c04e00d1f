"""B48: what is loaded between a forward and its backward is used, and what is saved is sharded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp_sim
from fsdp_core import Placements, SchedulePolicy, StateError
from fsdp_core.parameter_group import ParameterGroup
from tests.cases.programs import (
    SHARDED,
    ZERO_1,
    Training,
    assert_resting,
    batch,
    check_values,
    linear,
    loss_of,
    shard,
)

KEPT = SchedulePolicy(reshard_after_forward=False)
ONE = torch.ones(1, 2)


def ones(policy: SchedulePolicy, placements: Placements = SHARDED) -> nn.Module:
    """Two units of ones."""
    model = nn.Sequential(linear(2, 2), linear(2, 2))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    shard(model, "0", "1", "", schedule_policy=policy, placements=placements)
    return model


POLICIES = pytest.mark.parametrize(
    "policy", [SchedulePolicy(), KEPT], ids=["resharded", "kept unsharded"]
)


@POLICIES
def test_a_forward_after_the_load_uses_what_was_loaded(policy: SchedulePolicy) -> None:
    """pytorch#117421: full weights kept from the forward before do not hide it."""

    def program(rank: int) -> list[float]:
        model = ones(policy)
        state = {name: torch.full_like(each, 2) for name, each in model.state_dict().items()}
        outputs = [model(ONE).sum().item()]
        model.load_state_dict(state)
        outputs.append(model(ONE).sum().item())
        return outputs

    assert fsdp_sim.simulate(program, 2).results == [[8.0, 32.0]] * 2


@POLICIES
def test_a_backward_of_the_forward_before_the_load_is_refused(policy: SchedulePolicy) -> None:
    """Its graph needs the weights that are gone; without sharding autograd refuses it too."""

    def program(rank: int) -> str:
        model = ones(policy)
        state = {name: torch.full_like(each, 2) for name, each in model.state_dict().items()}
        loss = model(ONE).sum()
        model.load_state_dict(state)
        with pytest.raises(StateError) as caught:
            loss.backward()
        model.context.reset()  # type: ignore[union-attr, operator]
        model(ONE).sum().backward()
        assert_resting(model)
        return str(caught.value)

    message = (
        "a backward must find the weights that its forward used, got unit '1' whose weights were "
        "written in between (a loaded state dict, an optimizer's step); run the forward again"
    )
    assert fsdp_sim.simulate(program, 2).results == [message] * 2


@POLICIES
def test_a_state_taken_between_the_passes_is_sharded(policy: SchedulePolicy) -> None:
    """And the backward goes on."""

    def program(rank: int) -> list[float]:
        model = ones(policy)
        loss = model(ONE).sum()
        state = model.state_dict()
        assert all(isinstance(each, DTensor) for each in state.values())
        loss.backward()
        assert_resting(model)
        return [each.to_local().sum().item() for each in state.values()]

    assert fsdp_sim.simulate(program, 2).results == [[2.0, 2.0]] * 2


def test_a_load_inside_a_forward_is_refused() -> None:
    """There the full weights are in use."""

    def program(rank: int) -> str:
        model = ones(KEPT)
        state = model.state_dict()
        messages = []

        def load(module: nn.Module, _args: object) -> None:
            with pytest.raises(StateError) as caught:
                module.load_state_dict(state)
            messages.append(str(caught.value))

        model.get_submodule("1").register_forward_pre_hook(load)
        model(ONE)
        return messages[0]

    message = (
        "loading a state dict needs the sharded parameters, got the full ones of unit '1' in use "
        "(FORWARD); do it between passes, after reshard()"
    )
    assert fsdp_sim.simulate(program, 2).results == [message] * 2


def write_by_load(model: nn.Module) -> None:
    """Load a state dict of twos."""
    model.load_state_dict({n: torch.full_like(each, 2) for n, each in model.state_dict().items()})


def write_by_initialiser(model: nn.Module) -> None:
    """Initialise anew."""
    for parameter in model.parameters():
        nn.init.constant_(parameter, 2)


def write_by_operator(model: nn.Module) -> None:
    """Write the parameters."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


def write_by_local_operator(model: nn.Module) -> None:
    """Write this rank's rows."""
    with torch.no_grad():
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            parameter.to_local().add_(1)


@pytest.mark.parametrize(
    "write",
    [write_by_load, write_by_initialiser, write_by_operator, write_by_local_operator],
)
@pytest.mark.parametrize("placements", [SHARDED, ZERO_1], ids=["zero3", "zero1"])
def test_whatever_writes_the_shards_the_next_forward_sees_it(
    write: Callable[[nn.Module], None], placements: Placements
) -> None:
    """Also where the full weights never go away."""

    def program(rank: int) -> list[float]:
        model = ones(KEPT, placements)
        outputs = []
        for _ in range(2):
            with torch.no_grad():
                outputs.append(model(ONE).sum().item())
            model.reshard(recurse=True)  # type: ignore[operator]
            write(model)
        return outputs

    assert fsdp_sim.simulate(program, 2).results == [[8.0, 32.0]] * 2


class Clamped(nn.Module):
    """A layer that keeps its weight small, by writing it in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 2), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        """Clamp, and multiply."""
        with torch.no_grad():
            self.weight.clamp_(-1, 1)
        return x @ self.weight.T


def write_by_hand(model: nn.Module) -> None:
    """Write the gathered weights."""
    unit: Any = model.get_submodule("0")
    unit.unshard()
    nn.init.constant_(unit.weight, 2)
    unit.reshard()


def write_in_forward(model: nn.Module) -> None:
    """Run a module that writes its own weight."""
    model(ONE)


@pytest.mark.parametrize("write", [write_by_hand, write_in_forward])
@POLICIES
def test_a_write_of_full_weights_is_refused_where_it_would_be_lost(
    write: Callable[[nn.Module], None], policy: SchedulePolicy
) -> None:
    """What a rank gathered is dropped, and nothing carries it back to the shards."""

    def program(rank: int) -> str:
        model = nn.Sequential(Clamped(), linear())
        shard(model, "0", "1", "", schedule_policy=policy)
        with pytest.raises(StateError) as caught:
            write(model)
        return str(caught.value)

    message = (
        "full weights must not be written, got a write of ['weight'] of unit '0', which is lost when "
        "they are freed; write the sharded parameters between passes, under torch.no_grad()"
    )
    assert fsdp_sim.simulate(program, 2).results == [message] * 2


@pytest.mark.everywhere
def test_a_write_of_full_weights_is_kept_where_they_are() -> None:
    """Where each rank holds them whole and writes the same, as without sharding."""

    def step(model: nn.Module, rank: int, number: int) -> None:
        loss_of(model(batch(rank, number)), rank).backward()

    check_values(
        Training(
            lambda: nn.Sequential(Clamped()), step, ("0",), steps=2, options={"placements": ZERO_1}
        )
    )


def test_a_forward_that_does_not_see_what_was_written_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The defect planted: full weights that were kept are taken for the current ones."""
    monkeypatch.setattr(ParameterGroup, "is_stale", property(lambda _group: False))

    def program(rank: int) -> list[float]:
        model = ones(KEPT)
        parameters = list(model.parameters())
        outputs = []
        for _ in range(2):
            with torch.no_grad():
                outputs.append(model(ONE).sum().item())
                for parameter in parameters:
                    parameter.fill_(2)
        return outputs

    assert fsdp_sim.simulate(program, 2, strict=False).results == [[8.0, 8.0]] * 2
