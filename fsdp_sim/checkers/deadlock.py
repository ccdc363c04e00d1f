"""Deadlock: when nobody can run - is it a deadlock on hardware too, and who is missing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fsdp_sim.checkers.device_graph import Operation
from fsdp_sim.errors import Finding, OpSite
from fsdp_sim.op import Op

LINES_MAX = 32
"""Ranks and operations that a report lists one by one; of more it gives the number."""

Site = Callable[[Op], OpSite]


@dataclass(frozen=True)
class StoreKey:
    """A store key that is not set and that somebody waits for."""

    name: str

    def describe(self) -> str:
        """Return the key in words."""
        return f"store key {self.name!r}"


@dataclass(frozen=True)
class Arrival:
    """A call that all ranks of a group must make, and that one of them has not made."""

    rank: int
    call: str

    @property
    def missing(self) -> tuple[int, ...]:
        """The rank."""
        return (self.rank,)

    def describe(self) -> str:
        """Return who must call what."""
        return f"rank {self.rank} to call {self.call}"


@dataclass(frozen=True)
class Issued:
    """An operation as a stored trace names it: by an op with which a rank takes part in it."""

    rank: int
    index: int


Awaited = Operation | StoreKey | Arrival


@dataclass(frozen=True)
class Stand:
    """Where a rank's host stands, or stood when a stored run ended.

    Attributes:
        is_ended: its program has returned or raised.
        is_host_wait: hardware would stop its host here too.
        waits_for: what must complete before it goes on.
        describe: in words: what it waits for, and where.
    """

    rank: int
    is_ended: bool
    is_host_wait: bool
    waits_for: tuple[Awaited | Issued, ...]
    describe: str

    def stored(self) -> "Stand":
        """Return it with operations named, as a trace holds them."""
        waits_for = (
            _names(each)[0] if isinstance(each, Operation) else each for each in self.waits_for
        )
        return replace(self, waits_for=tuple(waits_for))

    def among(self, operations: Sequence[Operation]) -> "Stand":
        """Return it with the operations that are named, of those that are not done."""
        named = {name: each for each in operations for name in _names(each)}
        found = (named.get(each) if isinstance(each, Issued) else each for each in self.waits_for)
        return replace(self, waits_for=tuple(each for each in found if each is not None))


def _names(operation: Operation) -> list[Issued]:
    ops = (launch.op_of(operation) for launch in operation.launches.values())
    return [Issued(op.rank, op.index) for op in ops if op is not None]


def judge(operations: Sequence[Operation], stands: Sequence[Stand], site: Site) -> Finding | None:
    """Return the deadlock, or None when hardware would go on where the simulator cannot.

    An operation cannot complete on hardware if one of its ranks has ended without issuing it, if a
    rank that must still issue it waits on its host for something that cannot complete, or if its launch
    on some device is behind one that cannot complete.  Everything else might go on: the fixed point
    below starts from "nothing can complete" and lets go of what could.
    """
    stands = [stand.among(operations) for stand in stands]
    awaited = [each for stand in stands for each in stand.waits_for]
    keys = [each for each in awaited if isinstance(each, (StoreKey, Arrival))]
    everything: list[Awaited] = [*operations, *dict.fromkeys(keys)]
    blocked = dict.fromkeys(everything)
    hosts = {stand.rank: stand for stand in stands}
    changed = True
    while changed:
        changed = False
        for each in list(blocked):
            if _may_complete(each, hosts, blocked):
                del blocked[each]
                changed = True
    return _report(list(blocked), stands, site) if blocked else None


def _may_complete(awaited: Awaited, hosts: dict[int, Stand], blocked: dict[Awaited, None]) -> bool:
    def goes_on(rank: int) -> bool:
        stand = hosts[rank]
        if stand.is_ended:
            return False
        return not (stand.is_host_wait and any(each in blocked for each in stand.waits_for))

    if isinstance(awaited, StoreKey):
        return any(goes_on(rank) for rank, stand in hosts.items() if awaited not in stand.waits_for)
    if not all(goes_on(rank) for rank in awaited.missing):
        return False
    if isinstance(awaited, Arrival):
        return True
    return not any(
        earlier in blocked
        for launch in awaited.launches.values()
        for before in launch.before
        for earlier in before.operations
    )


def unfinished(
    operations: Sequence[Operation], stands: Sequence[Stand], site: Site
) -> Finding | None:
    """Return what never completes although every rank's program has ended by itself."""
    return _report(operations, stands, site) if operations else None


def _report(blocked: Sequence[Awaited], stands: Sequence[Stand], site: Site) -> Finding:
    laggards = _laggards(blocked)
    order = {rank: position for position, rank in enumerate(laggards)}
    ordered = sorted(stands, key=lambda s: (order.get(s.rank, len(order)), s.rank))
    lines = [f"rank {stand.rank} {stand.describe}" for stand in ordered]
    return Finding(
        kind="Deadlock",
        message=_headline(laggards, stands),
        ops=_sites(blocked, site),
        detail=(*_some(lines, "ranks"), *_some([_never(each) for each in blocked], "operations")),
        ranks=tuple(stand.rank for stand in ordered),
    )


def _headline(laggards: Sequence[int], stands: Sequence[Stand]) -> str:
    all_ended = all(stand.is_ended for stand in stands)
    what = (
        "the program has ended with operations that never complete"
        if all_ended
        else "no rank can go on"
    )
    if not laggards:
        return f"{what}: they wait for each other"
    return (
        f"{what}; missing: rank{'s' if len(laggards) > 1 else ''} {', '.join(map(str, laggards))}"
    )


def _laggards(blocked: Sequence[Awaited]) -> list[int]:
    """Return who has not issued what others did, the rank that most is waiting for first."""
    absent: dict[int, int] = {}
    for each in blocked:
        for rank in () if isinstance(each, StoreKey) else each.missing:
            absent[rank] = absent.get(rank, 0) + 1
    return sorted(absent, key=lambda rank: (-absent[rank], rank))


def _sites(blocked: Sequence[Awaited], site: Site) -> tuple[OpSite, ...]:
    """Return who issued the first operation that never completes, and where."""
    for each in blocked:
        if isinstance(each, Operation):
            ops = [launch.op_of(each) for launch in each.launches.values()]
            return tuple(site(op) for op in ops if op is not None)
    return ()


def _never(awaited: Awaited) -> str:
    missing = () if isinstance(awaited, StoreKey) else awaited.missing
    return f"never completes: {awaited.describe()}" + (
        f", not issued by {list(missing)}" if missing else ""
    )


def _some(lines: Sequence[str], what: str) -> tuple[str, ...]:
    if len(lines) <= LINES_MAX:
        return tuple(lines)
    return (*lines[:LINES_MAX], f"and {len(lines) - LINES_MAX} more {what}")
