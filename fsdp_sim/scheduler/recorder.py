"""Recorder: the effective schedule of a run, whatever policy chose it."""

from fsdp_sim.schedule import DEVIATIONS_MAX, Deviation, Schedule
from fsdp_sim.scheduler.decision import Decision, Scheduler


class Recorder:
    """Passes decisions on to a scheduler and keeps the choices that differ from the default.

    Attributes:
        deviations: so far, in rising order of step.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.deviations: list[Deviation] = []

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
        return choice

    def schedule(self, world_size: int, knobs: tuple[str, ...] = ()) -> Schedule:
        """Return what has been chosen so far, as a schedule that replays it."""
        return Schedule(world_size, knobs, tuple(self.deviations))
