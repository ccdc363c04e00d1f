"""Recorder: the effective schedule of a run, whatever policy chose it."""

from collections.abc import Callable

from fsdp_sim.schedule import DEVIATIONS_MAX, Deviation, Schedule
from fsdp_sim.scheduler.decision import Decision, Scheduler

DESCRIBED_MAX = 8
"""How many deviations are kept in words: more are no explanation."""


class Recorder:
    """Passes decisions on to a scheduler and keeps the choices that differ from the default.

    Attributes:
        deviations: so far, in rising order of step.
        described: the first of them in words.
    """

    def __init__(self, scheduler: Scheduler, where: Callable[[], object]) -> None:
        """Make a recorder; ``where`` returns the source line at which the running rank stands."""
        self.scheduler = scheduler
        self.deviations: list[Deviation] = []
        self.described: list[str] = []
        self._where = where

    def choose(self, decision: Decision) -> int:
        """Return the scheduler's choice, and keep it if it deviates.

        Raises:
            ValueError: the scheduler chose what is not an option.
            OverflowError: more deviations than a schedule holds.
        """
        choice = self.scheduler.choose(decision)
        if choice not in decision.options:
            raise ValueError(
                f"a scheduler must choose one of {list(decision.options)} at step {decision.step},"
                f" got {choice} from {type(self.scheduler).__name__}"
            )
        if choice != decision.default:
            if len(self.deviations) == DEVIATIONS_MAX:
                raise OverflowError(
                    f"a run may deviate {DEVIATIONS_MAX} times at most, at step {decision.step};"
                    " lower step_limit, or choose another scheduler"
                )
            self.deviations.append(Deviation(decision.step, choice))
            if len(self.described) < DESCRIBED_MAX:
                source = None if decision.running is None else self._where()
                self.described.append(
                    decision.describe(choice, None if source is None else str(source))
                )
        return choice

    def schedule(self, world_size: int, knobs: tuple[str, ...] = ()) -> Schedule:
        """Return what has been chosen so far, as a schedule that replays it."""
        return Schedule(world_size, knobs, tuple(self.deviations))
