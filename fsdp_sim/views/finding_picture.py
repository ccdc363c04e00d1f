"""Finding picture: the operations of a finding on their streams, and the edge that is missing between them."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from fsdp_sim.errors import Finding, OpSite
from fsdp_sim.op import Op
from fsdp_sim.timeline import Span
from fsdp_sim.views.report import source_line
from fsdp_sim.views.rows import Rows

MARGIN_UNITS = 12
"""What is shown before and after the operations."""
RANKS_MAX = 4
"""Ranks that a picture shows, those of the finding first."""
COLOUR = "#c44e52"


def draw_finding(ops: Iterable[Op], finding: Finding, world_size: int, path: str | Path) -> None:
    """Draw the operations that a finding names, and what is wrong between them.

    A finding that names none that runs on a stream is written beside the end of the trace.

    Args:
        ops: of the trace in which it was found, in order of issue.
        finding: what to point at.
        world_size: of the trace.
        path: the file; its suffix says whether PNG or SVG.
    """
    rows = Rows(ops, _ranks(finding, world_size))
    marks = [
        _Mark(site, span, rows.row(site.rank, span.op.stream))
        for site, span in _spans(rows, finding)
    ]
    start, end = _window(rows, marks)
    rows.draw((max(start - MARGIN_UNITS, 0), end + 3 * MARGIN_UNITS))
    top = min((mark.row for mark in marks), default=0)
    for number, mark in enumerate(marks, start=1):
        rows.outline(mark.span.start, mark.span.end, mark.row, COLOUR)
        code = "" if mark.site.source is None else f"  {source_line(mark.site.source)}"
        text = f"{number}  {mark.site.name}{code}"
        rows.say(mark.span.start, mark.row, text, at="above" if mark.row == top else "below")
    if len(marks) > 1 and finding.kind != "Deadlock":
        _point_at_what_is_missing(rows, marks[0], marks[-1])
    bottom = max(marks, key=lambda mark: mark.row, default=None)
    place = (end + 1, 0) if bottom is None else (bottom.span.end + 1, bottom.row)
    rows.say(*place, _what_is_wrong(finding, marks), at="beside")
    rows.save(path)


class _Mark(NamedTuple):
    """One operation of the finding, where it is drawn."""

    site: OpSite
    span: Span
    row: int


def _window(rows: Rows, marks: list[_Mark]) -> tuple[int, int]:
    """Return where the operations begin and end; without any, the end of the trace."""
    spans = [mark.span for mark in marks]
    spans = spans or [timeline.spans[-1] for timeline in rows.timelines.values() if timeline.spans]
    return (
        min((span.start for span in spans), default=0),
        max((span.end for span in spans), default=0),
    )


def _ranks(finding: Finding, world_size: int) -> list[int]:
    """Return the ranks to draw: those of the operations, and others where ranks must agree."""
    own = dict.fromkeys(site.rank for site in finding.ops)
    if finding.kind in ("CollectiveMismatch", "Deadlock"):
        own |= dict.fromkeys(range(world_size))
    return sorted(list(own)[:RANKS_MAX])


def _spans(rows: Rows, finding: Finding) -> Iterator[tuple[OpSite, Span]]:
    """Give the operations of the finding that are drawn."""
    for site in finding.ops:
        timeline = rows.timelines.get(site.rank)
        for span in timeline.spans if timeline is not None else ():
            if span.op.index == site.index:
                yield site, span


def _point_at_what_is_missing(rows: Rows, first: _Mark, last: _Mark) -> None:
    """Draw the edge that should be there: on one rank from end to start, else between the two starts."""
    is_one_rank = first.site.rank == last.site.rank
    start = first.span.end if is_one_rank else first.span.start
    rows.arrow((start, first.row), (last.span.start, last.row), COLOUR, style="dashed")


def _what_is_wrong(finding: Finding, marks: list[_Mark]) -> str:
    """Return the finding in a few words."""
    never = next((line for line in finding.detail if line.startswith("never completes")), None)
    if never is not None:
        return never
    if len({mark.site.rank for mark in marks}) > 1:
        return finding.detail[0] if finding.detail else finding.kind
    return "missing: nothing orders 1 before 2" if len(marks) > 1 else finding.message
