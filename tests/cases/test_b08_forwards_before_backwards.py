"""B08: several forwards come before their backwards, which come in any order."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

import fsdp_sim
from fsdp_core import Placements, PrefetchOrder, RowAtomic, StateError
from fsdp_core.unit import ShardedUnit
from fsdp_core.uses import Use
from fsdp_sim.program.model import fold
from tests.cases.programs import (
    Row,
    Training,
    assert_resting,
    batch,
    check_parity,
    check_values,
    fill,
    gathered,
    linear,
    loss_of,
    ops_by_step,
    reduced,
    shard,
    units_in,
)


def outstanding(order: tuple[int, ...], units: tuple[str, ...] = ("",)) -> Training:
    """As many forwards as there are backwards, then the backwards in this order."""

    def step(model: nn.Module, rank: int, _number: int) -> None:
        losses = [loss_of(model(batch(rank, each)), rank) for each in range(len(order))]
        for each in order:
            losses[each].backward()
            if units_in(model):
                assert_resting(model)

    return Training(lambda: fill(Row("first", "second")), step, units)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_outstanding_forwards_have_their_backwards_in_any_order(order: tuple[int, int]) -> None:
    """pytorch#136861, fairscale#918: each backward gathers and reduces; units rest in between."""
    (ops,) = ops_by_step(check_parity(outstanding(order)))

    assert gathered(ops) == ["<root>"] * 4
    assert reduced(ops) == ["<root>"] * 2


@pytest.mark.everywhere
@given(
    st.integers(1, 4).flatmap(lambda count: st.permutations(range(count))).map(tuple),
    st.sampled_from([("",), ("first", "second"), ("first", "second", ""), ("second", "")]),
)
@settings(max_examples=10)
@pytest.mark.filterwarnings("ignore:step")
def test_any_number_of_outstanding_forwards_has_parity(
    order: tuple[int, ...], units: tuple[str, ...]
) -> None:
    """Whatever is a unit."""
    check_values(outstanding(order, units))


def test_a_recorded_pass_refuses_the_second_backward() -> None:
    """RECORDED needs one backward call per pass, and says what to do."""

    def program(rank: int) -> str:
        model = fill(Row("first", "second"))
        shard(model, "", prefetch_order=PrefetchOrder.RECORDED)
        first, second = (loss_of(model(batch(rank, each)), rank) for each in range(2))
        first.backward()
        with pytest.raises(StateError) as caught:
            second.backward()
        return str(caught.value)

    report = fsdp_sim.simulate(program, 2)

    assert all(
        "RECORDED needs one backward call per pass" in message
        and "add the losses, or use REGISTRATION" in message
        for message in report.results
    )


def penalty(model: nn.Module, rank: int) -> None:
    """A backward through the graph of a backward: the square of the input's gradient."""
    x = batch(rank).requires_grad_()
    y = model.get_submodule("first")(x).pow(2).sum()
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    gradient.pow(2).sum().backward()


def test_a_backward_of_a_backward_is_refused_where_weights_are_freed() -> None:
    """At the first of the two, by the unit's name, and with what to do."""

    def program(rank: int) -> str:
        model = fill(Row("first", "second"))
        shard(model, "first")
        with pytest.raises(StateError) as caught:
            penalty(model, rank)
        return str(caught.value)

    for message in fsdp_sim.simulate(program, 2).results:
        assert message.startswith("a backward through unit '<root>' must not be recorded")


@pytest.mark.everywhere
def test_a_backward_of_a_backward_has_parity_where_weights_are_kept() -> None:
    """Placements that replicate the parameters (ZeRO-2)."""
    kept = Placements((0,), (Replicate(),), (RowAtomic(),), (RowAtomic(),))

    def step(model: nn.Module, rank: int, _number: int) -> None:
        penalty(model, rank)

    check_values(
        Training(lambda: fill(Row("first")), step, ("first",), options={"placements": kept})
    )


class Force(nn.Module):
    """Adds to its output the gradient of an energy, which its own layers compute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        """A backward inside the forward, then the second layer once more."""
        position = x.detach().requires_grad_()
        energy = self.second(self.first(position)).sum()
        (force,) = torch.autograd.grad(energy, position)
        y: Tensor = fold(self.second(x)) + fold(force)
        return y


@pytest.mark.everywhere
@pytest.mark.filterwarnings("ignore:step")
def test_a_backward_inside_a_forward_completes_and_the_forward_goes_on() -> None:
    """It enters the layers, whose parameters have gradients of zeros behind it."""

    def step(model: nn.Module, rank: int, number: int) -> None:
        loss_of(model(batch(rank, number)), rank).backward()

    names = ("first", "second", "")
    check_values(Training(lambda: fill(Force()), step, names, steps=2, entered=("first",)))


def test_a_second_backward_that_does_not_gather_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect planted: only a forward makes a unit's backward begin again."""
    begun: set[str] = set()
    pre_backward = ShardedUnit.pre_backward

    def only_once(unit: ShardedUnit, module: nn.Module, use: Use) -> None:
        rank = str(torch.distributed.get_rank())
        if rank not in begun:
            begun.add(rank)
            pre_backward(unit, module, use)

    monkeypatch.setattr(ShardedUnit, "pre_backward", only_once)

    with pytest.raises(RuntimeError, match="storage of size 0"):
        check_parity(outstanding((0, 1)))
