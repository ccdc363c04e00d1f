"""A context's life against a small model: passes, evaluations, exceptions and resets in any order.

The machine draws a life as data; a simulated run lives it. Between any two events the model says what
must hold: all units at rest, the order recorded or not, counters that only grow, the values of the
unsharded run.
"""

from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from fsdp_sim.program import (
    ContextSpec,
    LayerSpec,
    ModuleSpec,
    PassSpec,
    ProgramSpec,
    RaiseSpec,
    StepSpec,
    UnitSpec,
)
from fsdp_sim.program.parity import verify
from fsdp_sim.program.results import RankRun

LEAF = ModuleSpec(LayerSpec("scale"), UnitSpec())
MODEL = ModuleSpec(LayerSpec("scale"), UnitSpec(), (LEAF, LEAF))
EVENTS_MAX = 8


class LifeMachine(RuleBasedStateMachine):
    """Collects the events of a life, then lives it in one simulated run.

    Attributes:
        completions: context completions that the events so far must have made.
    """

    context = ContextSpec()

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[StepSpec] = []
        self.completions: list[int] = []

    def add(self, *passes: PassSpec, completions: int) -> None:
        """Add a step, and the number of completions that it must make."""
        before = self.completions[-1] if self.completions else 0
        self.steps.append(StepSpec(passes))
        self.completions.append(before + completions)

    @precondition(lambda self: len(self.steps) < EVENTS_MAX)
    @rule(microbatches=st.integers(1, 2))
    def train(self, microbatches: int) -> None:
        """A step of one or two microbatches: one completion each."""
        self.add(*[PassSpec()] * microbatches, completions=microbatches)

    @precondition(lambda self: len(self.steps) < EVENTS_MAX)
    @rule(kind=st.sampled_from(("no_grad", "inference")))
    def evaluate(self, kind: Literal["no_grad", "inference"]) -> None:
        """An evaluation completes nothing and moves nothing."""
        self.add(PassSpec(kind), completions=0)

    @precondition(lambda self: len(self.steps) < EVENTS_MAX)
    @rule(path=st.sampled_from(("", "0", "1")), reset=st.booleans())
    def raise_in_forward(self, path: str, *, reset: bool) -> None:
        """A forward that raises completes nothing."""
        self.add(PassSpec(raises=RaiseSpec(path, reset=reset)), completions=0)

    @precondition(lambda self: len(self.steps) < EVENTS_MAX)
    @rule(path=st.sampled_from(("0", "1")))
    def raise_in_backward(self, path: str) -> None:
        """A backward that raises completes nothing; the program resets."""
        self.add(PassSpec(raises=RaiseSpec(path, "backward")), completions=0)

    def teardown(self) -> None:
        """Live the life, ending in an ordinary step."""
        if not self.steps:
            return
        self.add(PassSpec(), completions=1)
        program = ProgramSpec(MODEL, context=self.context, width=1, steps=tuple(self.steps))
        report = verify(program)
        for run in report.results:
            assert isinstance(run, RankRun)
            assert [step.stats["steps"] for step in run.steps] == self.completions
            assert all(step.stats["full_nbytes"] == 0 for step in run.steps)


class RecordedLifeMachine(LifeMachine):
    """The same under RECORDED."""

    context = ContextSpec(prefetch_order="recorded")


LIVES = settings(max_examples=8, stateful_step_count=EVENTS_MAX)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
class TestLife(LifeMachine.TestCase):  # type: ignore[misc,valid-type]
    """Live under REGISTRATION."""

    settings = LIVES


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
class TestRecordedLife(RecordedLifeMachine.TestCase):  # type: ignore[misc,valid-type]
    """Live under RECORDED."""

    settings = LIVES


@dataclass(frozen=True)
class _Count:
    """What one pass over MODEL's three units costs."""

    gathers: int
    reductions: int


def test_a_pass_gathers_each_unit_twice_and_reduces_it_once() -> None:
    """Forward and backward, one dtype each."""
    report = verify(ProgramSpec(MODEL, width=1))

    stats = report.results[0].steps[0].stats

    assert _Count(stats["gathers"], stats["reductions"]) == _Count(gathers=6, reductions=3)
