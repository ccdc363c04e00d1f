"""A campaign: record which sites the programs reach, break each one, then pairs of those that survive."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from fsdp_sim.errors import ConfigError, Finding
from fsdp_sim.mutation.change import Change
from fsdp_sim.mutation.programs import Program
from fsdp_sim.mutation.proof import Proof, prove
from fsdp_sim.mutation.scan import unreached
from fsdp_sim.mutation.site import Site
from fsdp_sim.mutation.subject import Subject
from fsdp_sim.mutation.trial import Outcome, attempt

SCHEDULES_DEFAULT = 2
PAIRS_MAX = 200
"""Pairs of survivors that are tried; more are an error in the choice of programs, and are reported."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Mutant:
    """One break, or a pair of them, and what came of it.

    Attributes:
        sites: what was broken: one site or two; none if it was a change.
        status: "killed", "survived" or "error".
        finding: what killed it.
        program: in which program; of an error, the one that raised.
        runs: how many were made, the killing one included.
        error: what a rank raised; only of the break's own making.
    """

    sites: tuple[Site, ...]
    status: str
    finding: Finding | None = None
    program: str | None = None
    runs: int = 0
    error: BaseException | None = None
    change: Change | None = None


@dataclass(frozen=True)
class Survivor:
    """A site that no program needs alone.

    Attributes:
        proofs: program -> what the site orders there, and how that is ordered without it.
        partners: sites with which it is needed: one of each pair covers the other.
    """

    site: Site
    proofs: dict[str, Proof]
    partners: tuple[Site, ...]

    @property
    def is_redundant(self) -> bool:
        """Whether it can be removed from the code, as far as these programs tell."""
        return not self.partners


@dataclass(frozen=True)
class Campaign:
    """All that was found out.

    Attributes:
        mutants: one of each site, then pairs of survivors, in order of site.
        survivors: with their proofs.
        unreached: calls that look like sites and that no program makes.
        untried_pairs: pairs left out beyond ``PAIRS_MAX``.
    """

    mutants: tuple[Mutant, ...]
    survivors: tuple[Survivor, ...]
    unreached: tuple[str, ...] = ()
    untried_pairs: int = 0


def mutate(
    subject: Subject,
    programs: Sequence[Program],
    *,
    changes: Sequence[Change] = (),
    schedules: int = SCHEDULES_DEFAULT,
    progress: Progress = lambda _what, _done, _all: None,
) -> Campaign:
    """Break each site of a package that the programs reach.

    Args:
        subject: the package.
        programs: run in this order until one of them kills.
        changes: known bugs to try besides.
        schedules: of each program: program order, then drawn ones.
        progress: told what is done, how much of it, and of how much.

    Raises:
        ConfigError: no program, a program that fails with nothing broken, or none that reaches a site.
    """
    if not programs:
        raise ConfigError("a mutation must have programs to run, got none")
    unbroken = _record(subject, programs, progress)
    sites = sorted({site for outcome in unbroken.values() for site in outcome.uses})
    if not sites:
        raise ConfigError(
            f"the programs must reach synchronisation in {subject.name}, got no call of any; "
            "name programs that use the package"
        )
    trials = _Trials(subject, programs, unbroken, schedules)
    mutants = []
    for number, site in enumerate(sites, start=1):
        mutants.append(trials.break_sites((site,)))
        progress("sites", number, len(sites))
    for number, change in enumerate(changes, start=1):
        mutants.append(trials.try_change(change))
        progress("changes", number, len(changes))
    left = [mutant.sites[0] for mutant in mutants if mutant.sites and mutant.status == "survived"]
    proofs = {site: trials.prove(site) for site in left}
    pairs = _pairs(proofs)
    for number, pair in enumerate(pairs[:PAIRS_MAX], start=1):
        mutants.append(trials.break_sites(pair))
        progress("pairs", number, len(pairs))
    survivors = tuple(
        Survivor(site, proof, _partners(site, mutants)) for site, proof in proofs.items()
    )
    left_out = max(len(pairs) - PAIRS_MAX, 0)
    return Campaign(tuple(mutants), survivors, tuple(unreached(subject, sites)), left_out)


def _record(
    subject: Subject, programs: Sequence[Program], progress: Progress
) -> dict[str, Outcome]:
    """Run each program with nothing broken, so that it is known what it reaches and what it finds."""
    outcomes = {}
    for number, program in enumerate(programs, start=1):
        outcome = attempt(subject, program, keeps_ops=True)
        if outcome.error is not None:
            raise ConfigError(
                f"program {program.name!r} must run with nothing broken, got {outcome.error!r}"
            ) from outcome.error
        outcomes[program.name] = outcome
        progress("programs", number, len(programs))
    return outcomes


def _pairs(proofs: Mapping[Site, Mapping[str, Proof]]) -> list[tuple[Site, Site]]:
    """Return the pairs of survivors of which one is on a path that makes up for the other.

    If breaking both leaves two ops unordered, every path without the one leads through the other.
    """
    covering = {
        site: {other for proof in of_program.values() for other in proof.covering}
        for site, of_program in proofs.items()
    }
    return [
        (one, other)
        for one, other in combinations(proofs, 2)
        if other in covering[one] or one in covering[other]
    ]


@dataclass(frozen=True)
class _Trials:
    """What every break is tried with."""

    subject: Subject
    programs: Sequence[Program]
    unbroken: dict[str, Outcome]
    schedules: int

    def break_sites(self, sites: tuple[Site, ...]) -> Mutant:
        """Run the programs that reach the sites, until one has a finding that is new."""
        reaching = [
            program
            for program in self.programs
            if all(site in self.unbroken[program.name].uses for site in sites)
        ]
        return self._try(Mutant(sites, "survived"), reaching)

    def try_change(self, change: Change) -> Mutant:
        """Run all programs with a bug, until one has a finding that is new."""
        return self._try(Mutant((), "survived", change=change), self.programs)

    def _try(self, mutant: Mutant, programs: Sequence[Program]) -> Mutant:
        raised: Mutant | None = None
        runs = 0
        for schedule in range(self.schedules):
            for program in programs:
                runs += 1
                outcome = attempt(
                    self.subject, program, mutant.sites, change=mutant.change, schedule=schedule
                )
                tried = replace(mutant, program=program.name, runs=runs)
                finding = outcome.new(self.unbroken[program.name])
                if finding is not None:
                    return replace(tried, status="killed", finding=finding)
                if outcome.error is not None and mutant.change is not None:
                    return replace(tried, status="killed", finding=_as_finding(outcome.error))
                if outcome.error is not None and raised is None:
                    raised = replace(tried, status="error", error=outcome.error)
        return raised or replace(mutant, runs=runs)

    def prove(self, site: Site) -> dict[str, Proof]:
        """Return what the site orders in each program, and how that is ordered without it."""
        proofs = {}
        for program in self.programs:
            unbroken = self.unbroken[program.name]
            if site in unbroken.uses:
                broken = attempt(self.subject, program, (site,), keeps_ops=True)
                proofs[program.name] = prove(site, unbroken, broken)
        return proofs


def _as_finding(error: BaseException) -> Finding:
    """Return what a rank raised as what kills a known bug: whoever runs into it, it is found."""
    return Finding(type(error).__name__, str(error))


def _partners(site: Site, mutants: Sequence[Mutant]) -> tuple[Site, ...]:
    """Return the survivors together with which a site is needed."""
    return tuple(
        other
        for mutant in mutants
        if len(mutant.sites) > 1 and mutant.status == "killed" and site in mutant.sites
        for other in mutant.sites
        if other != site
    )
