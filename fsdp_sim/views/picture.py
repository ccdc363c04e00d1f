"""Picture: a timeline in which one gather, the compute it overlaps and the wait that joins them are named."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from pathlib import Path

from fsdp_sim.op import Op
from fsdp_sim.timeline import Join, RankTimeline
from fsdp_sim.views.rows import Piece, Rows, pieces

MARGIN_UNITS = 30
"""What is shown before and after the overlap."""
NAMED_COLOUR = "#dd8452"


@dataclass(frozen=True)
class Overlap:
    """A gather, the compute that runs beside it, and the wait behind which its result is used."""

    gather: Piece
    compute: Piece
    join: Join


def find_overlap(timeline: RankTimeline) -> Overlap | None:
    """Return the gather that most compute of the stream that waits for it runs beside."""
    every = pieces(timeline)
    gathers = [
        piece for piece in every if piece.is_collective and piece.label.startswith("all_gather")
    ]
    compute = {
        stream: [piece for piece in every if piece.stream == stream and not piece.is_collective]
        for stream in timeline.roles
    }
    found = [
        (_shared_units(piece, gather), Overlap(gather, piece, join))
        for gather in gathers
        if (join := next((join for join in timeline.joins if _joins(join, gather)), None))
        for piece in _beside(gather, compute[join.stream])
    ]
    return max(found, key=itemgetter(0), default=(0, None))[1]


def _beside(gather: Piece, in_order: list[Piece]) -> list[Piece]:
    """Return what of one stream runs beside a gather."""
    first = bisect_right(in_order, gather.start, key=attrgetter("end"))
    last = bisect_left(in_order, gather.end, key=attrgetter("start"))
    return in_order[first:last]


def _joins(join: Join, gather: Piece) -> bool:
    return join.other == gather.stream != join.stream and join.start >= gather.end


def _shared_units(one: Piece, other: Piece) -> int:
    return min(one.end, other.end) - max(one.start, other.start)


def draw(ops: Iterable[Op], ranks: Sequence[int], path: str | Path) -> None:
    """Draw a window of a trace around one overlap: a row for each rank and stream.

    Args:
        ops: of a trace, in order of issue.
        ranks: which ranks to draw; the overlap is looked for on the first.
        path: the file; its suffix says whether PNG or SVG.

    Raises:
        ValueError: no gather of the first rank overlaps compute.
    """
    rows = Rows(ops, ranks)
    overlap = find_overlap(rows.timelines[ranks[0]])
    if overlap is None:
        raise ValueError("the trace must hold a gather that overlaps compute, got none")
    rows.draw((overlap.gather.start - MARGIN_UNITS, overlap.join.end + 2 * MARGIN_UNITS))
    _name_overlap(rows, overlap, ranks[0])
    rows.save(path)


def _name_overlap(rows: Rows, overlap: Overlap, rank: int) -> None:
    gather, compute, join = overlap.gather, overlap.compute, overlap.join
    gather_row, compute_row = rows.row(rank, gather.stream), rows.row(rank, compute.stream)
    rows.outline(gather.start, gather.end, gather_row)
    rows.outline(compute.start, compute.end, compute_row)
    rows.arrow((join.start, gather_row), (join.end, compute_row), NAMED_COLOUR)
    over = f"2  the compute it overlaps: {compute.label}"
    rows.say(compute.start, compute_row, over, at="above")
    rows.say(gather.start, gather_row, f"1  one gather: {gather.label}", at="below")
    rows.say(join.end, gather_row, "3  the wait that joins them", at="below")
