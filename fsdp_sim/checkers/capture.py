"""Capture: a training step can be captured in a CUDA graph."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from fsdp_sim.checkers.checker import ALLOC, RANGE_POP, RANGE_PUSH, WORK_KINDS
from fsdp_sim.checkers.words import Words, place
from fsdp_sim.clock import Clocks
from fsdp_sim.errors import Finding
from fsdp_sim.op import Kind, Op

RUNTIME = "fsdp_core::"
FORWARD = "fsdp_core::forward"
IN_BACKWARD = ("fsdp_core::backward", "fsdp_core::recompute")
COMPUTE = (FORWARD, *IN_BACKWARD)
COMPLETION = "fsdp_core::complete"
"""Range around what ends a step, at whose end the caller's stream is behind all others."""

_RUNS = WORK_KINDS | {ALLOC}


@dataclass
class _Step:
    """What would be captured, from a root's forward or backward to the completion.

    Attributes:
        start: the range that opened it; its stream is the caller's.
        joined: streams that are ordered after the start.
        earlier: streams that forwards before this one took in, which may be part of the step.
        events: events recorded on them.
        last: stream -> its last op in the step.
        left: stream -> its last op before the step, where completions have left it out.
        depth: open forward and backward ranges.
        forwards: open forward ranges.
        has_backward: whether a backward has begun.
    """

    start: Op
    joined: set[int]
    earlier: set[int] = field(default_factory=set)
    events: set[int] = field(default_factory=set)
    last: dict[int, Op] = field(default_factory=dict)
    left: dict[int, Op] = field(default_factory=dict)
    depth: int = 0
    forwards: int = 0
    has_backward: bool = False

    def holds(self, stream: int) -> bool:
        """Whether the capture has reached a stream: from its start, or from what may be its start."""
        return stream in self.joined or (self.has_backward and stream in self.earlier)

    def spread(self, sync: Op) -> None:
        """Carry the capture along an event or a wait."""
        if sync.kind is Kind.RECORD_EVENT:
            if sync.stream in self.joined:
                self.events.add(sync.other)
            else:
                self.events.discard(sync.other)
        elif sync.other in (self.events if sync.kind is Kind.WAIT_EVENT else self.joined):
            self.joined.add(sync.stream)


@dataclass
class _Ended:
    """A step that has completed.

    Attributes:
        step: the step.
        joins: streams that each of its completions waited for.
        left_out: stream -> its last op, and what to report if one of the completions is its own.
    """

    step: _Step
    joins: list[set[int]] = field(default_factory=list)
    left_out: dict[int, tuple[Op, Finding]] = field(default_factory=dict)

    def findings(self, contexts: list[set[int]]) -> Iterable[Finding]:
        """Return what its completions left out of what was theirs to join."""
        for stream, (_, finding) in self.left_out.items():
            owner = next((each for each in contexts if stream in each), None)
            if owner is None or any(not join or join & owner for join in self.joins):
                yield finding


