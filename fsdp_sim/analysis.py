"""Analysis: clocks and checkers over the ops of a run, live or stored."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from fsdp_sim.checkers import Checker
from fsdp_sim.checkers.deadlock import Stand
from fsdp_sim.checkers.liveness import Liveness
from fsdp_sim.clock import ADVANCE, Clocks
from fsdp_sim.errors import Finding
from fsdp_sim.missing_edges import MissingEdges
from fsdp_sim.op import Kind, Op

_C = TypeVar("_C")

STEPS_KEPT = 64
"""Steps that a finding lists; its count goes on."""

WAITING_MAX = 512
"""Ops that wait to be judged together."""

_COLLECTIVE = Kind.COLLECTIVE
"""What findings that end a program are about, so that it never waits."""


@dataclass(slots=True)
class _Group:
    """All occurrences of one finding."""

    first: Finding
    count: int = 0
    ranks: set[int] = field(default_factory=set)
    steps: dict[int, None] = field(default_factory=dict)
    consequences: dict[str, int] = field(default_factory=dict)

    def add(self, finding: Finding, step: int | None) -> None:
        """Count one more occurrence."""
        self.count += finding.count
        self.ranks.update(finding.ranks)
        for at in (*finding.steps, *(() if step is None else (step,))):
            if len(self.steps) < STEPS_KEPT:
                self.steps[at] = None

    def explain(self, finding: Finding) -> None:
        """Count a finding of another kind or place that the same missing edge would mend."""
        self.consequences[finding.kind] = self.consequences.get(finding.kind, 0) + finding.count

    def merged(self) -> Finding:
        """Return the first occurrence with the count, ranks and steps of all."""
        also = ", ".join(f"{kind} {count} times" for kind, count in self.consequences.items())
        more = (f"the same missing edge also shows as {also}",) if also else ()
        return replace(
            self.first,
            detail=(*self.first.detail, *more),
            count=self.count,
            ranks=tuple(sorted(self.ranks)),
            steps=tuple(sorted(self.steps)),
        )


class Analysis:
    """Feeds each op to the clocks of its rank and to every checker that wants its kind.

    The engine calls it while the program runs; a stored or recorded trace goes through the same calls.

    What a running program does may be judged a little later, where that changes no answer: many ops in one
    go take half the time, since the program's own code does not come between them.

    Args:
        checkers: as ``checkers.make`` gives them.
        rank_count: number of ranks.
        now: gives the scheduling step at which the run is, for findings; None if there is none.
        keep: takes all ops, in order, some at a time.
    """

    def __init__(
        self,
        checkers: Iterable[Checker],
        rank_count: int,
        *,
        now: Callable[[], int] | None = None,
        keep: Callable[[Sequence[Op]], None] | None = None,
    ) -> None:
        self.checkers = tuple(checkers)
        self._clocks = [Clocks() for _ in range(rank_count)]
        self._waiting: list[Op] = []
        self._keep = keep
        self._now = now
        self._wanted = {
            kind: tuple(checker.on_op for checker in self.checkers if kind in checker.kinds)
            for kind in Kind
        }
        self._groups: dict[tuple[object, ...], _Group] = {}
        self._missing_edges = MissingEdges()

    def clocks(self, rank: int) -> Clocks:
        """Return the clocks of a rank, advanced by all its ops."""
        self.settle()
        return self._clocks[rank]

    def take(self, op: Op) -> Sequence[Finding]:
        """Take one op of a running program in, and judge it now or later; return new findings.

        Ordering:
            ``settle`` must be called before the scheduling step changes, since a finding says its own.
        """
        self._waiting.append(op)
        if op.kind is not _COLLECTIVE and len(self._waiting) < WAITING_MAX:
            return ()
        return self.settle()

    def feed(self, op: Op) -> Sequence[Finding]:
        """Take one op in and judge it; return its findings, each as this one occurrence.

        One that an earlier finding's missing edge would mend too is counted there, and not returned.
        """
        self._waiting.append(op)
        return self.settle()

    def settle(self) -> Sequence[Finding]:
        """Judge the ops that wait; return their findings."""
        if not self._waiting:
            return ()
        waiting, self._waiting = self._waiting, []
        if self._keep is not None:
            self._keep(waiting)
        found: list[Finding] = []
        all_clocks, wanted = self._clocks, self._wanted
        for op in waiting:
            clocks = all_clocks[op.rank]
            if op.kind in ADVANCE:
                clocks.apply(op)
            new: list[Finding] | None = None
            for on_op in wanted[op.kind]:
                broken = on_op(op, clocks)
                if broken:
                    new = [*(new or ()), *broken]
            if new is not None:
                found += self._merge(new)
        return found

    def end(self) -> Sequence[Finding]:
        """The program has ended: return what is broken now."""
        self.settle()
        return self._merge([finding for checker in self.checkers for finding in checker.on_end()])

    def checker(self, kind: type[_C]) -> _C | None:
        """Return the checker of a class, if it takes part; it has seen all ops."""
        self.settle()
        return next((checker for checker in self.checkers if isinstance(checker, kind)), None)

    def add(self, finding: Finding) -> None:
        """Take in a finding that no checker made, such as a deadlock."""
        self.settle()
        self._merge([finding])

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Every finding once, in order of first occurrence, with its count, ranks and steps."""
        self.settle()
        return tuple(group.merged() for group in self._groups.values())

    def _merge(self, new: Iterable[Finding]) -> Sequence[Finding]:
        step = None if self._now is None else self._now()
        unexplained = []
        for finding in sorted(new, key=_is_hearsay):
            cause = self._missing_edges.explanation_of(finding)
            if cause is not None:
                self._groups[_key(cause)].explain(finding)
                continue
            key = _key(finding)
            group = self._groups.get(key)
            if group is None:
                group = self._groups[key] = _Group(finding)
            group.add(finding, step)
            unexplained.append(finding)
        return unexplained


def _is_hearsay(finding: Finding) -> bool:
    """Whether it is about memory that may be shared, and not about bytes that are: said second."""
    return finding.kind != "Race"


def _key(finding: Finding) -> tuple[object, ...]:
    """Return what makes two findings one: kind, source lines, streams; without ops, the message.

    What concerns one op alone also counts by unit: each wasted gather names its own.
    """
    if not finding.ops:
        return (finding.kind, finding.message)
    unit = finding.ops[0].annotation if len(finding.ops) == 1 else None
    return (
        finding.kind,
        unit,
        *((site.source or site.name, site.stream) for site in finding.ops),
    )


def analyse(
    ops: Iterable[Op],
    checkers: Iterable[Checker],
    rank_count: int,
    *,
    stands: Sequence[Stand] = (),
) -> Analysis:
    """Feed all of a stored trace, to its end.

    Args:
        ops: of all ranks.
        checkers: as ``checkers.make`` gives them.
        rank_count: number of ranks.
        stands: where the ranks' hosts stood at the end of the run, if that is known.
    """
    analysis = Analysis(checkers, rank_count)
    for op in ops:
        analysis.feed(op)
    liveness = analysis.checker(Liveness)
    if stands and liveness is not None and not liveness.has_deadlock:
        finding = liveness.never_completes(stands)
        if finding is not None:
            analysis.add(finding)
    analysis.end()
    return analysis
