"""Group calls: groups that every rank must make, in one order and of the same ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fsdp_sim.checkers.deadlock import Arrival
from fsdp_sim.engine.world import Rank, Wait
from fsdp_sim.errors import Finding
from fsdp_sim.op import Source

Parts = tuple[tuple[int, ...], ...]
"""The ranks of each group that a call makes."""


class _Place(NamedTuple):
    """One call, as all ranks count them: the verb, whose call it is, and how many came before."""

    verb: str
    parent: str
    number: int

    def __str__(self) -> str:
        return f"{self.verb} (call {self.number} on group {self.parent!r})"


@dataclass(frozen=True)
class _Call:
    parts: Parts
    source: Source | None

    def __str__(self) -> str:
        return f"{[list(part) for part in self.parts]} at {self.source}"


class GroupCalls:
    """Who has made which group: PyTorch names groups by counting, and start-up waits for all members.

    A rank that leaves a call out, or gives other ranks, joins a group under the name of another one.
    ``split_group`` waits for all ranks of the parent, as NCCL's communicator does; ``new_group`` does not,
    as NCCL makes the communicator at the first collective.

    Source: distributed_c10d.py, torch 2.13 (``new_group``, ``split_group``); NCCL user guide,
    ``ncclCommSplit``.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[int, str, str], int] = {}
        self._calls: dict[_Place, dict[int, _Call]] = {}
        self._among: dict[_Place, tuple[int, ...]] = {}
        self._waiting: list[Rank] = []

    def note(
        self,
        rank: int,
        verb: str,
        parent: str,
        among: Sequence[int],
        parts: Parts,
        source: Source | None,
    ) -> Finding | None:
        """Take in a rank's next call on a parent group; return how it differs from another rank's.

        Args:
            rank: who calls.
            verb: ``new_group`` or ``split_group``.
            parent: name of the group whose ranks must all call.
            among: global ranks of the parent.
            parts: global ranks of each new group.
            source: the line of the call.
        """
        number = self._counts.get((rank, verb, parent), 0)
        self._counts[rank, verb, parent] = number + 1
        place, call = _Place(verb, parent, number), _Call(parts, source)
        calls = self._calls.setdefault(place, {})
        self._among[place] = tuple(among)
        calls[rank] = call
        for waiting in self._waiting:
            waiting.wake()
        self._waiting = []
        other = next(iter(calls))
        return None if calls[other].parts == parts else _mismatch(place, other, rank, calls)

    def await_all(self, rank: Rank, verb: str, parent: str) -> None:
        """Park until all ranks of the parent have made the rank's latest call."""
        place = _Place(verb, parent, self._counts[rank.index, verb, parent] - 1)
        while missing := self._missing(place):
            self._waiting.append(rank)
            needs = tuple(Arrival(each, str(place)) for each in missing)
            rank.park(Wait(verb, is_host_wait=True, needs=needs))

    def unmade(self) -> list[Finding]:
        """Return the calls that some ranks have left out, now that all programs have ended."""
        return [
            _unmade(place, missing, self._calls[place])
            for place in self._calls
            if (missing := self._missing(place))
        ]

    def _missing(self, place: _Place) -> list[int]:
        return [rank for rank in self._among[place] if rank not in self._calls[place]]


def _mismatch(place: _Place, first: int, second: int, calls: dict[int, _Call]) -> Finding:
    return Finding(
        kind="CollectiveMismatch",
        message=(
            f"{place} must be made by every rank with the same ranks: rank {first} makes groups of "
            f"{calls[first]}, rank {second} of {calls[second]}"
        ),
        detail=("let every rank make every group, its members or not, in one order",),
        ranks=(first, second),
    )


def _unmade(place: _Place, missing: list[int], calls: dict[int, _Call]) -> Finding:
    who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    first = next(iter(calls))
    return Finding(
        kind="Deadlock",
        message=f"the program has ended before every rank made a group; missing: {who} in {place}",
        detail=(
            f"rank {first} makes groups of {calls[first]}",
            (
                "every rank must make every group, its members or not: others wait for it at start-up, and "
                "later groups get the names of others; or pass use_local_synchronization=True"
            ),
        ),
        ranks=tuple(missing),
    )