class Capture:
    """Follows which streams a capture of the step would have reached.

    A capture spreads from the stream where it begins to those that wait for an event recorded inside it,
    and must have come back at its end.  So from the start of a root's forward (or of a backward without
    one) to the completion, every operator, collective and allocation of the runtime must be on a stream
    that is ordered after the start; and at the completion every stream that it used must be ordered
    before the caller's.  What the program does on streams of its own is its own business.  A second
    forward before any backward starts anew, for evaluation has no completion; but a backward may go
    through both, which may be of two contexts, so it may use what either took in.  So may a backward
    whose forward came before a step of another context.  A completion inside a forward, which computed
    gradients itself, does not end the step around it.

    Of several contexts, one may complete while another is inside a window of microbatches, whose own
    completion will join what it has in flight: a capture that held both would end there.  So a completion
    answers for the streams of its context, which are those that its completions wait for, as the whole
    run shows; one that waits for nothing answers for all, and a stream for which none waits is everyone's.

    Clocks do not suffice here: a wait for work that is already known to be done changes no clock, but it
    is what takes a stream into a capture.

    Source: CUDA C++ programming guide 12.x, section 3.2.8.7.3 (cross-stream dependencies and events).
    """

    kinds = _RUNS | {
        RANGE_PUSH,
        RANGE_POP,
        Kind.RECORD_EVENT,
        Kind.WAIT_EVENT,
        Kind.WAIT_STREAM,
    }

    def __init__(self, words: Words) -> None:
        self._words = words
        self._steps: dict[int, _Step] = {}
        self._ended: dict[int, _Ended] = {}
        self._open: defaultdict[int, list[_Ended]] = defaultdict(list)
        self._joins: dict[int, set[int]] = {}
        self._reached: defaultdict[int, set[int]] = defaultdict(set)
        self._contexts: defaultdict[int, list[set[int]]] = defaultdict(list)
        self._syncs: defaultdict[int, list[Op]] = defaultdict(list)

    def on_op(self, op: Op, clocks: Clocks) -> Iterable[Finding]:
        """Follow the step, if one is open or begins here."""
        kind = op.kind
        step = self._steps.get(op.rank)
        if kind in _RUNS:
            syncs = self._syncs.get(op.rank)
            if syncs:
                syncs.clear()
            return () if step is None else self._use(step, op)
        if kind is RANGE_PUSH or kind is RANGE_POP:
            return self._range(step, op, clocks)
        self._syncs[op.rank].append(op)
        if kind is Kind.WAIT_STREAM and op.rank in self._joins:
            self._joins[op.rank].add(op.other)
        if step is not None:
            step.spread(op)
        return ()

    def on_end(self) -> Iterable[Finding]:
        """Return what completed steps left out; one that did not complete is captured by nobody."""
        for rank, ended in self._ended.items():
            self._open[rank].append(ended)
        self._ended.clear()
        return tuple(
            finding
            for rank, steps in self._open.items()
            for ended in steps
            for finding in ended.findings(self._contexts[rank])
        )

    def _begin(self, op: Op) -> None:
        """Begin a step: behind the last work, so that waits right before the range belong to it."""
        is_backward = op.name.startswith(IN_BACKWARD)
        before = self._steps.get(op.rank)
        step = _Step(op, {op.stream}, depth=1, has_backward=is_backward)
        step.forwards = 0 if is_backward else 1
        if before is not None:
            step.earlier = before.joined | before.earlier
            step.left = before.left
        elif is_backward:
            step.earlier = set(self._reached[op.rank])
        ended = self._ended.pop(op.rank, None)
        if ended is not None and ended.left_out:
            self._open[op.rank].append(ended)
            step.left = {stream: last for stream, (last, _) in ended.left_out.items()}
        for sync in self._syncs[op.rank]:
            step.spread(sync)
        self._steps[op.rank] = step

    def _use(self, step: _Step, op: Op) -> Iterable[Finding]:
        """What the runtime does must be on a stream that the capture has reached."""
        if op.stream == step.start.stream or not _is_runtimes(op):
            return ()
        step.last[op.stream] = op
        return () if step.holds(op.stream) else [self._outside(step, op)]

    def _outside(self, step: _Step, op: Op) -> Finding:
        """An op is on a stream that the capture has not reached."""
        words = self._words
        stream = words.stream(op.rank, op.stream)
        message = (
            f"rank {op.rank}: {op.name!r} on {stream} is not ordered after the start of"
            f" {step.start.name!r}, so a captured step would not hold it"
        )
        caller = words.stream(op.rank, step.start.stream)
        detail = (f"missing edge: {stream} must wait for {caller} after {place(step.start)}",)
        return _finding(message, (step.start, op), detail, words)

    def _range(self, step: _Step | None, op: Op, clocks: Clocks) -> Iterable[Finding]:
        is_push = op.kind is RANGE_PUSH
        if op.name.startswith(COMPLETION):
            if is_push:
                self._joins[op.rank] = set()
            else:
                self._complete(step, op, clocks)
            return ()
        if not op.name.startswith(COMPUTE):
            return ()
        is_backward = op.name.startswith(IN_BACKWARD)
        is_idle = step is None or (step.depth == 0 and not step.has_backward and not is_backward)
        if is_push and is_idle:
            self._begin(op)
        elif step is not None:
            change = 1 if is_push else -1
            step.depth += change
            step.forwards += 0 if is_backward else change
            step.has_backward = step.has_backward or is_backward
        return ()

    def _complete(self, step: _Step | None, end: Op, clocks: Clocks) -> None:
        """Every stream that was used must be behind the caller's now, or at another completion.

        Why another: each context of a backward completes its own streams, one after the other.
        """
        joins = self._joins.pop(end.rank, set())
        self._note_context(end.rank, joins)
        ended = self._ended.get(end.rank)
        if step is None:
            if ended is None:
                return
        else:
            if ended is None or ended.step is not step:
                ended = self._ended[end.rank] = _Ended(step)
            self._reached[end.rank] |= step.joined | step.earlier
            if step.forwards:
                step.has_backward = False
            else:
                del self._steps[end.rank]
        ended.joins.append(joins)
        ended.left_out = {
            stream: (op, self._unjoined(op, end))
            for stream, op in {**ended.step.left, **ended.step.last}.items()
            if not clocks.is_ordered(stream, clocks.of(stream)[stream], end.stream)
        }

    def _note_context(self, rank: int, joins: set[int]) -> None:
        """Streams for which one completion waits are of one context."""
        context, others = set(joins), []
        for each in self._contexts[rank]:
            if each & context:
                context |= each
            else:
                others.append(each)
        self._contexts[rank] = [*others, context]

    def _unjoined(self, last: Op, end: Op) -> Finding:
        words = self._words
        stream = words.stream(last.rank, last.stream)
        message = (
            f"rank {last.rank}: {last.name!r} on {stream} is not ordered before"
            f" {words.stream(end.rank, end.stream)} when the step completes,"
            " so a capture could not end here"
        )
        return _finding(message, (last, end), words.missing(last, end), words)


def _finding(message: str, ops: tuple[Op, Op], detail: tuple[str, ...], words: Words) -> Finding:
    first, second = ops
    sites = (words.site(first), words.site(second))
    return Finding("CaptureUnsafe", message, sites, detail, (second.rank,))


def _is_runtimes(op: Op) -> bool:
    """Whether the runtime did it, and not the program inside a unit's forward or backward."""
    label = op.annotation
    return label is not None and label.startswith(RUNTIME) and not label.startswith(COMPUTE)
