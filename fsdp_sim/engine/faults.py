"""Faults: what is to go wrong, where and when.  The first rule with a verdict wins.

A fault is written ``action:site@key=value,...``: ``crash:issue@rank=1,at=3`` ends rank 1 before its third
collective.  Without ``at`` or ``above`` the schedule decides at each visit whether it happens, once.

A runtime may have sites of its own, in two phases: ``SITE = faults.site("my.site")`` once, and where it
matters ``if SITE.is_armed: SITE.visit()``.  A run that names the site arms it; at each visit the fault may
then fire.  Unless a run names the site this costs one test of a flag, in and out of the simulator.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fsdp_sim.errors import ConfigError, InjectedFault

if TYPE_CHECKING:
    from fsdp_sim.engine.world import Rank

ACTIONS = {
    "issue": ("crash", "hang", "delay", "drop", "duplicate", "corrupt"),
    "alloc": ("oom", "crash", "hang", "delay"),
    "store": ("fail", "crash", "hang", "delay"),
    "write": ("torn", "fail", "crash", "hang", "delay"),
}
"""What can go wrong at the simulator's own sites: before a collective or message is issued, when memory
is allocated, at an operation of the store, and at the end of a checkpoint file."""

OWN_SITE_ACTIONS = ("fail", "crash", "hang", "delay")
"""What can go wrong at a site that a runtime has made."""

_FORM = re.compile(r"(?P<action>[a-z]+):(?P<site>[a-z][a-z0-9_.]*)(@(?P<options>.+))?")


@dataclass(frozen=True)
class Rule:
    """One fault.

    Attributes:
        action: what happens.
        site: where.
        rank: only on this rank.
        at: at this visit of the rank, counted from 1 among those that the rule concerns.
        name: only for operations of this name, such as "all_reduce", "send" or "set"; of a file, its
            name.
        above: of an allocation: when the rank would hold more bytes than this.
    """

    action: str
    site: str
    rank: int | None = None
    at: int | None = None
    name: str | None = None
    above: int | None = None

    def __post_init__(self) -> None:
        actions = ACTIONS.get(self.site, OWN_SITE_ACTIONS)
        if self.action not in actions:
            raise ConfigError(
                f"a fault at site {self.site!r} must be one of {', '.join(actions)},"
                f" got {self.action!r}"
            )
        if self.above is not None and self.action != "oom":
            raise ConfigError(f"only 'oom' takes above=, got {self.action!r}")
        if self.at is not None and self.at < 1:
            raise ConfigError(f"at= counts visits from 1, got {self.at}")

    def __str__(self) -> str:
        """Return what ``parse`` reads."""
        given = [(each.name, getattr(self, each.name)) for each in fields(self)[2:]]
        options = ",".join(f"{name}={value}" for name, value in given if value is not None)
        return f"{self.action}:{self.site}" + (f"@{options}" if options else "")

    def concerns(self, rank: int, site: str, name: str) -> bool:
        """Whether a visit is one of those that the rule counts."""
        return (
            self.site == site
            and self.rank in (None, rank)
            and (self.name is None or self.name == name)
        )


def parse(text: str) -> Rule:
    """Read a fault.

    Raises:
        ConfigError: no fault is written so.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise ConfigError(f"a fault must be written 'action:site@key=value', got {text!r}")
    options: dict[str, Any] = {}
    for option in (match["options"] or "").split(",") if match["options"] else ():
        key, _, value = option.partition("=")
        if key == "name" and value:
            options[key] = value
        elif key in ("rank", "at", "above") and value.isdecimal():
            options[key] = int(value)
        else:
            raise ConfigError(
                f"a fault takes rank=, at=, name= and above=, got {option!r} in {text!r}"
            )
    return Rule(match["action"], match["site"], **options)


def rules_of(faults: Iterable["str | Rule"]) -> tuple[Rule, ...]:
    """Return the rules of faults given as rules or as they are written."""
    return tuple(fault if isinstance(fault, Rule) else parse(fault) for fault in faults)


# ---------------------------------------------------------------------- one run


