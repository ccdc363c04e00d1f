"""Statistics: what searches did - schedules, orderings, decisions - and what they never exercised."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Statistics:
    """What searches did; those of other tests and other workers can be added.

    Attributes:
        schedules: how many were run.
        orderings: how many of them differed in the choices made.
        decisions_min: of the shortest run.
        decisions_max: of the longest run.
        decisions_sum: of all runs.
        stopped: how many runs reached the step limit.
        probes: by name, whether it has held in any run (``fsdp_sim.sometimes``).
    """

    schedules: int = 0
    orderings: int = 0
    decisions_min: int = 0
    decisions_max: int = 0
    decisions_sum: int = 0
    stopped: int = 0
    probes: Mapping[str, bool] = field(default_factory=dict)

    def __add__(self, other: "Statistics") -> "Statistics":
        """Return those of both."""
        if not self.schedules:
            return other
        if not other.schedules:
            return self
        return Statistics(
            self.schedules + other.schedules,
            self.orderings + other.orderings,
            min(self.decisions_min, other.decisions_min),
            max(self.decisions_max, other.decisions_max),
            self.decisions_sum + other.decisions_sum,
            self.stopped + other.stopped,
            joined(self.probes, other.probes),
        )

    @property
    def never(self) -> tuple[str, ...]:
        """The probes that were met and never held, sorted."""
        return tuple(sorted(name for name, held in self.probes.items() if not held))

    def __str__(self) -> str:
        """Return them in one line, and one more for what was never exercised."""
        runs = max(self.schedules, 1)
        line = (
            f"{self.schedules} schedules, {self.orderings} distinct orderings, decisions "
            f"min {self.decisions_min} mean {self.decisions_sum / runs:.1f} max {self.decisions_max}, "
            f"{self.stopped / runs:.0%} at the step limit"
        )
        if not self.probes:
            return line
        held = len(self.probes) - len(self.never)
        line += f", {held} of {len(self.probes)} probes held"
        return f"{line}\nnever exercised: {', '.join(self.never)}" if self.never else line


def joined(left: Mapping[str, bool], right: Mapping[str, bool]) -> dict[str, bool]:
    """Return the probes of both: one has held if it has in either."""
    return {name: left.get(name, False) or right.get(name, False) for name in {**left, **right}}
