"""Decision: one point at which a run may go on in more than one way, and who chooses there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

RANK_KINDS = ("start", "issue", "host_wait", "poll", "store", "park", "end")
"""Who runs next.  The options are ranks; ``poll`` is the chance to switch before a poll is answered."""
YES_NO_KINDS = ("query", "is_completed", "collect", "fault")
"""Does it happen now.  The options are (0, 1) and 0 is the default."""

_EVENTS = {
    "query": "query() on rank {rank}{place} says that the work is done",
    "is_completed": "is_completed() on rank {rank}{place} says that the work is done",
    "collect": "garbage is collected on rank {rank}{place}",
    "fault": "the fault happens on rank {rank}{place}",
}


@dataclass(slots=True)
class Decision:
    """What the engine asks a scheduler.

    Attributes:
        step: number of the decision among those with more than one option.
        kind: one of ``RANK_KINDS`` or ``YES_NO_KINDS``.
        running: the rank that runs now, or None before the first and after one has stopped.
        options: ranks in rising order, or (0, 1).
        default: the option that program order takes.
    """

    step: int
    kind: str
    running: int | None
    options: Sequence[int]
    default: int

    @property
    def is_yes_no(self) -> bool:
        """Whether 0 and 1 mean no and yes, and not ranks."""
        return self.kind in YES_NO_KINDS and tuple(self.options) == (0, 1)

    def describe(self, choice: int, source: str | None) -> str:
        """Return in words what a choice that is not the default means, for people who replay it.

        Args:
            choice: what was chosen.
            source: where the running rank's program stands, if it does.
        """
        place = f" at {source}" if source else ""
        if self.is_yes_no:
            event = _EVENTS[self.kind].format(rank=self.running, place=place)
            return f"step {self.step}: {event} (in program order it does not)"
        if self.running is None or self.kind in ("start", "end"):
            return f"step {self.step}: rank {choice} goes on (program order: rank {self.default})"
        stands = f"rank {self.running} stands{place or ' still'}"
        return f"step {self.step}: rank {choice} goes on while {stands} (program order: rank {self.default})"


class Scheduler(Protocol):
    """Chooses among the options of each decision.  Nothing else may depend on chance."""

    def choose(self, decision: Decision) -> int:
        """Return one of ``decision.options``."""
        ...


def default_rank(running: int | None, options: Sequence[int]) -> int:
    """Return what program order takes: the running rank, else the next runnable one, cyclically.

    Args:
        running: the rank that ran last, or None at the start.
        options: the runnable ranks in rising order, at least one.
    """
    if running is None or running in options:
        return options[0] if running is None else running
    return next((rank for rank in options if rank > running), options[0])
