"""B28: microbatches that are not the last one save communication, and lose no gradient."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import fsdp_core
import fsdp_sim
from fsdp_core import Placements, StateError
from fsdp_core.parameter_group import ParameterGroup
from fsdp_sim.op import Kind
from tests.cases.programs import (
    HYBRID,
    SHARDED,
    ZERO_1,
    batch,
    begin_step,
    fill,
    linear,
    local_rows,
    loss_of,
    ops_by_step,
    shard,
)


class Factor(nn.Module):
    """A weight [4, 2], each element of which gets the factor as its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 2))

    def forward(self, factor: float) -> Tensor:
        """Return the sum of the weight times the factor."""
        return (self.weight * factor).sum()


def accumulate(rank: int, is_last: Sequence[bool]) -> Tensor:
    """As many microbatches; the gradient of microbatch m is rank + 10 m on every element."""
    model = Factor()
    context = shard(model, "", mesh=(2, 2), placements=HYBRID)
    begin_step(0)
    for number, last in enumerate(is_last):
        with fsdp_core.microbatch(context, is_last=last):
            model(rank + 10.0 * number).backward()
    gradient = local_rows(model, grads=True)["weight"]
    assert gradient is not None
    return gradient


def expected(count: int) -> Tensor:
    """The sum over microbatches of the mean over ranks, on this rank's two rows."""
    return torch.full((2, 2), sum(1.5 + 10 * number for number in range(count)))


def reductions(report: fsdp_sim.Report) -> list[tuple[int, int]]:
    """How many reductions each rank issued: over the inner axis, and over the outer one."""
    counts = []
    for rank in range(4):
        (ops,) = ops_by_step(report, rank)
        calls = [op.call.name for op in ops if op.kind is Kind.COLLECTIVE and op.call]
        counts.append((calls.count("reduce_scatter"), calls.count("all_reduce")))
    return counts


def test_all_microbatches_reach_the_optimizer_and_the_outer_axis_is_reduced_once() -> None:
    """NVIDIA/Megatron-LM#7186, accelerate#3760, #3762, cosmos-framework#161: 34.5, and not 21.5."""
    report = fsdp_sim.simulate(accumulate, 4, args=((False, False, True),), trace=True)

    assert all(torch.equal(gradient, torch.full((2, 2), 34.5)) for gradient in report.results)
    assert reductions(report) == [(3, 1)] * 4


def test_a_window_that_each_backward_begins_anew_is_found_by_its_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NVIDIA/Megatron-LM#7186 planted: the last microbatch alone reaches the optimizer."""
    monkeypatch.setattr(ParameterGroup, "_prepare_window", lambda _group: False)

    report = fsdp_sim.simulate(accumulate, 4, args=((False, False, True),))

    assert all(torch.equal(gradient, torch.full((2, 2), 21.5)) for gradient in report.results)


def test_a_no_sync_that_does_nothing_is_found_by_its_reductions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """accelerate#3760, cosmos-framework#161 planted: right sums, and no communication saved."""
    monkeypatch.setattr(fsdp_core, "microbatch", lambda *_args, **_kwargs: nullcontext())

    report = fsdp_sim.simulate(accumulate, 4, args=((False, False, True),), trace=True)

    assert all(torch.equal(gradient, expected(3)) for gradient in report.results)
    assert reductions(report) == [(3, 3)] * 4


@given(st.lists(st.booleans(), max_size=3).map(lambda mask: (*mask, True)))
@settings(max_examples=8)
def test_any_microbatches_may_be_declared_last(is_last: tuple[bool, ...]) -> None:
    """Each microbatch that is called the last one reduces once more; the sum is the same."""
    report = fsdp_sim.simulate(accumulate, 4, args=(is_last,), trace=True)

    for gradient in report.results:
        assert torch.equal(gradient, expected(len(is_last)))
    assert reductions(report) == [(len(is_last), is_last.count(True))] * 4


def accumulate_changed(rank: int, placements: Placements, mesh: tuple[int, ...]) -> Tensor:
    """Three microbatches of accumulate(), the gradient doubled behind each but the last."""
    model = Factor()
    context = shard(model, "", mesh=mesh, placements=placements)
    weight = model.weight
    for number in range(3):
        with fsdp_core.microbatch(context, is_last=number == 2):
            model(rank + 10.0 * number).backward()
        if number < 2:
            context.finish_grad_sync()
            assert weight.grad is not None
            weight.grad = weight.grad * 2
    gradient = local_rows(model, grads=True)["weight"]
    assert gradient is not None
    return gradient


