"""Rest: nothing is in flight when the program ends."""

from collections.abc import Iterable

from fsdp_sim.checkers.words import Words
from fsdp_sim.clock import Clocks
from fsdp_sim.errors import Finding
from fsdp_sim.op import Kind, Op

DEFAULT_STREAM = 0


class Rest:
    """The last collective of every stream must have been waited for: by another stream or the host.

    The stream that computes is behind its own collectives anyway, so the default stream is left out.
    Memory freed without a wait does not count as rest: its next user would be corrupted.
    """

    kinds = frozenset({Kind.COLLECTIVE})

    def __init__(self, words: Words) -> None:
        self._words = words
        self._last: dict[tuple[int, int], tuple[Op, Clocks]] = {}

    def on_op(self, op: Op, clocks: Clocks) -> Iterable[Finding]:
        """Remember the last collective of each stream."""
        if op.stream != DEFAULT_STREAM:
            self._last[op.rank, op.stream] = (op, clocks)
        return ()

    def on_end(self) -> Iterable[Finding]:
        """Report what nobody has waited for."""
        return [
            self._report(op)
            for (_, stream), (op, clocks) in self._last.items()
            if not _is_awaited(clocks, stream, op.tick)
        ]

    def _report(self, op: Op) -> Finding:
        words = self._words
        message = (
            f"rank {op.rank}: {op.name!r} on {words.stream(op.rank, op.stream)} was still in flight"
            " when the program ended; nothing waited for it"
        )
        return Finding("NotAtRest", message, (words.site(op),), (), (op.rank,))


def _is_awaited(clocks: Clocks, stream: int, tick: int) -> bool:
    """Whether any other stream or the host is behind op ``tick`` of ``stream``."""
    others = [clock for other, clock in clocks.streams.items() if other != stream]
    return any(clock.get(stream, 0) >= tick for clock in (clocks.host, *others))
