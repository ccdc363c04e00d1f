"""Ranges of shards on meshes of one and several axes."""

from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_core.errors import ConfigError
from fsdp_core.layout import (
    GlobalLayout,
    Range,
    intersect_ranges,
    validate_row_atomic,
    validate_tensor_atomic,
)
from fsdp_core.layout_builder import build_for_row_atomic, build_for_row_atomic_unpadding

Build = Callable[..., GlobalLayout]


def quarters() -> GlobalLayout:
    """A layout of four shards of two elements."""
    return build_for_row_atomic([(8,)], 4)


@pytest.mark.parametrize(
    ("left", "right", "shared"),
    [
        (Range(0, 4), Range(2, 4), Range(2, 2)),
        (Range(2, 4), Range(0, 4), Range(2, 2)),
        (Range(0, 8), Range(3, 2), Range(3, 2)),
        (Range(0, 2), Range(5, 2), Range(5, 0)),
        (Range(0, 2), Range(2, 2), Range(2, 0)),
    ],
)
def test_what_two_ranges_share_begins_at_the_later_start(
    left: Range, right: Range, shared: Range
) -> None:
    """What shares nothing gives an empty range there."""
    assert intersect_ranges(left, right) == shared


@pytest.mark.parametrize(
    ("coordinate", "start"), [((0, 0), 0), ((1, 0), 2), ((0, 1), 4), ((1, 1), 6)]
)
def test_the_innermost_axis_is_the_most_significant_digit(
    coordinate: tuple[int, ...], start: int
) -> None:
    """Outer ranks of inner rank 0 have quarters 0 and 1, those of inner rank 1 quarters 2 and 3."""
    held = quarters().get_rank_range((2, 2), (Shard(0), Shard(0)), coordinate)

    assert held == Range(start, 2)


@pytest.mark.parametrize("outer", [Replicate(), Partial("avg")])
def test_an_axis_that_is_not_sharded_does_not_divide(outer: Placement) -> None:
    """Both outer ranks hold the half of their inner rank."""
    for coordinate in ((0, 1), (1, 1)):
        held = quarters().get_rank_range((2, 2), (outer, Shard(0)), coordinate)

        assert held == Range(4, 4)


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(1, 7), st.integers(1, 5)), min_size=1, max_size=3),
    st.sampled_from([build_for_row_atomic, build_for_row_atomic_unpadding]),
)
def test_outer_pieces_follow_each_other_inside_the_inner_one(
    axis_sizes: list[int], shapes: list[tuple[int, ...]], build: Build
) -> None:
    """Sharding one axis more divides each piece into those of its outer peers, in their order."""
    count = 1
    for size in axis_sizes:
        count *= size
    layout = build(shapes, count)

    for sharded in range(1, len(axis_sizes) + 1):
        replicated = len(axis_sizes) - sharded
        fewer = (Replicate(),) * (replicated + 1) + (Shard(0),) * (sharded - 1)
        more = (Replicate(),) * replicated + (Shard(0),) * sharded
        for coordinate in product(*(range(size) for size in axis_sizes)):
            whole = layout.get_rank_range(axis_sizes, fewer, coordinate)
            position = whole.start
            for rank in range(axis_sizes[replicated]):
                place = (*coordinate[:replicated], rank, *coordinate[replicated + 1 :])
                piece = layout.get_rank_range(axis_sizes, more, place)
                assert piece.start == position
                position = piece.end
            assert position == whole.end


def test_a_layout_for_another_number_of_shards_is_refused() -> None:
    """Three shards cannot be made of four segments."""
    with pytest.raises(ConfigError) as caught:
        quarters().get_rank_range((3,), (Shard(0),), (0,))

    assert str(caught.value) == (
        "the number of shards must divide the layout's 4, got 3; "
        "build the layout for the whole mesh"
    )


def test_sizes_of_unequal_shards() -> None:
    """The last shard ends where the buffer ends."""
    layout = GlobalLayout(((3, 2), (1, 2)), (0, 6), 8, (0, 4, 4))

    assert [layout.rank_size(rank) for rank in range(3)] == [4, 0, 4]
    assert not layout.has_equal_shard_sizes
    assert layout.dp_size == 3


def test_a_shard_that_begins_inside_a_row_is_refused() -> None:
    """The error names the tensor and the element."""
    layout = GlobalLayout(((3, 2),), (0,), 6, (0, 3))

    with pytest.raises(ConfigError) as caught:
        validate_row_atomic(layout)

    assert str(caught.value) == (
        "a shard must begin at a row of tensor 0 (shape (3, 2), atoms of 2 elements), "
        "got element 3 of it; move it to the row's start"
    )


def test_a_whole_tensor_that_is_split_is_refused() -> None:
    """The error names the tensor and the remedy."""
    layout = GlobalLayout(((1, 2), (3, 2)), (0, 2), 8, (0, 4))

    with pytest.raises(ConfigError) as caught:
        validate_tensor_atomic(layout)

    assert str(caught.value) == (
        "each tensor must lie inside one shard, got tensor 1 (shape (3, 2)) split; "
        "use build_for_tensor_atomic"
    )


def test_tensors_that_overlap_break_our_own_rule() -> None:
    """Only a builder's bug can do this, so it is an assertion."""
    with pytest.raises(AssertionError, match="tensors overlap at 1"):
        GlobalLayout(((2,), (2,)), (0, 1), 4, (0,))
