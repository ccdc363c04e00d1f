"""Rows: the picture of a trace, a row for each rank and stream, on which things can be pointed at."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from fsdp_sim.op import Kind, Op
from fsdp_sim.timeline import RankTimeline, Span, rank_timeline
from fsdp_sim.views.report import shorten

COLOURS = {"all_gather": "#4c72b0", "reduce_scatter": "#c44e52", "all_reduce": "#8172b3"}
LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1}
COMPUTE_COLOUR = "#ccb974"
LABEL_UNITS_MIN = 8
"""Pieces that are shorter have no room for their name."""
_SAME_BYTES: Any = {"svg.hashsalt": "fsdp_sim", "svg.fonttype": "none"}
_NO_DATE = {"Date": None}

Window = tuple[int, int]


@dataclass(frozen=True)
class Piece:
    """Operators of one stream that ran under one label without a gap, or one collective."""

    stream: int
    label: str
    start: int
    end: int
    is_collective: bool


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


class Rows:
    """A window of the timelines of some ranks.

    Args:
        ops: of a trace, in order of issue.
        ranks: which ranks to draw, from the top.

    Attributes:
        timelines: of the ranks, by rank.
    """

    def __init__(self, ops: Iterable[Op], ranks: Sequence[int]) -> None:
        ops = list(ops)
        self.timelines = {rank: rank_timeline(ops, rank) for rank in ranks}
        self._rows = [(rank, stream) for rank, t in self.timelines.items() for stream in t.roles]
        self._figure = Figure(figsize=(14, 1.2 + 0.42 * len(self._rows)), layout="constrained")
        self._axes = self._figure.add_subplot()

    def row(self, rank: int, stream: int) -> int:
        """Return the row of a stream, counted from the top."""
        return self._rows.index((rank, stream))

    def draw(self, window: Window) -> None:
        """Draw the work and the waits of all ranks."""
        for rank in self.timelines:
            self._draw_pieces(rank, window)
            self._draw_waits(rank, window)
        self._axes.set_yticks(range(len(self._rows)), self._names(), fontsize=7)
        self._axes.set_xlim(*window)
        self._axes.set_ylim(len(self._rows) - 0.3, -1)
        self._axes.set_xlabel(
            "ops issued by the host (order, not time: widths mean nothing else)", fontsize=8
        )

    def _draw_pieces(self, rank: int, window: Window) -> None:
        for piece in pieces(self.timelines[rank]):
            if piece.end < window[0] or piece.start > window[1]:
                continue
            kind = piece.label.partition(" ")[0] if piece.is_collective else ""
            colour = COLOURS.get(kind, COMPUTE_COLOUR)
            width, row = piece.end - piece.start, self.row(rank, piece.stream)
            self._axes.barh(
                row, width, left=piece.start, height=0.7, color=colour, edgecolor="white"
            )
            if width >= LABEL_UNITS_MIN:
                middle = (max(piece.start, window[0]) + min(piece.end, window[1])) / 2
                how: Any = {"ha": "center", "va": "center", "fontsize": 6, "clip_on": True}
                self._axes.text(middle, row, piece.label, **how)

    def _draw_waits(self, rank: int, window: Window) -> None:
        timeline = self.timelines[rank]
        for join in timeline.joins:
            if window[0] <= join.end <= window[1] and join.other in timeline.roles:
                start = (join.start, self.row(rank, join.other))
                self.arrow(start, (join.end, self.row(rank, join.stream)), "grey", width=0.7)

    def _names(self) -> list[str]:
        names = {rank: _stream_names(timeline) for rank, timeline in self.timelines.items()}
        return [f"rank {rank}  {names[rank][stream]}" for rank, stream in self._rows]

    def outline(self, start: int, end: int, row: int, colour: str = "black") -> None:
        """Draw a frame around what runs from ``start`` to ``end``."""
        place = Rectangle((start, row - 0.35), end - start, 0.7)
        place.set(fill=False, edgecolor=colour, linewidth=2, zorder=3)
        self._axes.add_patch(place)

    def arrow(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
        colour: str,
        *,
        width: float = 3,
        style: str = "solid",
    ) -> None:
        """Draw an arrow between two places, each given by its unit and row."""
        how = {"arrowstyle": "->", "color": colour, "lw": width, "linestyle": style}
        self._axes.annotate("", xy=end, xytext=start, arrowprops=how)

    def say(
        self, unit: float, row: int, text: str, *, at: Literal["above", "beside", "below"]
    ) -> None:
        """Write a line from ``unit`` on: above a row, in it, or below it."""
        y = row + {"above": -0.45, "beside": 0.0, "below": 0.45}[at]
        vertical = {"above": "bottom", "beside": "center", "below": "top"}[at]
        how: Any = {"va": vertical, "weight": "bold", "bbox": LABEL_BOX}
        self._axes.text(unit, y, text, fontsize=8, zorder=4, **how)

    def save(self, path: str | Path) -> None:
        """Write the file, whose suffix says whether PNG or SVG; the same picture has the same bytes."""
        is_svg = Path(path).suffix == ".svg"
        with mpl.rc_context(_SAME_BYTES):
            self._figure.savefig(path, dpi=130, metadata=_NO_DATE if is_svg else None)


def _stream_names(timeline: RankTimeline) -> dict[int, str]:
    """Name each stream by what it carries, else by where it was made."""
    names = {stream: shorten(role.rpartition(" ")[2]) for stream, role in timeline.roles.items()}
    for span in reversed(timeline.spans):
        if span.op.kind is Kind.COLLECTIVE:
            names[span.op.stream] = span.op.name
    return names | {
        stream: "compute" for stream, role in timeline.roles.items() if role == "default"
    }
