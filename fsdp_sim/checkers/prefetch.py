"""Prefetch: what a runtime gathers is used before it is given back."""

from collections.abc import Iterable

from fsdp_sim.checkers.checker import COLLECTIVE, FREE, WORK_KINDS
from fsdp_sim.checkers.words import Words, place
from fsdp_sim.clock import Clocks
from fsdp_sim.errors import Finding
from fsdp_sim.op import Op

GATHERS = ("fsdp_core::unshard", "FSDP::all_gather")
"""Labels of collectives that gather weights."""


class Prefetch:
    """A gathered block that is freed, or left at the end, without a read was gathered for nothing.

    Only collectives that a runtime labelled as gathers of weights count: a program may well gather a
    value that one rank alone looks at.
    """

    kinds = WORK_KINDS | {FREE}

    def __init__(self, words: Words) -> None:
        self._words = words
        self._unread: dict[int, dict[int, Op]] = {}

    def on_op(self, op: Op, clocks: Clocks) -> Iterable[Finding]:  # noqa: ARG002
        """Follow blocks from their gather to their first read."""
        if op.kind is COLLECTIVE:
            self._take(op)
            return ()
        unread = self._unread.get(op.rank)
        if not unread:
            return ()
        if op.kind is FREE:
            gather = unread.pop(op.other, None)
            return () if gather is None else [self._report(gather, f"freed at {place(op)}")]
        for access in op.accesses:
            if access[0] in unread and not access.write:
                del unread[access[0]]
        return ()

    def on_end(self) -> Iterable[Finding]:
        """Report what is still unread."""
        return [
            self._report(gather, "still there when the program ended")
            for unread in self._unread.values()
            for gather in unread.values()
        ]

    def _take(self, op: Op) -> None:
        """A gather writes blocks anew; any other collective may read them."""
        unread = self._unread.setdefault(op.rank, {})
        is_gather = op.annotation is not None and op.annotation.startswith(GATHERS)
        for access in op.accesses:
            if not is_gather and not access.write:
                unread.pop(access.storage, None)
            elif is_gather and access.write:
                unread[access.storage] = op

    def _report(self, gather: Op, fate: str) -> Finding:
        message = (
            f"rank {gather.rank}: what {gather.name!r} gathered for {gather.annotation!r}"
            " was never read"
        )
        sites = (self._words.site(gather),)
        return Finding("UnusedPrefetch", message, sites, (fate,), (gather.rank,))
