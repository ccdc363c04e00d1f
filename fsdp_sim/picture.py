"""Picture: a timeline in which one gather, the compute it overlaps and the wait that joins them are named."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from fsdp_sim.op import Kind, Op
from fsdp_sim.report import shorten
from fsdp_sim.timeline import Join, RankTimeline, Span, rank_timeline

MARGIN_UNITS = 30
"""What is shown before and after the overlap."""
COLOURS = {"all_gather": "#4c72b0", "reduce_scatter": "#c44e52", "all_reduce": "#8172b3"}
LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1}
COMPUTE_COLOUR, NAMED_COLOUR = "#ccb974", "#dd8452"


@dataclass(frozen=True)
class Piece:
    """Operators of one stream that ran under one label without a gap, or one collective."""

    stream: int
    label: str
    start: int
    end: int
    is_collective: bool


@dataclass(frozen=True)
class Overlap:
    """A gather, the compute that runs beside it, and the wait behind which its result is used."""

    gather: Piece
    compute: Piece
    join: Join


def pieces(timeline: RankTimeline) -> list[Piece]:
    """Join the spans of each stream into what a reader can see as one thing."""
    found: list[Piece] = []
    open_looks: dict[int, tuple[bool, str, int]] = {}
    last: dict[int, int] = {}  # by stream: where its last piece is in found
    for span in timeline.spans:
        stream, look = span.op.stream, _look(span)
        previous = found[last[stream]] if stream in last else None
        if previous is not None and look == open_looks[stream] and span.start <= previous.end + 1:
            found[last[stream]] = replace(previous, end=span.end)
        else:
            last[stream], open_looks[stream] = len(found), look
            found.append(Piece(stream, look[1], span.start, span.end, look[0]))
    return found


def _look(span: Span) -> tuple[bool, str, int]:
    """Return what makes spans look alike: a collective is always a piece by itself."""
    what = (span.op.annotation or "").rpartition("::")[2]
    if span.op.kind is Kind.COLLECTIVE:
        unit = what.partition(" ")[2]
        return True, f"{span.op.name} {unit}".strip(), span.op.index
    return False, what or "compute", -1


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


def _stream_names(timeline: RankTimeline) -> dict[int, str]:
    """Name each stream by what it carries, else by where it was made."""
    names = {stream: shorten(role.rpartition(" ")[2]) for stream, role in timeline.roles.items()}
    for span in reversed(timeline.spans):
        if span.op.kind is Kind.COLLECTIVE:
            names[span.op.stream] = span.op.name
    return names | {
        stream: "compute" for stream, role in timeline.roles.items() if role == "default"
    }


def draw(ops: Iterable[Op], ranks: Sequence[int], path: str | Path) -> None:
    """Draw a window of a trace around one overlap: a row for each rank and stream.

    Args:
        ops: of a trace, in order of issue.
        ranks: which ranks to draw; the overlap is looked for on the first.
        path: the file; its suffix says whether PNG or SVG.

    Raises:
        ValueError: no gather of the first rank overlaps compute.
    """
    ops = list(ops)
    timelines = [rank_timeline(ops, rank) for rank in ranks]
    overlap = find_overlap(timelines[0])
    if overlap is None:
        raise ValueError("the trace must hold a gather that overlaps compute, got none")
    window = overlap.gather.start - MARGIN_UNITS, overlap.join.end + 2 * MARGIN_UNITS
    rows = [(rank, stream) for rank, t in zip(ranks, timelines, strict=True) for stream in t.roles]
    figure = Figure(figsize=(14, 1.2 + 0.42 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for rank, timeline in zip(ranks, timelines, strict=True):
        row_of = {stream: rows.index((rank, stream)) for stream in timeline.roles}
        _draw_rank(axes, timeline, row_of, window)
    _name_overlap(axes, overlap, rows, ranks[0])
    _finish(axes, rows, timelines, ranks, window)
    figure.savefig(path, dpi=130)


def _draw_rank(
    axes: Axes, timeline: RankTimeline, row_of: dict[int, int], window: tuple[int, int]
) -> None:
    for piece in pieces(timeline):
        if piece.end < window[0] or piece.start > window[1]:
            continue
        kind = piece.label.partition(" ")[0] if piece.is_collective else ""
        colour = COLOURS.get(kind, COMPUTE_COLOUR)
        width, row = piece.end - piece.start, row_of[piece.stream]
        axes.barh(row, width, left=piece.start, height=0.7, color=colour, edgecolor="white")
        if width >= 8:
            middle = (max(piece.start, window[0]) + min(piece.end, window[1])) / 2
            axes.text(middle, row, piece.label, ha="center", va="center", fontsize=6, clip_on=True)
    for join in timeline.joins:
        if window[0] <= join.end <= window[1] and join.other in row_of:
            axes.annotate(
                "",
                xy=(join.end, row_of[join.stream]),
                xytext=(join.start, row_of[join.other]),
                arrowprops={"arrowstyle": "->", "color": "grey", "lw": 0.7},
            )


def _name_overlap(axes: Axes, overlap: Overlap, rows: list[tuple[int, int]], rank: int) -> None:
    gather, compute, join = overlap.gather, overlap.compute, overlap.join
    gather_row, compute_row = rows.index((rank, gather.stream)), rows.index((rank, compute.stream))
    for piece, row in ((gather, gather_row), (compute, compute_row)):
        place = Rectangle((piece.start, row - 0.35), piece.end - piece.start, 0.7)
        place.set(fill=False, edgecolor="black", linewidth=2, zorder=3)
        axes.add_patch(place)
    axes.annotate(
        "",
        xy=(join.end, compute_row),
        xytext=(join.start, gather_row),
        arrowprops={"arrowstyle": "->", "color": NAMED_COLOUR, "lw": 3},
    )
    over, under = compute_row - 0.45, gather_row + 0.45
    for x, y, text in (
        (compute.start, over, f"2  the compute it overlaps: {compute.label}"),
        (gather.start, under, f"1  one gather: {gather.label}"),
        (join.end, under, "3  the wait that joins them"),
    ):
        vertical = "bottom" if y == over else "top"
        axes.text(x, y, text, fontsize=8, weight="bold", va=vertical, zorder=4, bbox=LABEL_BOX)


def _finish(
    axes: Axes,
    rows: list[tuple[int, int]],
    timelines: Sequence[RankTimeline],
    ranks: Sequence[int],
    window: tuple[int, int],
) -> None:
    names = {
        (rank, stream): f"rank {rank}  {name}"
        for rank, timeline in zip(ranks, timelines, strict=True)
        for stream, name in _stream_names(timeline).items()
    }
    axes.set_yticks(range(len(rows)), [names[row] for row in rows], fontsize=7)
    axes.set_xlim(*window)
    axes.set_ylim(len(rows) - 0.3, -1)
    axes.set_xlabel(
        "ops issued by the host (order, not time: widths mean nothing else)", fontsize=8
    )
