"""Replay: the deviations of a schedule, program order between them."""

from collections.abc import Sequence
from typing import NamedTuple

from fsdp_sim.schedule import Schedule
from fsdp_sim.scheduler.decision import Decision


class Misfit(NamedTuple):
    """The first deviation that the program did not offer.

    Attributes:
        step: the decision it was meant for.
        wanted: its choice.
        offered: the options there; empty when the run ended before the step.
    """

    step: int
    wanted: int
    offered: tuple[int, ...]

    def __str__(self) -> str:
        """Return what was wanted and what was offered."""
        if not self.offered:
            return f"step {self.step} wants {self.wanted}, but the run ended before it"
        return f"step {self.step} wants {self.wanted}, but the program offers {list(self.offered)}"


class Replay:
    """Applies a schedule.

    Args:
        schedule: what to apply.
        strict: at the first deviation that does not fit, go on in program order; else skip it alone.

    Attributes:
        misfit: the first deviation that did not fit, or None.
    """

    def __init__(self, schedule: Schedule, *, strict: bool) -> None:
        self._choices = {deviation.step: deviation.choice for deviation in schedule.deviations}
        self._strict = strict
        self.misfit: Misfit | None = None

    def choose(self, decision: Decision) -> int:
        """Return the schedule's choice for this step if it is offered, else the default."""
        wanted = self._choices.pop(decision.step, None)
        if wanted is None or (self._strict and self.misfit is not None):
            return decision.default
        if wanted in decision.options:
            return wanted
        self._note(decision.step, wanted, decision.options)
        return decision.default

    def end(self) -> None:
        """The run is over: what has not been applied by now does not fit."""
        for step, wanted in self._choices.items():
            self._note(step, wanted, ())
        self._choices.clear()

    def _note(self, step: int, wanted: int, offered: Sequence[int]) -> None:
        if self.misfit is None:
            self.misfit = Misfit(step, wanted, tuple(offered))
