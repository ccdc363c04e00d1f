"""The picture: it finds the overlap that it names, and draws it."""

from pathlib import Path

import pytest

from fsdp_sim.op import Kind
from fsdp_sim.timeline import rank_timeline
from fsdp_sim.views.picture import draw, find_overlap
from tests.sim.ops import Ops

COMPUTE, GATHER = 0, 1


def prefetch(*, is_overlapped: bool = True) -> Ops:
    """Gather a second unit while the first computes, or only after it."""
    ops = Ops()
    ops.add(Kind.STREAM, "default", COMPUTE)
    ops.add(Kind.STREAM, "stream made at device.py:1", GATHER)
    if not is_overlapped:
        ops.wait_stream(COMPUTE, GATHER)
        ops.aten(COMPUTE)
        ops.wait_stream(GATHER, COMPUTE)
    ops.collective(GATHER, annotation="fsdp_core::unshard second")
    if is_overlapped:
        ops.add(Kind.ATEN, "mm", COMPUTE, annotation="fsdp_core::forward first")
    ops.wait_stream(COMPUTE, GATHER)
    ops.aten(COMPUTE)
    return ops


def test_overlap_names_the_gather_the_compute_and_the_wait() -> None:
    """Each of the three is the one that a reader would point at."""
    overlap = find_overlap(rank_timeline(prefetch(), 0))

    assert overlap is not None
    assert overlap.gather.label == "all_gather second"
    assert overlap.compute.label == "forward first"
    assert (overlap.join.stream, overlap.join.other) == (COMPUTE, GATHER)


def test_a_gather_that_compute_waits_for_at_once_is_no_overlap() -> None:
    """A runtime without prefetch has nothing to show."""
    assert find_overlap(rank_timeline(prefetch(is_overlapped=False), 0)) is None


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_draw_writes_the_kind_of_file_that_its_name_says(tmp_path: Path, suffix: str) -> None:
    """The first bytes are those of the format."""
    path = tmp_path / f"timeline.{suffix}"
    draw(prefetch(), [0], path)

    assert path.read_bytes().startswith({"png": b"\x89PNG", "svg": b"<?xml"}[suffix])


def test_draw_names_stream_and_unit(tmp_path: Path) -> None:
    """The three labels are in the picture, in words."""
    path = tmp_path / "timeline.svg"
    draw(prefetch(), [0], path)
    text = path.read_text()

    for label in (
        "one gather: all_gather second",
        "overlaps: forward first",
        "the wait that joins",
    ):
        assert label in text


def test_draw_refuses_a_trace_without_overlap(tmp_path: Path) -> None:
    """A picture without its subject would mislead."""
    message = "^the trace must hold a gather that overlaps compute, got none$"
    with pytest.raises(ValueError, match=message):
        draw(prefetch(is_overlapped=False), [0], tmp_path / "timeline.png")
