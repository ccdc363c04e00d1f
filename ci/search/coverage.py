"""What the programs of a search had in them, and what never came up.

A program in which no gather overlapped any compute does not count: nothing in it could be ordered wrongly.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations

from ci.search.overlap import gather_levels, reductions_overlap
from fsdp_sim.program import ProgramSpec
from fsdp_sim.program.features import EXCLUDED, FEATURES, features
from fsdp_sim.simulation import Report

SHARE_MIN = 0.05
"""Of all programs that count, for each feature."""
TWO_LEVELS = "gathers overlap compute on two levels"
THIRDS: dict[str, tuple[str, ...]] = {
    "units on two levels": ("units on two levels",),
    "ranks that differ, or conditional calls": ("ranks differ", "conditional"),
    TWO_LEVELS: (TWO_LEVELS,),
}
"""What a third of the programs must have: one of these features, or what their run showed."""

Pair = tuple[str, str]


def _stat(name: str) -> Callable[[Report], bool]:
    """Return whether some rank's context counted one such thing."""
    return lambda report: any(step.stats[name] > 0 for run in report.results for step in run.steps)


SOMETIMES: dict[str, Callable[[Report], bool]] = {
    "a reduction overlaps compute": lambda report: reductions_overlap(report.trace.ops),
    "a prefetch is used": _stat("used_prefetches"),
    "a prefetch is not used": _stat("unused_prefetches"),
    "a gather comes on demand": _stat("on_demand_gathers"),
    "a schedule deviates": lambda report: ">" in report.schedule,
    "a fault strikes": lambda report: any(report.faults.values()),
    "a step leaves a parameter without gradient": lambda report: any(
        gradient is None
        for run in report.results
        for step in run.steps
        for gradient in step.gradients.values()
    ),
}
"""What must happen in some runs."""


@dataclass
class Coverage:
    """Counts over programs.

    Attributes:
        programs: that count.
        without_overlap: that do not.
        features: how often each feature came up.
        pairs: how often each two features came up in one program.
        thirds: how often each of ``THIRDS`` came up.
        sometimes: how often each of ``SOMETIMES`` came up.
    """

    programs: int = 0
    without_overlap: int = 0
    features: Counter[str] = field(default_factory=Counter)
    pairs: Counter[Pair] = field(default_factory=Counter)
    thirds: Counter[str] = field(default_factory=Counter)
    sometimes: Counter[str] = field(default_factory=Counter)

    def add(self, program: ProgramSpec, report: Report) -> None:
        """Count one run, whose trace was kept."""
        levels = gather_levels(report.trace.ops)
        if not levels:
            self.without_overlap += 1
            return
        had = features(program)
        self.programs += 1
        self.features.update(had)
        self.pairs.update(combinations(had, 2))
        showed = {*had, TWO_LEVELS} if levels > 1 else set(had)
        self.thirds.update(name for name, any_of in THIRDS.items() if not showed.isdisjoint(any_of))
        self.sometimes.update(name for name, holds in SOMETIMES.items() if holds(report))

    def merge(self, other: "Coverage") -> None:
        """Add the counts of another search."""
        self.programs += other.programs
        self.without_overlap += other.without_overlap
        for name in ("features", "pairs", "thirds", "sometimes"):
            getattr(self, name).update(getattr(other, name))

    def share(self, count: int) -> float:
        """Return a count as a share of the programs that count."""
        return count / max(self.programs, 1)

    def never(self) -> list[str]:
        """Return what never came up though it can: features, pairs of them, events."""
        pairs = [pair for pair in combinations(FEATURES, 2) if not self.pairs[pair]]
        return [
            *(name for name in FEATURES if not self.features[name]),
            *(
                f"{one} + {other}"
                for one, other in pairs
                if frozenset((one, other)) not in EXCLUDED
            ),
            *(name for name in SOMETIMES if not self.sometimes[name]),
        ]

    def lines(self) -> Iterator[str]:
        """Yield the summary: shares, what is too rare, what never came up."""
        yield f"{self.programs} programs count; {self.without_overlap} overlapped no gather"
        for name in THIRDS:
            share = self.share(self.thirds[name])
            yield f"{share:7.1%}  {name}{'' if share >= 1 / 3 else '  (MISSED: a third)'}"
        for name in FEATURES:
            share = self.share(self.features[name])
            yield f"{share:7.1%}  {name}{'' if share >= SHARE_MIN else '  (MISSED: 5 %)'}"
        for name in SOMETIMES:
            yield f"{self.share(self.sometimes[name]):7.1%}  {name}"
        never = self.never()
        yield f"never exercised: {len(never)}"
        yield from (f"  {name}" for name in never)
