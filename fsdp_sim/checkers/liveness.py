"""Liveness: when nobody can run - is it a deadlock on hardware too, and who is missing."""

from dataclasses import dataclass

from fsdp_sim.errors import Finding


@dataclass(frozen=True)
class Part:
    """One rank's issued part of an operation that is not complete.

    Attributes:
        operation: which operation, as an index into the operations.
        after: operations whose part on this rank's device must be done before this part starts.
    """

    operation: int
    rank: int
    after: tuple[int, ...]


@dataclass(frozen=True)
class Operation:
    """A collective or point-to-point operation that is not complete, or a store key not yet set.

    Attributes:
        missing: ranks that must all still issue it.
        any_of: ranks of which one is enough (those who could set a store key).
    """

    describe: str
    missing: tuple[int, ...]
    any_of: tuple[int, ...] = ()


@dataclass(frozen=True)
class Stand:
    """Where a rank's host stands.

    Attributes:
        is_ended: its program has returned or raised.
        is_host_wait: hardware would stop its host here too.
        waits_for: operations that must complete before it goes on.
        describe: in words: what it waits for, and where.
    """

    rank: int
    is_ended: bool
    is_host_wait: bool
    waits_for: tuple[int, ...]
    describe: str


def judge(operations: list[Operation], parts: list[Part], stands: list[Stand]) -> Finding | None:
    """Return the deadlock, or None when hardware would go on where the simulator cannot.

    An operation cannot complete on hardware if one of its ranks has ended without issuing it, if a
    rank that must still issue it waits on its host for an operation that cannot complete, or if its part
    on some device is queued behind an operation that cannot complete.  Everything else might go on:
    the fixed point below starts from "nothing can complete" and lets go of what could.
    """
    by_rank = {stand.rank: stand for stand in stands}
    blocked = set(range(len(operations)))
    changed = True
    while changed:
        changed = False
        for index in sorted(blocked):
            if _may_complete(index, operations, parts, by_rank, blocked):
                blocked.discard(index)
                changed = True
    if not blocked:
        return None
    return _report(operations, sorted(blocked), stands)


def _may_complete(
    index: int,
    operations: list[Operation],
    parts: list[Part],
    by_rank: dict[int, Stand],
    blocked: set[int],
) -> bool:
    operation = operations[index]

    def goes_on(rank: int) -> bool:
        stand = by_rank[rank]
        return not stand.is_ended and not (stand.is_host_wait and _is_stuck(stand, blocked))

    if not all(goes_on(rank) for rank in operation.missing):
        return False
    if operation.any_of and not any(goes_on(rank) for rank in operation.any_of):
        return False
    return not any(
        part.operation == index and any(earlier in blocked for earlier in part.after)
        for part in parts
    )


def _is_stuck(stand: Stand, blocked: set[int]) -> bool:
    return any(operation in blocked for operation in stand.waits_for)


def _report(operations: list[Operation], blocked: list[int], stands: list[Stand]) -> Finding:
    absent: dict[int, int] = {}
    for index in blocked:
        for rank in operations[index].missing:
            absent[rank] = absent.get(rank, 0) + 1
    laggards = sorted(absent, key=lambda rank: (-absent[rank], rank))
    order = {rank: position for position, rank in enumerate(laggards)}
    ordered = sorted(stands, key=lambda s: (order.get(s.rank, len(order)), s.rank))
    missing = f"missing: rank{'s' if len(laggards) > 1 else ''} {', '.join(map(str, laggards))}"
    cycle = "the operations wait for each other in a cycle"
    return Finding(
        kind="Deadlock",
        message="no rank can go on; " + (missing if laggards else cycle),
        detail=tuple(f"rank {stand.rank} {stand.describe}" for stand in ordered)
        + tuple(
            f"never completes: {operations[i].describe}"
            + (f", not issued by {list(operations[i].missing)}" if operations[i].missing else "")
            for i in blocked
        ),
        ranks=tuple(stand.rank for stand in ordered),
    )
