"""B62: a weight gradient that comes after autograd has ended is waited for, and then reduced."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_core
import fsdp_sim
from fsdp_core import ConfigError, FsdpModule, Phase, RuntimePolicy, StateError
from fsdp_sim.program.model import fold
from tests.cases.programs import (
    Tensors,
    assert_equal,
    batch,
    fill,
    linear,
    local_rows,
    loss_of,
    put_together,
    shard,
)

MANAGED = RuntimePolicy(caller_managed_grad_sync=True)


class _InputGradientOnly(torch.autograd.Function):
    """x @ weight.T, whose backward leaves the weight's gradient for later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: "Delayed") -> Tensor:
        ctx.save_for_backward(weight)
        ctx.layer, ctx.x = layer, x.detach()
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (weight,) = ctx.saved_tensors
        ctx.layer.postponed.append((ctx.x, gradients[0]))
        return gradients[0] @ weight, None, None


class Delayed(nn.Module):
    """A layer whose weight gradient is computed by `backward_dw`, as Transformer Engine does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 2))
        self.weight.skip_backward_post_hook = True  # type: ignore[attr-defined]
        self.postponed: list[tuple[Tensor, Tensor]] = []
        self.hooks: list[Callable[[], None]] = []

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Have `hook` called when the gradient is there."""
        self.hooks.append(hook)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the weight."""
        y: Tensor = _InputGradientOnly.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return y

    def backward_dw(self) -> None:
        """Compute the gradient that was postponed, and tell."""
        for x, gradient in self.postponed:
            part = gradient.t() @ x
            self.weight.grad = part if self.weight.grad is None else self.weight.grad + part
        self.postponed.clear()
        for hook in self.hooks:
            hook()


class Model(nn.Module):
    """A layer, a delayed one, a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.delayed, self.head = linear(), Delayed(), linear()

    def forward(self, x: Tensor) -> Tensor:
        """Call one after the other."""
        y: Tensor = self.head(fold(self.delayed(fold(self.front(x)))))
        return y


def sharded(policy: RuntimePolicy) -> Model:
    """Each layer a unit."""
    model = fill(Model())
    assert isinstance(model, Model)
    shard(model, "front", "delayed", "head", "", runtime_policy=policy)
    return model


def reductions(model: nn.Module) -> int:
    """How many reductions were issued so far."""
    assert isinstance(model, FsdpModule)
    return model.context.stats.reductions


def phase_of(module: nn.Module) -> Phase:
    """What a unit is doing."""
    assert isinstance(module, FsdpModule)
    return module.phase


def test_the_unit_waits_and_its_reduction_comes_with_the_late_gradient() -> None:
    """NVIDIA/Megatron-LM#6697, #6693: never a reduction of a gradient that is not there."""

    def program(rank: int) -> Tensors:
        model = sharded(MANAGED)
        loss_of(model(batch(rank)), rank).backward()
        assert phase_of(model.delayed) is Phase.BACKWARD
        assert reductions(model) == 2
        model.delayed.backward_dw()
        assert phase_of(model.delayed) is Phase.RESTING
        assert reductions(model) == 3
        model.context.finish_grad_sync()  # type: ignore[union-attr, operator]
        return local_rows(model, grads=True)

    gradients = put_together(fsdp_sim.simulate(program, 2).results)

    model = fill(Model())
    assert isinstance(model, Model)
    for rank in range(2):
        loss_of(model(batch(rank)), rank).backward()
        model.delayed.backward_dw()
    assert_equal(
        gradients,
        {name: each.grad / 2 for name, each in model.named_parameters() if each.grad is not None},
    )


def test_a_step_before_the_late_gradient_is_refused() -> None:
    """Naming the parameter."""

    def program(rank: int) -> str:
        model = sharded(MANAGED)
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = fsdp_core.fully_shard_optimizer(sgd)
        loss_of(model(batch(rank)), rank).backward()
        with pytest.raises(StateError) as caught:
            optimizer.step()
        model.delayed.backward_dw()
        model.context.finish_grad_sync()  # type: ignore[union-attr, operator]
        optimizer.step()
        return str(caught.value)

    message = (
        "all gradients of unit 'delayed' must have come before they are used, got none yet for "
        "['weight']; finish its backward first"
    )
    assert fsdp_sim.simulate(program, 2).results == [message, message]


