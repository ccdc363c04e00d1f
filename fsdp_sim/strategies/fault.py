"""fault_plans: what is to go wrong in a run, where and when."""

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from fsdp_sim.engine.faults import ACTIONS, Rule
from fsdp_sim.program.check import RANKS_MAX
from fsdp_sim.strategies.arguments import Draw, check_kinds, check_range, number, pick

_RULES_MAX = 16
_AT_MAX = 10_000
_ERRORS: dict[str, tuple[str, ...]] = {
    "delay": (),
    "crash": ("RunError", "FindingError", "InjectedFault"),
    "hang": ("RunError", "FindingError"),
    "drop": ("FindingError",),
    "duplicate": ("FindingError",),
    "corrupt": ("FindingError",),
    "oom": ("OutOfMemoryError",),
    "fail": ("InjectedFault", "FindingError"),
    "torn": ("RunError", "FindingError", "InjectedFault"),
}
FAULT_ACTIONS = tuple(_ERRORS)


@dataclass(frozen=True)
class FaultPlan:
    """Faults for one run, as ``simulate(faults=...)`` and ``ProgramSpec.faults`` take them.

    Attributes:
        faults: one line each, such as ``crash:issue@rank=1,at=3``.
        errors: names of the classes of what may come of them; with none of them the run must be clean and
            have parity. A fault that the program never reaches does nothing.
    """

    faults: tuple[str, ...]
    errors: tuple[str, ...]


def fault_plans(
    world_size: int,
    *,
    actions: Sequence[str] = ("delay",),
    sites: Sequence[str] = ("issue", "alloc"),
    faults_max: int = 2,
    at_max: int = 12,
) -> st.SearchStrategy[FaultPlan]:
    """Draw faults; shrinks to one at the first visit of rank 0.

    Args:
        world_size: number of ranks.
        actions: what may happen; by default only delays, which no correct program notices.
        sites: where: before a collective is issued, when memory is allocated, at an operation of the store,
            at the end of a checkpoint file.
        faults_max: most faults.
        at_max: last visit of a site at which one may happen.

    Example:
        >>> fault_plans(2, actions=("crash", "oom"), faults_max=1)

    Raises:
        ConfigError: a number is out of range; an unknown action or site, or none that go together.
    """
    check_range("world_size", world_size, 1, RANKS_MAX)
    check_range("faults_max", faults_max, 1, _RULES_MAX)
    check_range("at_max", at_max, 1, _AT_MAX)
    check_kinds("actions", actions, FAULT_ACTIONS)
    check_kinds("sites", sites, tuple(ACTIONS))
    pairs = [(act, site) for site in sites for act in actions if act in ACTIONS[site]]
    check_kinds("actions at these sites", [act for act, _ in pairs], FAULT_ACTIONS)
    return st.composite(_plan)(pairs, world_size, faults_max, at_max)


def _plan(
    draw: Draw, pairs: list[tuple[str, str]], world_size: int, faults_max: int, at_max: int
) -> FaultPlan:
    rules = []
    for _ in range(number(draw, 1, faults_max)):
        action, site = pick(draw, pairs)
        at = number(draw, 1, at_max)
        rules.append(Rule(action, site, rank=number(draw, 0, world_size - 1), at=at))
    errors = dict.fromkeys(name for rule in rules for name in _ERRORS[rule.action])
    return FaultPlan(tuple(str(rule) for rule in rules), tuple(errors))
