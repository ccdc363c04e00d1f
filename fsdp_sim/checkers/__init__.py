"""Invariants, one a file: each is a fold over the ops of a run."""

from collections.abc import Callable, Iterable

from fsdp_sim.arguments import several
from fsdp_sim.checkers.batches import Batches
from fsdp_sim.checkers.capture import Capture
from fsdp_sim.checkers.checker import Checker
from fsdp_sim.checkers.collective_match import CollectiveMatch
from fsdp_sim.checkers.lifetime import Lifetime
from fsdp_sim.checkers.liveness import Liveness
from fsdp_sim.checkers.memory_peak import MemoryPeak
from fsdp_sim.checkers.prefetch import Prefetch
from fsdp_sim.checkers.races import Races
from fsdp_sim.checkers.rest import Rest
from fsdp_sim.checkers.words import Words
from fsdp_sim.errors import ConfigError

__all__ = ["CHECKERS", "Checker", "Words", "make", "of_collectives"]

CHECKERS: dict[str, Callable[[Words], Checker]] = {
    "races": Races,
    "lifetime": Lifetime,
    "collective_match": CollectiveMatch,
    "batches": Batches,
    "liveness": Liveness,
    "capture": Capture,
    "rest": Rest,
    "prefetch": Prefetch,
    "memory_peak": MemoryPeak,
}
"""Every checker by the name that users give."""


def of_collectives(checkers: Iterable[Checker]) -> list[Checker]:
    """Return those checkers that judge collectives alone, and so need to see no operators."""
    kinds = (CollectiveMatch, Batches, Liveness, Words)
    return [checker for checker in checkers if isinstance(checker, kinds)]


def make(names: Iterable[str] = tuple(CHECKERS)) -> list[Checker]:
    """Make checkers by name, in the order of ``CHECKERS``.

    Raises:
        ConfigError: no checker has that name, or ``names`` is no list.
    """
    wanted = several("checkers", names)
    for name in wanted:
        if name not in CHECKERS:
            raise ConfigError(f"checkers must be among {', '.join(CHECKERS)}, got {name!r}")
    words = Words()
    chosen = [factory(words) for name, factory in CHECKERS.items() if name in wanted]
    return [*chosen, words]
