"""Independence: at which points of a rank another one could notice if it went on first.

Note [orders that can matter]
    A rank reaches a *point* before each operation that could involve others. Letting another rank go first
    there changes nothing that anybody can see, if nobody else can notice the operation: then the same
    deviation at the rank's next point leads to an equal run. So a search needs to deviate only

    * before a poll, since its answer depends on what others have issued;
    * before a collective is issued, if another rank polls at all. Collectives alone meet in any order;
    * before an operation on a key of the store that another rank uses too;
    * at questions of faults and of garbage collection, whose answers all ranks share. Where they are asked,
      everything counts as noticed.

    What polls and which keys are used is learnt from the runs made so far, and only grows. Objects that
    ranks share behind the simulator's back are none of this: real ranks are processes.

    Source: persistent sets of partial-order reduction (Godefroid 1996), with the bound kept: a deviation
    that is put off stays one deviation.
"""

from collections.abc import Iterable
from typing import NamedTuple

ALL_KEYS = ""
"""Stands for every key of the store."""


class Point(NamedTuple):
    """What a rank is about to do: ``kind`` as in ``RANK_KINDS``, and the key of a store's operation."""

    rank: int
    kind: str
    key: str = ALL_KEYS


class Independence:
    """What is known of the operations of all ranks, from the points of the runs so far."""

    def __init__(self) -> None:
        self._polling: dict[int, None] = {}
        self._users: dict[str, dict[int, None]] = {}
        self._is_all_noticed = False

    def learn(self, point: Point) -> None:
        """Take in a point that a rank has reached."""
        if point.kind == "poll":
            self._polling[point.rank] = None
        elif point.kind == "store":
            self._users.setdefault(point.key, {})[point.rank] = None

    def give_up(self) -> None:
        """Take everything for noticed."""
        self._is_all_noticed = True

    def is_noticed(self, point: Point | None) -> bool:
        """Return whether another rank could notice what comes behind the point; None is nothing."""
        if self._is_all_noticed:
            return True
        if point is None:
            return False
        if point.kind == "poll":
            return True
        if point.kind == "issue":
            return _has_other(self._polling, point.rank)
        return point.kind == "store" and any(
            _has_other(users, point.rank)
            for key, users in self._users.items()
            if ALL_KEYS in (key, point.key) or key == point.key
        )


def _has_other(ranks: Iterable[int], rank: int) -> bool:
    return any(other != rank for other in ranks)
