"""B35: a backward driven by hand must be ended, or its gradients are read while they are reduced."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp_core
import fsdp_sim
from fsdp_core import FsdpContext, RuntimePolicy, SchedulePolicy, StateError
from tests.cases.programs import (
    Row,
    assert_equal,
    assert_resting,
    batch,
    fill,
    local_rows,
    loss_of,
    put_together,
    shard,
)

BY_HAND = SchedulePolicy(register_hooks=False)


def build() -> nn.Module:
    """Two layers in a row."""
    return fill(Row("a", "b"))


def backward_in_halves(model: nn.Module, rank: int) -> dict[str, Tensor]:
    """Compute gradients as a pipeline with split backwards does: inputs first, weights later."""
    a, b = model.get_submodule("a"), model.get_submodule("b")
    hidden = a(batch(rank))
    entry = hidden.detach().requires_grad_()
    loss = loss_of(b(entry), rank)
    (of_hidden,) = torch.autograd.grad(loss, entry, retain_graph=True)
    (of_b,) = torch.autograd.grad(loss, model.get_parameter("b.weight"))
    (of_a,) = torch.autograd.grad(hidden, model.get_parameter("a.weight"), of_hidden)
    return {"a.weight": of_a, "b.weight": of_b}


def sharded(policy: RuntimePolicy | None = None) -> tuple[nn.Module, FsdpContext]:
    """The model as two units without hooks."""
    model = build()
    return model, shard(model, "a", "b", "", schedule_policy=BY_HAND, runtime_policy=policy)


def run_by_hand(model: nn.Module, rank: int) -> None:
    """Gather, compute gradients, put them on the full parameters, reshard."""
    model.unshard(recurse=True)  # type: ignore[operator]
    for name, gradient in backward_in_halves(model, rank).items():
        model.get_parameter(name).grad = gradient
    model.reshard(recurse=True)  # type: ignore[operator]


def test_post_backward_ends_a_backward_that_was_driven_by_hand() -> None:
    """pytorch#144535: one public call reduces what is there and orders the gradients."""

    def program(rank: int) -> dict[str, Tensor | None]:
        model, context = sharded()
        optimizer = fsdp_core.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        run_by_hand(model, rank)
        context.post_backward()
        assert_resting(model)
        gradients = local_rows(model, grads=True)
        optimizer.step()
        return gradients

    gradients = put_together(fsdp_sim.simulate(program, 2).results)

    model = build()
    first, second = (backward_in_halves(model, rank) for rank in range(2))
    assert_equal(gradients, {name: (first[name] + second[name]) / 2 for name in first})


def test_a_step_without_the_end_of_the_backward_is_refused() -> None:
    """The optimizer neither skips the gradients nor reads half of them."""

    def program(rank: int) -> str:
        model, _ = sharded()
        optimizer = fsdp_core.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        run_by_hand(model, rank)
        with pytest.raises(StateError) as caught:
            optimizer.step()
        model.context.reset()  # type: ignore[union-attr, operator]
        return str(caught.value)

    message = (
        "the gradients of unit 'a' must be reduced before they are used, got unreduced ones for "
        "['weight']; end a backward that is driven by hand with context.post_backward()"
    )
    assert fsdp_sim.simulate(program, 2).results == [message, message]


def read_gradients(rank: int, waits: bool) -> None:
    """Read gradients on the stream that computes, where the caller manages the wait."""
    model, context = sharded(RuntimePolicy(caller_managed_grad_sync=True))
    run_by_hand(model, rank)
    context.post_backward()
    if waits:
        context.finish_grad_sync()
    for parameter in model.parameters():
        assert isinstance(parameter.grad, DTensor)
        parameter.grad.to_local().mul_(2)
    if not waits:
        context.finish_grad_sync()


def test_reading_gradients_without_the_wait_is_a_race() -> None:
    """The simulator reports the reader and the reduction; with `finish_grad_sync` nothing."""
    fsdp_sim.simulate(read_gradients, 2, args=(True,))

    report = fsdp_sim.simulate(read_gradients, 2, args=(False,), strict=False)

    assert {finding.kind for finding in report.findings} == {"Race"}
    reduction, reader = report.findings[0].ops
    assert reduction.annotation == "fsdp_core::reduce_gradients a"
    assert reader.name == "mul_.Tensor"
    assert reader.stream == "stream 0 (default)"