class Faults:
    """The faults of one world.

    Attributes:
        fired: how often each rule has had its way.
        delayed: ranks that step aside until nobody else can run.
    """

    def __init__(
        self, rules: Sequence[Rule], world_size: int, choose_yes: Callable[[str, int], bool]
    ) -> None:
        for rule in rules:
            if rule.rank is not None and rule.rank >= world_size:
                raise ConfigError(
                    f"a fault's rank must be below the world size {world_size}, got '{rule}'"
                )
        self.rules = rules
        self.fired = dict.fromkeys(rules, 0)
        self.delayed: list[Rank] = []
        self._choose_yes = choose_yes
        self._visits: dict[tuple[int, int], int] = {}
        self._held: dict[int, dict[int, int]] = {}

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Arm the sites that runtimes have made, or make in the body, and this run names.

        Raises:
            ConfigError: at the end, for a site that is named and that nobody has made.
        """
        _ARMED.update({rule.site: rule for rule in self.rules if rule.site not in ACTIONS})
        for each in _SITES.values():
            each.is_armed = each.name in _ARMED
        try:
            yield
            self._demand_sites()
        finally:
            _ARMED.clear()
            for each in _SITES.values():
                each.is_armed = False

    def _demand_sites(self) -> None:
        for name, rule in _ARMED.items():
            if name not in _SITES:
                raise ConfigError(
                    f"a fault's site must be one of {', '.join(ACTIONS)}, or made by faults.site in the"
                    f" program, got {name!r} in '{rule}'"
                )

    def visit(self, rank: "Rank", site: str, name: str = "", nbytes: int = 0) -> str | None:
        """A rank is at a site: crash, hang, delay or fail here; return any other verdict."""
        verdict = self._verdict(rank.index, site, name, nbytes)
        if verdict == "crash":
            rank.die(f"rank {rank.index} crashed at {site} {name}".rstrip())
        if verdict == "fail":
            what = f"{site} {name}".rstrip()
            raise InjectedFault(f"{what} failed on rank {rank.index}")
        if verdict == "hang":
            rank.hang(f"hangs at {site} {name}".rstrip())
        if verdict == "delay":
            self.delayed.append(rank)
            rank.step_aside(f"is delayed at {site} {name}".rstrip())
            return None
        return verdict

    def allocated(self, rank: "Rank", storage: int, nbytes: int) -> bool:
        """Count an allocation; return whether memory is out."""
        held = self._held.setdefault(rank.index, {})
        if self.visit(rank, "alloc", nbytes=sum(held.values()) + nbytes) is not None:
            return True
        held[storage] = nbytes
        return False

    def freed(self, rank: int, storage: int) -> None:
        """Count a free."""
        self._held.get(rank, {}).pop(storage, None)

    def wake_delayed(self) -> bool:
        """Nobody else can run: let the first delayed rank go on; return whether there is one."""
        if not self.delayed:
            return False
        self.delayed.pop(0).wake()
        return True

    def _verdict(self, rank: int, site: str, name: str, nbytes: int) -> str | None:
        concerned = [
            (index, rule)
            for index, rule in enumerate(self.rules)
            if rule.concerns(rank, site, name)
        ]
        for index, _ in concerned:
            self._visits[index, rank] = self._visits.get((index, rank), 0) + 1
        for index, rule in concerned:
            if self._fires(rule, self._visits[index, rank], rank, nbytes):
                self.fired[rule] += 1
                return rule.action
        return None

    def _fires(self, rule: Rule, count: int, rank: int, nbytes: int) -> bool:
        if rule.above is not None:
            return nbytes > rule.above
        if rule.at is not None:
            return count == rule.at
        return self.fired[rule] == 0 and self._choose_yes("fault", rank)


# ---------------------------------------------------------------------- sites of runtimes


class Site:
    """A place in a runtime at which a run may inject a fault.

    Attributes:
        is_armed: a world runs that names the site.
    """

    __slots__ = ("is_armed", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_armed = False

    def visit(self, name: str = "") -> None:
        """Be at the site: crash, hang, be delayed or fail if the run's faults say so.

        Raises:
            InjectedFault: it fails here.
        """
        from fsdp_sim.engine import machine as machines

        machine = machines.current()
        if machine is not None and machine.faults is not None:
            machine.faults.visit(machine.rank, self.name, name)


_SITES: dict[str, Site] = {}
_ARMED: dict[str, Rule] = {}
"""The sites that the world that runs has named, each by one of its rules."""


def site(name: str) -> Site:
    """Return the site of that name, made once for all runs.

    Raises:
        ConfigError: the simulator itself has a site of that name.
    """
    if name in ACTIONS:
        raise ConfigError(f"a site must not be called as one of {', '.join(ACTIONS)}, got {name!r}")
    made = _SITES.get(name)
    if made is None:
        made = _SITES[name] = Site(name)
        made.is_armed = name in _ARMED
    return made


# ---------------------------------------------------------------------- effects


def corrupt(raw: Any) -> None:
    """Change bits of a payload: the first byte of a flat tensor of bytes."""
    raw[0] ^= 0x55


def tear(path: Path, rank: "Rank") -> NoReturn:
    """Cut a file that was written to half of its size, and end the rank there."""
    os.truncate(path, path.stat().st_size // 2)
    rank.die(f"rank {rank.index} crashed while it wrote {path.name}")
