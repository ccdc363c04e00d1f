"""Units on some axes of the mesh: which ranks hold the same copy, and what each copy learns."""

import pytest
import torch

from fsdp_sim.program import (
    LayerSpec,
    ModuleSpec,
    PassSpec,
    ProgramSpec,
    SpecError,
    StepSpec,
    UnitSpec,
    check_program,
)
from fsdp_sim.program.copies import copies, copy_of, name_in_copy, unit_mesh
from fsdp_sim.program.data import initial_weight
from fsdp_sim.program.parity import verify
from fsdp_sim.reference import run_reference

OUTER = UnitSpec(axes=(0,))


def test_a_unit_on_the_outer_axis_has_a_copy_for_each_inner_rank() -> None:
    """On a 2 x 2 mesh ranks 0 and 2 share one, 1 and 3 the other."""
    assert copies(OUTER, (2, 2)) == {(0,): [0, 2], (1,): [1, 3]}
    assert unit_mesh(OUTER, (2, 4)) == (2,)
    assert copy_of(OUTER, (2, 2), 3) == (1,)


def test_a_unit_on_all_axes_has_one_copy_without_a_name_of_its_own() -> None:
    """All ranks hold it."""
    assert copies(UnitSpec(), (2, 2)) == {(): [0, 1, 2, 3]}
    assert name_in_copy("weight", ()) == "weight"
    assert name_in_copy("weight", (1,)) == "weight@1"


def test_copies_start_apart_and_learn_from_their_own_ranks_alone() -> None:
    """The gradient of copy 1 on a 1 x 2 mesh is that of rank 1, undivided."""
    expert = ProgramSpec(ModuleSpec(LayerSpec("scale"), OUTER), mesh=(1, 2), width=1)

    step = run_reference(expert).steps[0]

    for copy in (0, 1):
        gradient, weight = step.gradients[f"weight@{copy}"], step.parameters[f"weight@{copy}"]
        assert gradient is not None
        assert weight is not None
        assert torch.equal(weight, initial_weight(f".weight@{copy}", (1,)) - gradient)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ((), "must be one axis at least, in rising order, got []"),
        ((1, 0), "must be one axis at least, in rising order, got [1, 0]"),
        ((2,), "must be in 0..1, got 2"),
    ],
)
def test_axes_that_the_mesh_lacks_are_refused(axes: tuple[int, ...], message: str) -> None:
    """Before anything is built, by the field."""
    with pytest.raises(SpecError) as caught:
        check_program(ProgramSpec(ModuleSpec(LayerSpec(), UnitSpec(axes=axes)), mesh=(2, 2)))

    assert str(caught.value) == f"model at '', unit.axes: {message}"


def test_a_delayed_gradient_of_another_layer_than_a_linear_is_refused() -> None:
    """Only a linear knows how to make it later."""
    layer = LayerSpec("scale", delayed=True)

    with pytest.raises(
        SpecError, match=r"layer.delayed: must be said of a linear alone, got scale"
    ):
        check_program(ProgramSpec(ModuleSpec(layer, UnitSpec())))


def test_experts_on_one_axis_train_as_unsharded_beside_a_dense_unit() -> None:
    """Two copies of the expert, one of the dense unit, two microbatches."""
    leaf = ModuleSpec(LayerSpec(bias=True), UnitSpec(axes=(0,), grad_divisor=2))
    model = ModuleSpec(LayerSpec("scale"), UnitSpec("hsdp"), (leaf,))

    verify(ProgramSpec(model, mesh=(2, 2), steps=(StepSpec((PassSpec(), PassSpec())), StepSpec())))