def test_a_late_reduction_that_nobody_would_wait_for_is_refused() -> None:
    """Where the caller did not say that it manages the wait."""

    def program(rank: int) -> None:
        model = sharded(RuntimePolicy())
        loss_of(model(batch(rank)), rank).backward()
        with pytest.raises(StateError, match="caller_managed_grad_sync=True"):
            model.delayed.backward_dw()
        model.context.reset()  # type: ignore[union-attr, operator]

    fsdp_sim.simulate(program, 2)


def test_the_late_gradient_read_without_the_wait_is_a_race() -> None:
    """The simulator finds what the caller forgot."""

    def program(rank: int) -> None:
        model = sharded(MANAGED)
        loss_of(model(batch(rank)), rank).backward()
        model.delayed.backward_dw()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.to_local().mul_(2)  # type: ignore[attr-defined]
        model.context.finish_grad_sync()  # type: ignore[union-attr, operator]

    report = fsdp_sim.simulate(program, 2, strict=False)

    assert {finding.kind for finding in report.findings} == {"Race"}


def test_a_delayed_parameter_that_is_tied_is_refused_with_both_modules() -> None:
    """Which of them would tell of the gradient is unclear; their classes are in the message."""

    class Head(Delayed):
        """Another layer with the same weight."""

    def program(rank: int) -> str:
        model = nn.ModuleDict({"body": Delayed(), "head": Head()})
        model["head"].weight = model["body"].weight
        with pytest.raises(ConfigError) as caught:
            shard(model, ("body", "head"))
        return str(caught.value)

    message = (
        "a parameter with a delayed gradient must have one place, got 'weight' of a Delayed and "
        "'weight' of a Head; untie them, or do not delay"
    )
    assert fsdp_sim.simulate(program, 2).results == [message] * 2


def test_a_delayed_parameter_needs_a_module_that_tells_of_its_gradient() -> None:
    """Else the unit would wait for ever; the method's name is in the message."""

    def program(rank: int) -> str:
        layer = linear()
        layer.weight.skip_backward_post_hook = True  # type: ignore[attr-defined]
        with pytest.raises(ConfigError) as caught:
            shard(layer, "")
        assert type(layer) is nn.Linear
        return str(caught.value)

    message = (
        "a module with a delayed gradient must have register_wgrad_accumulation_and_reduce_hooks, "
        "got a Linear without it; add it, or do not delay"
    )
    assert fsdp_sim.simulate(program, 2).results == [message] * 2


class Pair(nn.Module):
    """Two delayed layers of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Delayed(), Delayed()

    def forward(self, x: Tensor) -> Tensor:
        """Call one after the other."""
        y: Tensor = self.b(fold(self.a(x)))
        return y


def test_ranks_that_compute_delayed_gradients_in_another_order_are_named() -> None:
    """Reductions of one size would mix the gradients of two units up on hardware, in silence."""

    def program(rank: int) -> None:
        model = fill(Pair())
        shard(model, "a", "b", "", runtime_policy=MANAGED)
        loss_of(model(batch(rank).requires_grad_()), rank).backward()
        for name in ("a", "b") if rank == 0 else ("b", "a"):
            model.get_submodule(name).backward_dw()  # type: ignore[operator]

    (finding,) = fsdp_sim.simulate(program, 2, strict=False).findings

    assert finding.kind == "CollectiveMismatch"
    assert (
        "rank 0 issued reduce_scatter SUM [fsdp_core::reduce_gradients a] of [2] float32, rank 1 "
        "reduce_scatter SUM [fsdp_core::reduce_gradients b] of [2] float32" in finding.message
    )
