"""B63: a unit without hooks is driven by hand, its forwards among its backwards."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fsdp_sim
from fsdp_core import FsdpModule, SchedulePolicy, StateError
from fsdp_core.unit import ShardedUnit
from tests.cases.programs import (
    Tensors,
    assert_equal,
    assert_resting,
    batch,
    fill,
    linear,
    local_rows,
    loss_of,
    put_together,
    shard,
)

BY_HAND = SchedulePolicy(register_hooks=False)
ONE_F_ONE_B = ("f0", "f1", "b0", "f2", "b1", "b2")


def unit() -> nn.Module:
    """One layer that its caller drives."""
    model = fill(nn.Sequential(linear()))
    shard(model, "", schedule_policy=BY_HAND)
    assert isinstance(model, FsdpModule)
    return model


def run(model: nn.Module, rank: int, order: tuple[str, ...]) -> None:
    """Run forwards and backwards of microbatches in this order; each holds the weights."""
    losses: dict[str, Tensor] = {}
    for act in order:
        kind, number = act[0], act[1:]
        if isinstance(model, FsdpModule):
            model.unshard()
        if kind == "f":
            losses[number] = loss_of(model(batch(rank, int(number))), rank)
        else:
            losses.pop(number).backward()
        if isinstance(model, FsdpModule):
            model.reshard()


def by_hand(rank: int, order: tuple[str, ...], holds: bool) -> Tensors:
    """Drive a unit; `holds`: hold the weights over the whole schedule, too."""
    model = unit()
    assert isinstance(model, FsdpModule)
    if holds:
        model.unshard()
    run(model, rank, order)
    if holds:
        assert model.fsdp_unit.is_unsharded
        model.reshard()
    assert_resting(model)
    return local_rows(model, grads=True)


def unsharded(order: tuple[str, ...]) -> Tensors:
    """The same, averaged over ranks."""
    model = fill(nn.Sequential(linear()))
    for rank in range(2):
        run(model, rank, order)
    return {name: each.grad / 2 for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("holds", [False, True])
def test_gradients_of_three_interleaved_microbatches_are_right(holds: bool) -> None:
    """NVIDIA/Megatron-LM#6484, #6927, #7112: forward of one while another's backward runs."""
    report = fsdp_sim.simulate(by_hand, 2, args=(ONE_F_ONE_B, holds))

    assert_equal(put_together(report.results), unsharded(ONE_F_ONE_B))


@st.composite
def schedules(draw: st.DrawFn) -> tuple[str, ...]:
    """Any order in which each microbatch's forward comes before its backward."""
    order = draw(st.permutations([f"{kind}{number}" for kind in "fb" for number in range(3)]))
    seen: set[str] = set()
    fixed = []
    for act in order:
        fixed.append(("b" if act[1:] in seen else "f") + act[1:])
        seen.add(act[1:])
    return tuple(fixed)


@given(schedules())
@settings(max_examples=5)
def test_any_schedule_has_parity(order: tuple[str, ...]) -> None:
    """With up to three forwards outstanding."""
    report = fsdp_sim.simulate(by_hand, 2, args=(order, False))

    assert_equal(put_together(report.results), unsharded(order))


def test_unsharding_again_and_resharding_too_often_change_nothing() -> None:
    """Users are counted; the last one's reshard frees."""

    def program(rank: int) -> list[bool]:
        model = unit()
        assert isinstance(model, FsdpModule)
        seen = []
        for act in ("unshard", "unshard", "reshard", "reshard", "reshard", "unshard", "reshard"):
            getattr(model, act)()
            seen.append(model.fsdp_unit.is_unsharded)
        assert model.context.stats.gathers == 2
        return seen

    expected = [True, True, True, False, False, True, False]
    assert fsdp_sim.simulate(program, 2).results == [expected, expected]


def test_loading_a_state_dict_is_safe_without_hooks() -> None:
    """Refused while somebody holds the full weights; else it is what is used next."""

    def program(rank: int) -> float:
        model = unit()
        assert isinstance(model, FsdpModule)
        state = {name: torch.full_like(each, 2) for name, each in model.state_dict().items()}
        model.unshard()
        with pytest.raises(StateError, match="the full ones of unit '<root>' in use"):
            model.load_state_dict(state)
        model.reshard()
        model.load_state_dict(state)
        model.unshard()
        total: float = model(torch.ones(1, 2)).sum().item()
        model.reshard()
        return total

    assert fsdp_sim.simulate(program, 2).results == [8.0, 8.0]


def test_weights_that_the_first_of_two_users_frees_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The defect planted: nobody counts the users."""
    reshard = ShardedUnit.reshard

    def free_at_once(unit: ShardedUnit) -> None:
        unit._holders = 0
        reshard(unit)

    monkeypatch.setattr(ShardedUnit, "reshard", free_at_once)

    def program(rank: int) -> bool:
        model = unit()
        assert isinstance(model, FsdpModule)
        model.unshard()
        run(model, rank, ONE_F_ONE_B)
        return model.fsdp_unit.is_unsharded

    assert fsdp_sim.simulate(program, 2).results == [False, False]
