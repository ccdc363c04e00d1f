"""Report: findings as people read them, with the code of both operations and the line that replays them."""

import linecache
import re
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_sim.errors import Finding, OpSite, SimulationError
from fsdp_sim.op import Source

if TYPE_CHECKING:
    from fsdp_sim.simulation import Report


INSTALLED = re.compile(r"/[^\s()]*/site-packages/")


def shorten(text: str) -> str:
    """Return a path, or a text with paths in it, as seen from here or from the installed packages."""
    return INSTALLED.sub("", text.replace(f"{Path.cwd()}/", ""))


def source_line(source: Source) -> str:
    """Return ``file:line  code``; without the code where the file cannot be read."""
    linecache.checkcache(source.file)  # it may have been edited since it was last shown
    code = linecache.getline(source.file, source.line).strip()
    return f"{shorten(source.file)}:{source.line}" + (f"  {code}" if code else "")


def site_lines(site: OpSite) -> list[str]:
    """Return one operation in lines: what ran where, and the code that issued it, the user's own first."""
    label = f"  [{site.annotation}]" if site.annotation else ""
    lines = [f"op {site.index}  {site.name}  on {site.stream} of rank {site.rank}{label}"]
    if site.source is not None:
        lines += [f"    {source_line(source)}" for source in site.source.from_user()]
    return lines


def finding_text(finding: Finding) -> str:
    """Return a finding in lines: the invariant, both operations, what would have ordered them."""
    notice = "notice: " if finding.is_notice else ""
    lines = [f"{notice}{finding.kind}: {finding.message}"]
    lines += [f"  {line}" for site in finding.ops for line in site_lines(site)]
    lines += [f"  {line}" for line in finding.detail]
    if finding.count > 1:
        ranks = ", ".join(map(str, finding.ranks))
        lines.append(f"  {finding.count} times, on ranks {ranks}")
    return shorten("\n".join(lines))


def error_text(error: SimulationError) -> str:
    """Return what a run raised: its finding, and the deviations under which it came up.

    Args:
        error: one without a finding says all by itself.
    """
    report: Report | None = error.report
    if error.finding is None or report is None:
        return f"{type(error).__name__}: {error}"
    lines = [finding_text(error.finding)]
    more = sum(finding != error.finding for finding in report.findings)
    lines += [f"and {more} more finding{'s' if more > 1 else ''}"] if more else []
    return "\n".join([*lines, *map(shorten, report.deviations)])


def report_text(report: "Report", *, replay: str) -> str:
    """Return all findings and notices of a run, and the command that replays it.

    Args:
        report: of ``simulate``, ``explore`` or ``replay``.
        replay: how to replay the run, as the user would type it.
    """
    parts = [finding_text(finding) for finding in (*report.findings, *report.notices)]
    if report.findings:
        how = [*map(shorten, report.deviations), f"replay with: {replay}"]
        parts.append("\n".join([*how, f"digest: {report.trace.digest}"]))
    else:
        parts.append(f"clean: schedule {report.schedule}, digest {report.trace.digest}")
    return "\n\n".join(parts)
