"""Recheck: run a schedule twice and name the first step at which the two runs differ."""

from typing import NamedTuple

from fsdp_sim.scheduler.decision import Decision, Scheduler
from fsdp_sim.scheduler.independence import Point


class Step(NamedTuple):
    """One decision as a run met it."""

    step: int
    kind: str
    running: int | None
    options: tuple[int, ...]
    default: int

    def __str__(self) -> str:
        """Return the decision in words."""
        who = "nobody" if self.running is None else f"rank {self.running}"
        return f"{self.kind!r} with options {list(self.options)} while {who} runs"


class Difference(NamedTuple):
    """The first step at which the second run was not as the first; None where a run had ended."""

    step: int
    first: Step | None
    second: Step | None

    def __str__(self) -> str:
        """Return both runs side by side."""
        first = self.first or "the end of the run"
        second = self.second or "the end of the run"
        return f"step {self.step}: the first run met {first}, the second {second}"


class Recheck:
    """Records every decision of a first run, repeats its choices in a second and compares.

    Attributes:
        difference: where the second run left the first, or None.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._steps: list[Step] = []
        self._choices: list[int] = []
        self._position = 0
        self._is_second = False
        self.difference: Difference | None = None

    def reached(self, point: Point) -> None:
        """Let a scheduler that wants to know learn of a point."""
        learn = getattr(self._scheduler, "reached", None)
        if learn is not None:
            learn(point)

    def choose(self, decision: Decision) -> int:
        """Return the scheduler's choice, or in the second run the first one's."""
        met = Step(
            decision.step,
            decision.kind,
            decision.running,
            tuple(decision.options),
            decision.default,
        )
        if self._is_second:
            return self._compare(met)
        choice = self._scheduler.choose(decision)
        self._steps.append(met)
        self._choices.append(choice)
        return choice

    def again(self) -> None:
        """The first run is over: whatever comes now is the second."""
        self._is_second = True

    def end(self) -> None:
        """The second run is over: it must have met as many decisions as the first."""
        if self.difference is None and self._position < len(self._steps):
            first = self._steps[self._position]
            self.difference = Difference(first.step, first, None)

    def _compare(self, met: Step) -> int:
        position, self._position = self._position, self._position + 1
        if self.difference is not None:
            return met.default
        first = self._steps[position] if position < len(self._steps) else None
        if met != first:
            self.difference = Difference(met.step, first, met)
            return met.default
        return self._choices[position]
