"""Prefetch: what a runtime gathers is used before it is given back, and not left in flight."""

from collections.abc import Iterable

from fsdp_sim.checkers.capture import COMPLETION
from fsdp_sim.checkers.checker import COLLECTIVE, FREE, RANGE_POP, WORK_KINDS
from fsdp_sim.checkers.words import Words, place
from fsdp_sim.clock import Clocks
from fsdp_sim.errors import Finding
from fsdp_sim.op import Kind, Op

GATHERS = ("fsdp_core::unshard", "FSDP::all_gather")
"""Labels of collectives that gather weights."""
NO_USES = ("fsdp_core::reshard", "fsdp_core::await_gather")
"""Labels of waits that end a gather in order to drop it, or to write what it reads."""


class _Gathers:
    """The gathers of one rank that nobody has used yet.

    Attributes:
        unused: block -> the gather that wrote it.
        fresh: stream -> blocks gathered on it since its last record.
        guarded: event -> the blocks that it was recorded for.
    """

    __slots__ = ("fresh", "guarded", "unused")

    def __init__(self) -> None:
        self.unused: dict[int, Op] = {}
        self.fresh: dict[int, list[int]] = {}
        self.guarded: dict[int, list[int]] = {}


class Prefetch:
    """A gathered block that is freed, or left at the end, without a use was gathered for nothing.

    A use is a read, or a stream that waits for the very event that was recorded behind the gather: the
    runtime needed the weights then, though the operators may turn out not to (the first layer's, in a
    backward that needs no gradient of the input).  A wait only to drop the weights, or to write
    what they are made from, is none.

    A gather that was begun and that nobody has waited for or freed when a step completes is an error: its
    unit looks gathered to the next step, which would compute with old weights.

    Only collectives that a runtime labelled as gathers of weights count: a program may well gather a
    value that one rank alone looks at.
    """

    kinds = WORK_KINDS | {FREE, RANGE_POP, Kind.RECORD_EVENT, Kind.WAIT_EVENT}

    def __init__(self, words: Words) -> None:
        self._words = words
        self._ranks: dict[int, _Gathers] = {}

    def on_op(self, op: Op, clocks: Clocks) -> Iterable[Finding]:  # noqa: ARG002
        """Follow blocks from their gather to their first use."""
        gathers = self._ranks.get(op.rank)
        if (
            op.kind is COLLECTIVE
            and op.annotation is not None
            and op.annotation.startswith(GATHERS)
        ):
            self._take(op)
            return ()
        if gathers is None or not gathers.unused:
            return ()
        unused = gathers.unused
        if op.accesses:
            for access in op.accesses:
                if access[0] in unused and not access.write:
                    del unused[access[0]]
        elif op.kind is FREE:
            gather = unused.pop(op.other, None)
            return () if gather is None else [self._report(gather, f"freed at {place(op)}")]
        elif op.kind is RANGE_POP:
            return self._complete(gathers, op) if op.name.startswith(COMPLETION) else ()
        elif op.kind is Kind.RECORD_EVENT:
            gathers.guarded[op.other] = gathers.fresh.pop(op.stream, [])
        elif op.kind is Kind.WAIT_EVENT and not (op.annotation or "").startswith(NO_USES):
            for block in gathers.guarded.pop(op.other, ()):
                unused.pop(block, None)
        return ()

    def on_end(self) -> Iterable[Finding]:
        """Report what is still unused."""
        return [
            self._report(gather, "still there when the program ended")
            for gathers in self._ranks.values()
            for gather in gathers.unused.values()
        ]

    def _take(self, op: Op) -> None:
        gathers = self._ranks.get(op.rank)
        if gathers is None:
            gathers = self._ranks[op.rank] = _Gathers()
        written = [access.storage for access in op.accesses if access.write]
        for access in op.accesses:
            if access.storage not in written:
                gathers.unused.pop(access.storage, None)
        for block in written:
            gathers.unused[block] = op
            gathers.fresh.setdefault(op.stream, []).append(block)

    def _complete(self, gathers: _Gathers, end: Op) -> list[Finding]:
        """Report what is in flight when a step completes."""
        left = list(gathers.unused.values())
        gathers.unused.clear()
        words = self._words
        return [
            Finding(
                "NotAtRest",
                f"rank {gather.rank}: {gather.name!r} for {gather.annotation!r} must be waited for or"
                " freed before the step completes, but its weights were left in flight",
                (words.site(gather), words.site(end)),
                (),
                (gather.rank,),
            )
            for gather in left
        ]

    def _report(self, gather: Op, fate: str) -> Finding:
        message = (
            f"rank {gather.rank}: what {gather.name!r} gathered for {gather.annotation!r}"
            " was never used"
        )
        sites = (self._words.site(gather),)
        return Finding("UnusedPrefetch", message, sites, (fate,), (gather.rank,))
