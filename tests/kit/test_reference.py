"""The unsharded oracle against arithmetic done by hand."""

import math

import pytest
import torch
from hypothesis import given

from fsdp_sim.program import (
    CallsSpec,
    LayerSpec,
    ModuleSpec,
    OptimizerSpec,
    PassSpec,
    ProgramSpec,
    RaiseSpec,
    StepSpec,
    UnitSpec,
)
from fsdp_sim.program.data import initial_weight, input_batch, loss_weights
from fsdp_sim.program.exactness import gradient_tolerance, is_exact
from fsdp_sim.program.spec import PrecisionSpec
from fsdp_sim.reference import run_reference
from fsdp_sim.strategies import programs

CPU = torch.device("cpu")
SCALE = ModuleSpec(LayerSpec("scale"), UnitSpec())
ROOT = ModuleSpec(unit=UnitSpec(), children=(ModuleSpec(LayerSpec("scale")),) * 2)


def folded(number: float) -> float:
    """Map a number to an integer in [-2, 2], in plain Python."""
    return math.fmod(math.floor(number), 3)


def by_hand(step: int, rank: int, weight: float) -> tuple[float, float]:
    """Return loss and gradient of one scale of width 1 and batch 1."""
    place = (step, 0, 0, rank)
    x = float(input_batch((1, 1), place, CPU))
    t = float(loss_weights((1, 1), place, CPU))
    y = folded(weight * x)
    return y * (0.5 * y + t), folded(y + t) * x


def test_a_step_is_the_average_of_the_ranks_gradients() -> None:
    """Two ranks, one weight, SGD with learning rate 1, two steps."""
    program = ProgramSpec(SCALE, width=1, steps=(StepSpec(), StepSpec()))
    weight = float(initial_weight(".weight", (1,)))

    run = run_reference(program)

    for number, step in enumerate(run.steps):
        losses, gradients = zip(*(by_hand(number, rank, weight) for rank in (0, 1)), strict=True)
        weight -= sum(gradients) / 2
        assert step.losses == (((losses[0],),), ((losses[1],),))
        assert step.gradients["weight"] == sum(gradients) / 2
        assert step.parameters["weight"] == weight


def test_the_divisor_comes_on_top_of_the_mean() -> None:
    """A divisor of 4 quarters the gradient."""
    plain = run_reference(ProgramSpec(SCALE, width=4))
    divided = run_reference(
        ProgramSpec(ModuleSpec(LayerSpec("scale"), UnitSpec(grad_divisor=4)), width=4)
    )
    expected = plain.steps[0].gradients["weight"]
    got = divided.steps[0].gradients["weight"]

    assert expected is not None
    assert got is not None
    assert torch.equal(4 * got, expected)
    assert expected.abs().sum() > 0


def test_a_unit_that_no_rank_used_has_no_gradient() -> None:
    """A branch that nobody took leaves None."""
    tree = ModuleSpec(children=(SCALE, SCALE))
    only_first = PassSpec(calls=(CallsSpec("", (0,)),))

    step = run_reference(ProgramSpec(tree, steps=(StepSpec((only_first,)),))).steps[0]

    assert step.gradients["1.weight"] is None
    assert step.gradients["0.weight"] is not None


def test_a_parameter_that_one_rank_used_has_a_gradient_everywhere() -> None:
    """The rank that did not use it counts as zero; its unit took part."""
    one_rank = PassSpec(calls=(CallsSpec("", (0,), ranks=(0,)),))
    both = run_reference(ProgramSpec(ROOT, steps=(StepSpec((one_rank,)),))).steps[0]
    nobody = PassSpec(calls=(CallsSpec("", (0,)),))
    none = run_reference(ProgramSpec(ROOT, steps=(StepSpec((nobody,)),))).steps[0]

    assert both.gradients["1.weight"] is not None
    assert torch.equal(none.gradients["1.weight"], torch.zeros(2))  # type: ignore[arg-type]


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_pass_that_raises_leaves_the_weights(phase: str) -> None:
    """The step is given up; the next one starts from the same weights."""
    raising = PassSpec(raises=RaiseSpec("", phase))  # type: ignore[arg-type]
    program = ProgramSpec(SCALE, steps=(StepSpec((raising,)), StepSpec()))

    first, second = run_reference(program).steps

    assert first.losses == (((),), ((),))
    assert first.gradients["weight"] is None
    assert torch.equal(first.parameters["weight"], initial_weight(".weight", (2,)))  # type: ignore[arg-type]
    assert second.gradients["weight"] is not None


def test_microbatches_add_up() -> None:
    """Two passes give the sum of what each gives alone."""
    both = run_reference(ProgramSpec(SCALE, steps=(StepSpec((PassSpec(), PassSpec())),))).steps[0]

    expected = torch.zeros(2)
    for number in (0, 1):
        for rank in (0, 1):
            x = input_batch((1, 2), (0, number, 0, rank), CPU)
            t = loss_weights((1, 2), (0, number, 0, rank), CPU)
            y = (x * initial_weight(".weight", (2,))).floor().fmod(3)
            expected += (y + t).fmod(3)[0] * x[0] / 2
    assert torch.equal(both.gradients["weight"], expected)  # type: ignore[arg-type]


def test_sums_that_may_round_are_known() -> None:
    """Three ranks, an odd divisor and too many bf16 units are not exact; small worlds are."""
    low = UnitSpec(precision=PrecisionSpec(compute="bfloat16"))
    many = StepSpec((PassSpec(forwards=40),))

    assert is_exact(ProgramSpec(SCALE, mesh=(4,)))
    assert not is_exact(ProgramSpec(SCALE, mesh=(3,)))
    assert not is_exact(ProgramSpec(ModuleSpec(LayerSpec(), UnitSpec(grad_divisor=3))))
    assert is_exact(ProgramSpec(ModuleSpec(LayerSpec(), low)))
    assert not is_exact(ProgramSpec(ModuleSpec(LayerSpec(), low), steps=(many,)))
    assert gradient_tolerance(ProgramSpec(SCALE, mesh=(3,))) < 1e-4


@given(programs(low_precision=False))
def test_the_order_of_ranks_does_not_change_the_sums(program: ProgramSpec) -> None:
    """Sums are exact: gradients are whole multiples of the smallest average."""
    step = run_reference(program).steps[0]

    for gradient in step.gradients.values():
        if gradient is not None:
            scaled = gradient * program.world_size * 64
            assert torch.equal(scaled, scaled.round())


def test_an_adaptive_optimizer_moves_what_got_a_gradient() -> None:
    """Adam's first step moves every weight with a gradient by the learning rate."""
    program = ProgramSpec(SCALE, width=4, optimizer=OptimizerSpec("adam", lr=0.5))
    step = run_reference(program).steps[0]
    gradient = step.gradients["weight"]
    moved = step.parameters["weight"] - initial_weight(".weight", (4,))  # type: ignore[operator]

    assert gradient is not None
    assert torch.allclose(moved, -0.5 * gradient.sign(), atol=1e-6)
