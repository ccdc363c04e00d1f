"""What the simulator raises and reports: findings, run errors, and the signal that unwinds a rank."""

from dataclasses import dataclass
from typing import Any

from fsdp_sim.op import Source


@dataclass(frozen=True)
class OpSite:
    """One operation as a report shows it."""

    rank: int
    index: int
    name: str
    stream: str
    source: Source | None
    annotation: str | None = None

    def __str__(self) -> str:
        """Return one line: op number, name, unit, stream, source."""
        parts = [f"op {self.index}", self.name, f"on {self.stream}", f"rank {self.rank}"]
        if self.annotation:
            parts.insert(2, f"[{self.annotation}]")
        if self.source:
            parts += map(str, self.source.from_user())
        return "  ".join(parts)


@dataclass(frozen=True)
class Finding:
    """One defect (or notice) of the program under test.

    One finding = one kind, one pair of source lines, one pair of streams by role; ``count`` says how
    often it occurred and ``ranks`` and ``steps`` where, so one missing wait is one finding.
    """

    kind: str
    message: str
    ops: tuple[OpSite, ...] = ()
    detail: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    count: int = 1

    @property
    def is_notice(self) -> bool:
        """Whether it is legal but worth knowing, so that a run with it still counts as clean."""
        return issubclass(FINDING_KINDS[self.kind], Notice)

    def __str__(self) -> str:
        """Return the kind and what ``describe`` says."""
        return f"{self.kind}: {self.describe()}"

    def describe(self) -> str:
        """Return the invariant, both operations and the details, one per line."""
        lines = [self.message]
        lines += [f"  {op}" for op in self.ops]
        lines += [f"  {line}" for line in self.detail]
        if self.count > 1:
            lines.append(f"  occurred {self.count} times, on ranks {list(self.ranks)}")
        return "\n".join(lines)


REPLAY_HINT = "replay with: "
"""How the note of an error begins that says which call replays it."""


class ConfigError(ValueError):
    """A caller of the simulator asked for something that cannot be: nothing has been run."""


class SimulationError(Exception):
    """Base of everything that ends a simulated run.

    Attributes:
        finding: the first error found, or None when the run itself could not go on.
        schedule: the effective schedule, as ``replay`` takes it.
        trace: the trace so far.
        report: the whole report so far.
    """

    def __init__(self, message: str, *, finding: Finding | None = None) -> None:
        super().__init__(message)
        self.finding = finding
        self.schedule: str | None = None
        self.trace: Any = None
        self.report: Any = None


class FindingError(SimulationError):
    """An error in the program under test."""


class Race(FindingError):
    """Two accesses to the same bytes, at least one a write, that nothing orders."""


class UseAfterFree(FindingError):
    """Memory given back to a stream may be used again while another stream still accesses it."""


class CollectiveMismatch(FindingError):
    """The ranks of a group issued different collectives at the same position."""


class Deadlock(FindingError):
    """No rank can go on, on hardware as here."""


class NotAtRest(FindingError):
    """Something was left open when the program ended: a gather in flight, a unit unsharded."""


class ParityError(FindingError):
    """A sharded value differs from the unsharded one."""


class CaptureUnsafe(FindingError):
    """A step could not be captured in a CUDA graph: a stream is not joined to the capture."""


class Leak(FindingError):
    """Device memory that the program can no longer reach is still allocated at the end."""


class Notice(FindingError):
    """Legal, but worth knowing."""


class UnusedPrefetch(Notice):
    """A gather was issued ahead and nobody used it."""


class PossibleDeadlock(Notice):
    """Collectives of two communicators are not ordered and may block each other on some devices."""


FINDING_KINDS: dict[str, type[FindingError]] = {
    kind.__name__: kind
    for kind in (
        Race,
        UseAfterFree,
        CollectiveMismatch,
        Deadlock,
        NotAtRest,
        ParityError,
        CaptureUnsafe,
        Leak,
        UnusedPrefetch,
        PossibleDeadlock,
    )
}


class RunError(SimulationError):
    """Concerns the run and not the program: neither clean nor a finding."""


class StepLimit(RunError):
    """The run took more scheduling decisions than allowed."""


class CannotRunAhead(RunError):
    """Only the simulator's need for values stops the program; hardware would go on."""


class Nondeterminism(RunError):
    """The same schedule gave two different runs."""


class WrongSchema(RunError):
    """An operator does to bytes what the simulator does not know of: no finding can be trusted."""


class Diverged(RunError):
    """A replayed schedule no longer fits the program."""


class HandoverTimeout(RunError):
    """A rank kept the baton for longer than ``HANDOVER_SECONDS_MAX``: it is stuck outside the world."""


class ProgramExit(RuntimeError):
    """A rank's program ended itself with an exit status other than 0."""


class UnseenThread(RunError, RuntimeError):
    """A thread that a rank started used the rank's tensors, streams or groups: nothing of it was seen."""


class InjectedFault(Exception):
    """A fault that the run was asked for; the program may handle it."""


class InjectedCrash(BaseException):
    """Ends a rank as a crash would: the program does not handle it, and it is no error of the run."""


class Unwind(BaseException):
    """Unwinds a rank's program when the world stops; ``except Exception`` does not catch it."""
