"""What the demo counts in a trace, step by step: collectives, how early they were issued, memory."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fsdp_sim.errors import Finding
from fsdp_sim.op import Kind, Op

RUNTIME_RANGES = "fsdp_core::"
STEP_RANGE = "fsdp_core::forward <root>"
"""The range that a training step opens with."""
COMPUTE_STREAM = 0
"""A rank's default stream is the first that it uses."""


@dataclass
class StepFigures:
    """One step of one rank.

    Attributes:
        ahead: collectives that compute issued after them may overlap.
        peak_full_nbytes: most bytes of full parameters that were allocated at once.
        first_op: index of the op that the step opens with.
    """

    first_op: int = 0
    all_gathers: int = 0
    reduce_scatters: int = 0
    ahead: int = 0
    peak_full_nbytes: int = 0


@dataclass
class _InFlight:
    stream: int
    index: int
    is_overlapped: bool = False


@dataclass
class _Counter:
    """A fold over the ops of one rank."""

    steps: list[StepFigures] = field(default_factory=list)
    in_flight: list[_InFlight] = field(default_factory=list)
    events: dict[int, tuple[int, int]] = field(default_factory=dict)
    full: dict[int, int] = field(default_factory=dict)

    def count(self, op: Op) -> None:
        match op.kind:
            case Kind.RANGE_PUSH if op.name == STEP_RANGE:
                self.steps.append(StepFigures(first_op=op.index))
            case Kind.COLLECTIVE if self.steps and _is_of_runtime(op):
                self.steps[-1].all_gathers += op.name.startswith("all_gather")
                self.steps[-1].reduce_scatters += op.name.startswith("reduce_scatter")
                self.in_flight.append(_InFlight(op.stream, op.index))
            case Kind.ATEN if op.stream == COMPUTE_STREAM:
                for collective in self.in_flight:
                    collective.is_overlapped = True
            case Kind.RECORD_EVENT:
                self.events[op.other] = op.stream, op.index
            case Kind.WAIT_EVENT if op.stream == COMPUTE_STREAM and op.other in self.events:
                self.join(*self.events[op.other])
            case Kind.WAIT_STREAM if op.stream == COMPUTE_STREAM:
                self.join(op.other, op.index)
            case Kind.ALLOC if _is_of_runtime(op) and "unshard" in str(op.annotation):
                self.full[op.other] = op.nbytes
                if self.steps:
                    held = max(self.steps[-1].peak_full_nbytes, sum(self.full.values()))
                    self.steps[-1].peak_full_nbytes = held
            case Kind.FREE:
                self.full.pop(op.other, None)
            case _:
                pass

    def join(self, stream: int, index: int) -> None:
        """Compute now waits for what ``stream`` had been given before op ``index``."""
        joined = [c for c in self.in_flight if c.stream == stream and c.index < index]
        if joined:
            self.steps[-1].ahead += sum(collective.is_overlapped for collective in joined)
        self.in_flight = [collective for collective in self.in_flight if collective not in joined]


def _is_of_runtime(op: Op) -> bool:
    return op.annotation is not None and op.annotation.startswith(RUNTIME_RANGES)


def findings_of_steps(
    findings: Iterable[Finding], of_ranks: Sequence[Sequence[StepFigures]]
) -> list[int]:
    """Count the findings of each step, where each first occurred; set-up belongs to the first."""
    counts = [0] * len(of_ranks[0])
    for finding in findings:
        last = finding.ops[-1] if finding.ops else None
        steps = (
            [each for each in of_ranks[last.rank] if each.first_op <= last.index] if last else []
        )
        counts[max(len(steps) - 1, 0)] += 1
    return counts


def step_figures(ops: Iterable[Op], rank: int) -> list[StepFigures]:
    """Count the steps of one rank."""
    counter = _Counter()
    for op in ops:
        if op.rank == rank:
            counter.count(op)
    return counter.steps
