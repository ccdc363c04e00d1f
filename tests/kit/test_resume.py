"""Programs that go on from a checkpoint, and models that are dropped."""

from dataclasses import replace
from functools import wraps
from typing import Any

import pytest

from fsdp_core import checkpoint_files
from fsdp_core.unit import ShardedUnit
from fsdp_sim.errors import ParityError
from fsdp_sim.mutation.change import replaced
from fsdp_sim.program import (
    LayerSpec,
    ModuleSpec,
    OptimizerSpec,
    ProgramSpec,
    StepSpec,
    UnitSpec,
    run,
)
from fsdp_sim.program.check import SpecError, check_program
from fsdp_sim.program.parity import verify
from fsdp_sim.program.spec import Strategy

ROWS = ModuleSpec(LayerSpec("rows", rows=3, bias=True), UnitSpec())
ROOT = ModuleSpec(LayerSpec(), UnitSpec(), (ROWS, ROWS))


ADVICE = "a checkpoint has one weight of each name"


def resumed(strategy: Strategy = "zero3", **fields: Any) -> ProgramSpec:
    """Return two steps with a checkpoint between them."""
    steps = (StepSpec(set_to_none=False), StepSpec(resume=strategy))
    return ProgramSpec(ROOT, steps=steps, **fields)


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "zero1", "no_shard"])
def test_a_program_goes_on_from_its_checkpoint_with_any_strategy(strategy: Strategy) -> None:
    """Uneven rows and momentum go through it; the step equals that of a run without a checkpoint."""
    verify(resumed(strategy, optimizer=OptimizerSpec(momentum=0.5)))


def test_weights_without_elements_go_through_a_checkpoint() -> None:
    """PyTorch writes nothing of them, nor of what the optimizer keeps for them; training goes on."""
    nothing = ModuleSpec(LayerSpec("rows", rows=0, bias=True), UnitSpec())
    steps = (StepSpec(), StepSpec(resume="zero1"), StepSpec(resume="zero3"))

    verify(ProgramSpec(nothing, optimizer=OptimizerSpec("adam", lr=0.5), steps=steps))


def test_a_program_that_saves_has_the_same_digest_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the checksums are: a file's name and a random identifier go into them."""
    digests = []
    for checksum in ("00000001", "ffffffff"):
        monkeypatch.setattr(checkpoint_files, "checksum", lambda _path, value=checksum: value)
        digests.append(verify(resumed(), trace=True).trace.digest)

    assert digests[0] == digests[1]


def test_a_model_that_waits_for_the_garbage_collector_is_reported() -> None:
    """A unit that its module holds holds its module; the report names what is left of the model."""

    def keeping(init: Any) -> Any:
        @wraps(init)
        def wrong(unit: Any, modules: Any, *args: Any) -> None:
            init(unit, modules, *args)
            unit.kept = modules

        return wrong

    program = ProgramSpec(ModuleSpec(LayerSpec("scale"), UnitSpec()), mesh=(1,))

    with replaced(ShardedUnit, "__init__", keeping), pytest.raises(ParityError) as caught:
        verify(program)

    assert str(caught.value).splitlines()[0] == (
        "ParityError: rank 0: a dropped model must be freed at once, got the context, module '', "
        "parameter 'weight'"
    )


def test_a_wrong_weight_in_the_whole_state_is_reported() -> None:
    """What rank 0 gets is the unsharded run's, by every name; what others get is nothing."""

    def change(full_state_dict: Any) -> Any:
        @wraps(full_state_dict)
        def wrong(model: Any) -> Any:
            return {name: each + 1 for name, each in full_state_dict(model).items()}

        return wrong

    program = ProgramSpec(ROWS, width=1, steps=(StepSpec(), StepSpec(export=True)))
    verify(program)

    with replaced(run, "full_state_dict", change), pytest.raises(ParityError) as caught:
        verify(program)

    first = str(caught.value).splitlines()[0]
    assert first.startswith("ParityError: step 1, rank 0, exported 'weight' must be ")


ON_ONE_AXIS = ProgramSpec(
    ModuleSpec(LayerSpec(), UnitSpec(axes=(1,))),
    (2, 2),
    steps=(StepSpec(), StepSpec(resume="zero3")),
)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            ProgramSpec(ROOT, steps=(StepSpec(resume="zero3"),)),
            "steps[0].resume: must be null: there is no checkpoint before the first step",
        ),
        (
            resumed("hsdp"),
            "steps[1].resume: must be one of no_shard, zero1, zero2, zero3; got hsdp on a mesh of 1 axes",
        ),
        (
            ON_ONE_AXIS,
            "steps[1].resume: all units must be on the whole mesh, got axes of ''; " + ADVICE,
        ),
        (
            replace(ON_ONE_AXIS, steps=(StepSpec(export=True),)),
            "steps[0].export: all units must be on the whole mesh, got axes of ''; " + ADVICE,
        ),
    ],
)
def test_a_checkpoint_that_cannot_be_is_refused(program: ProgramSpec, message: str) -> None:
    """The error says which field, and what must hold: of a checkpoint, and of a whole state dict."""
    with pytest.raises(SpecError) as caught:
        check_program(program)

    assert str(caught.value) == message
