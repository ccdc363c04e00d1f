"""Units without hooks, delayed gradients and meta devices: as the hooked run and the unsharded one."""

from dataclasses import replace

import torch

from fsdp_sim.program import ContextSpec, LayerSpec, ModuleSpec, ProgramSpec, StepSpec, UnitSpec
from fsdp_sim.program.delayed import Postponed, linear_with_delayed_weight
from fsdp_sim.program.model import Plan, build_model
from fsdp_sim.program.parity import verify

BY_HAND = UnitSpec(hooks=False)
STEPS = (StepSpec(), StepSpec())
MANAGED = ContextSpec(caller_managed_grad_sync=True)


def around(child: ModuleSpec, unit: UnitSpec | None = None) -> ProgramSpec:
    """Return a root unit around ``child`` and one more unit."""
    other = ModuleSpec(LayerSpec(bias=True), UnitSpec())
    model = ModuleSpec(LayerSpec("scale"), unit or UnitSpec(), (child, other))
    return ProgramSpec(model, steps=STEPS)


def test_a_unit_driven_by_hand_among_hooked_ones_has_parity() -> None:
    """It is gathered around its calls and around each backward."""
    verify(around(ModuleSpec(LayerSpec(), BY_HAND)))


def test_a_root_driven_by_hand_around_hooked_units_has_parity() -> None:
    """Each hooked unit is then an outermost call."""
    verify(around(ModuleSpec(LayerSpec(), UnitSpec()), BY_HAND))


def test_a_weight_whose_gradient_comes_after_the_backward_has_parity() -> None:
    """The caller manages the wait for it."""
    child = ModuleSpec(LayerSpec(bias=True, delayed=True), UnitSpec())

    verify(replace(around(child), context=MANAGED))


def test_a_model_from_the_meta_device_has_parity() -> None:
    """Its weights are the same small integers."""
    verify(replace(around(ModuleSpec(LayerSpec(bias=True), UnitSpec())), meta=True))


def test_a_program_on_the_meta_device_has_no_weights_before_it_is_sharded() -> None:
    """They are made when units are."""
    program = ProgramSpec(ModuleSpec(LayerSpec(), UnitSpec()), meta=True)

    assert all(parameter.is_meta for parameter in build_model(program, Plan()).parameters())


def test_a_delayed_gradient_is_that_of_autograd_when_it_comes() -> None:
    """Absent behind the backward; then the product of input and gradient, and the hook is told."""
    x, weight = torch.tensor([[1.0, 2.0]]), torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
    postponed, told = Postponed(), []
    postponed.hooks.append(lambda: told.append("told"))

    linear_with_delayed_weight(x, weight, postponed).sum().backward()
    absent = weight.grad
    postponed.accumulate(weight)

    assert absent is None
    assert torch.equal(weight.grad, x)  # type: ignore[arg-type]
    assert told == ["told"]
