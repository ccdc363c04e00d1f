"""Trials: one program, run once with some sites broken; is there a finding that was not there before."""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from fsdp_sim.errors import ConfigError, Finding
from fsdp_sim.mutation.change import Change
from fsdp_sim.mutation.probe import Probe, Use, installed
from fsdp_sim.mutation.programs import Program
from fsdp_sim.mutation.site import Site
from fsdp_sim.mutation.subject import Subject
from fsdp_sim.trace import Trace
from fsdp_sim.verbs import simulate

STEP_LIMIT = 200_000
"""Decisions of a broken run, which may poll for what never comes."""


@dataclass(frozen=True)
class Outcome:
    """What a run of a program gave.

    Attributes:
        findings: errors found, in order, then notices; a difference of values is an error.
        error: what a rank raised, or why the run could not be judged.
        trace: ops, if they were asked for.
        uses: what each site did.
    """

    findings: tuple[Finding, ...]
    error: BaseException | None
    trace: Trace | None
    uses: dict[Site, Use]

    def new(self, clean: "Outcome") -> Finding | None:
        """Return the first finding that the unbroken run does not have."""
        known = {_key(finding) for finding in clean.findings}
        return next((finding for finding in self.findings if _key(finding) not in known), None)


def _key(finding: Finding) -> tuple[Any, ...]:
    """Return what makes a finding the same in two runs: kind and source lines, not numbers of ops."""
    return (finding.kind, *(site.source or site.name for site in finding.ops))


def attempt(
    subject: Subject,
    program: Program,
    broken: Sequence[Site] = (),
    *,
    change: Change | None = None,
    schedule: int = 0,
    keeps_ops: bool = False,
) -> Outcome:
    """Run ``program`` with the sites in ``broken`` broken.

    Args:
        subject: the package whose sites are seen.
        program: what to run.
        broken: sites to break, all of them in this run.
        change: a bug to put in.
        schedule: 0 is program order, others are seeds of drawn schedules.
        keeps_ops: keep all ops, for proofs.
    """
    probe = Probe(subject, frozenset(broken))
    how: dict[str, Any] = {"scheduler": "pct", "seed": schedule} if schedule else {}
    error: BaseException | None = None
    report: Any = None
    with (
        installed(probe),
        warnings.catch_warnings(),
        change.in_force() if change else nullcontext(),
    ):
        warnings.simplefilter("ignore")
        try:
            report = simulate(
                program.fn,
                program.ranks,
                args=program.args,
                strict=False,
                step_limit=STEP_LIMIT,
                trace=keeps_ops,
                **how,
            )
        except (ConfigError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as raised:  # PyTorch's checkpoints raise what is no Exception
            error, report = raised, getattr(raised, "report", None)
    findings = (*report.findings, *report.notices) if report is not None else ()
    if error is None and not _is_cut_short(report):
        findings += _differences(program, report.results)
    trace = report.trace if report is not None and keeps_ops else None
    return Outcome(findings, error, trace, probe.uses)


def _is_cut_short(report: Any) -> bool:
    """Whether a finding ended the run, so that ranks have no results."""
    return any(finding.kind in ("CollectiveMismatch", "Deadlock") for finding in report.findings)


def _differences(program: Program, results: Sequence[Any]) -> tuple[Finding, ...]:
    difference = program.difference(results)
    return () if difference is None else (Finding("ParityError", difference),)