@pytest.mark.parametrize(
    ("placements", "mesh"),
    [(SHARDED, (2,)), (ZERO_1, (2,)), (HYBRID, (2, 2))],
    ids=["zero3", "zero1", "hsdp"],
)
def test_a_gradient_that_was_replaced_is_what_the_next_microbatch_adds_to(
    placements: Placements, mesh: tuple[int, ...]
) -> None:
    """As without sharding, where `p.grad = f(p.grad)` is how gradients are clipped or scaled."""
    world_size = torch.Size(mesh).numel()
    report = fsdp_sim.simulate(accumulate_changed, world_size, args=(placements, mesh))

    mean = sum(range(world_size)) / world_size
    expected_element = 4 * mean + 2 * (mean + 10) + (mean + 20)
    for gradient in report.results:
        assert torch.equal(gradient, torch.full((2, 2), expected_element))


def test_a_gradient_that_was_replaced_is_completed_without_a_backward() -> None:
    """Where the last microbatch did not use the unit, its window ends all the same."""

    def program(rank: int) -> Tensor:
        model = Factor()
        context = shard(model, "", mesh=(2, 2))
        with fsdp_core.microbatch(context, is_last=False):
            model(float(rank)).backward()
        context.finish_grad_sync()
        weight: Any = model.weight
        weight.grad = weight.grad * 2
        with fsdp_core.microbatch(context, is_last=True):
            pass
        return weight.grad.full_tensor()

    for gradient in fsdp_sim.simulate(program, 4).results:
        assert torch.equal(gradient, torch.full((4, 2), 2 * 1.5))


def test_a_gradient_of_other_rows_is_refused_by_name() -> None:
    """It cannot be added to; the parameter and its unit are in the message."""

    def program(rank: int) -> str:
        model = Factor()
        context = shard(model, "")
        model(1.0).backward()
        assert isinstance(model.weight, DTensor)
        foreign = distribute_tensor(torch.zeros(4, 2), model.weight.device_mesh, [Replicate()])
        model.weight.grad = foreign
        with pytest.raises(StateError) as caught:
            model(1.0).backward()
        context.reset()
        return str(caught.value)

    message = (
        "a gradient must have the rows of the one that it replaces, got other ones for 'weight' of "
        "unit '<root>'; compute it from that one"
    )
    assert fsdp_sim.simulate(program, 2).results == [message] * 2


def test_the_gradient_of_a_parameter_that_is_frozen_later_stays() -> None:
    """Other parameters of its unit go on, and overwrite nothing."""

    def program(rank: int) -> tuple[Tensor, Tensor]:
        model = fill(nn.Sequential(linear(), linear()))
        shard(model, "")
        weights: list[Any] = [each.weight for each in model.children()]
        first, second = weights
        loss_of(model(batch(rank)), rank).backward()
        before = first.grad.full_tensor()
        first.requires_grad_(False)
        second.grad = None
        loss_of(model(batch(rank, 1)), rank).backward()
        return before, first.grad.full_tensor()

    for before, after in fsdp_sim.simulate(program, 2).results:
        assert before.any()
        assert torch.equal(before, after)


def test_a_window_without_a_last_microbatch_is_refused_by_the_optimizer() -> None:
    """Nothing was reduced over the outer axis: the message says which scope is missing."""

    def program(rank: int) -> str:
        model = Factor()
        context = shard(model, "", mesh=(2, 2), placements=HYBRID)
        optimizer = fsdp_core.fully_shard_optimizer(torch.optim.SGD(model.parameters()))
        with fsdp_core.microbatch(context, is_last=False):
            model(1.0).backward()
        with pytest.raises(StateError) as caught:
            optimizer.step()
        model(1.0).backward()
        optimizer.step()
        return str(caught.value)

    for message in fsdp_sim.simulate(program, 4).results:
        assert "run that backward inside microbatch(context, is_last=True)" in message


def test_a_unit_has_no_empty_no_sync_to_be_mistaken_for_one() -> None:
    """A request by another name is an error, not a scope that does nothing."""

    def program(rank: int) -> None:
        model = Factor()
        shard(model, "")
        with pytest.raises(AttributeError, match="no_sync"):
            model.no_sync()  # type: ignore[operator]

    fsdp_sim.simulate(program, 2)


def test_a_context_may_complete_in_the_middle_of_a_window_of_another() -> None:
    """Two models that share no layer, and are trained in turn: all checks hold, gradients add up."""

    def program(rank: int) -> tuple[Tensor | None, Tensor | None]:
        one, two = Factor(), Factor()
        window = shard(one, "")
        shard(two, "")
        begin_step(0)
        with fsdp_core.microbatch(window, is_last=False):
            one(1.0 + rank).backward()
        two(10.0 + rank).backward()
        with fsdp_core.microbatch(window, is_last=True):
            one(100.0 + rank).backward()
        grads = [local_rows(each, grads=True)["weight"] for each in (one, two)]
        return grads[0], grads[1]

    for first, second in fsdp_sim.simulate(program, 2).results:
        assert torch.equal(first, torch.full((2, 2), 102.0))
        assert torch.equal(second, torch.full((2, 2), 10.5))
