"""Packing: the worked examples, and what holds for every set of shapes."""

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fsdp_core.errors import ConfigError, ConfigTypeError
from fsdp_core.layout import GlobalLayout
from fsdp_core.layout_builder import (
    PADDING_DIVISOR,
    PADDING_NUMEL_PER_RANK_MAX,
    build_for_row_atomic,
    build_for_row_atomic_unpadding,
    build_for_tensor_atomic,
    build_row_atomic_layout,
)

Build = Callable[..., GlobalLayout]

# Rows of 1 to 8 elements keep quanta small; dim 0 may be 0 and there may be dims behind the row.
SHAPES = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 8)) | st.tuples(st.integers(0, 40)),
    min_size=1,
    max_size=8,
)
SIZES = st.integers(1, 9)


def held_rows(layout: GlobalLayout, index: int) -> list[int]:
    """How many elements of a tensor each rank's shard has."""
    tensor_range = layout.get_tensor_range(index)
    counts = []
    for rank in range(layout.dp_size):
        shard = layout.get_segments_range(rank, 1)
        start = max(shard.start, tensor_range.start)
        counts.append(max(0, min(shard.end, tensor_range.end) - start))
    return counts


@pytest.mark.parametrize(
    ("shapes", "dp_size", "block_size", "offsets", "numel"),
    [
        ([(2, 6), (4, 4), (4, 4), (1, 2), (1, 6)], 5, 1, (0, 12, 32, 28, 48), 60),
        ([(5, 4), (2, 6), (3,)], 2, 1, (0, 24, 20), 48),
        ([(4, 4), (1, 6)], 2, 1, (0, 18), 24),
        ([(16, 8), (16,)], 2, 1, (0, 128), 144),
        ([(4, 16), (4,)], 2, 1, (0, 64), 96),
        ([(5, 4), (7, 6)], 2, 1, (0, 24), 72),
        ([(7, 3), (2, 5), (7,)], 2, 1, (0, 30, 21), 60),
        ([(5, 4)], 3, 1, (0,), 24),
        ([(8, 4), (4, 4)], 2, 1, (0, 32), 48),
        ([(64, 8), (32, 8)], 4, 32, (0, 512), 1024),
        ([(1, 1024), (3, 7)], 4, 1, (0, 1029), 28672),
    ],
)
def test_padded_packing_of_a_worked_example(
    shapes: list[tuple[int, ...]],
    dp_size: int,
    block_size: int,
    offsets: tuple[int, ...],
    numel: int,
) -> None:
    """Partners end at a quantum, fragments fill gaps aligned to their rows, shards are equal."""
    layout = build_for_row_atomic(shapes, dp_size, block_size=block_size)

    assert layout.tensor_offsets == offsets
    assert layout.numel == numel
    assert layout.rank_to_offset == tuple(numel // dp_size * rank for rank in range(dp_size))


@pytest.mark.parametrize(
    ("shapes", "dp_size", "index", "rows"),
    [
        ([(2, 6), (4, 4), (4, 4), (1, 2), (1, 6)], 5, 1, [0, 3, 1, 0, 0]),
        ([(2, 6), (4, 4), (4, 4), (1, 2), (1, 6)], 5, 2, [0, 0, 1, 3, 0]),
        ([(2, 6), (4, 4), (4, 4), (1, 2), (1, 6)], 5, 3, [0, 0, 1, 0, 0]),
        ([(16, 8), (16,)], 2, 0, [9, 7]),
        ([(16, 8), (16,)], 2, 1, [0, 16]),
        ([(4, 16), (4,)], 2, 0, [3, 1]),
        ([(5, 4)], 3, 0, [2, 2, 1]),
        ([(8, 4), (4, 4)], 2, 0, [6, 2]),
        ([(8, 4), (4, 4)], 2, 1, [0, 4]),
    ],
)
def test_rows_of_each_rank_in_a_worked_example(
    shapes: list[tuple[int, ...]], dp_size: int, index: int, rows: list[int]
) -> None:
    """A tensor may be spread unevenly, but always by whole rows."""
    layout = build_for_row_atomic(shapes, dp_size)

    assert [count // prod(shapes[index][1:]) for count in held_rows(layout, index)] == rows


@given(SHAPES, SIZES)
@example([(0, 3)], 2)
@example([(1, 5), (1, 7), (1, 8)], 3)
def test_shards_of_the_padded_packing_are_equal_and_split_no_row(
    shapes: list[tuple[int, ...]], dp_size: int
) -> None:
    """Every shard has one size and begins between rows of whatever it begins in."""
    layout = build_for_row_atomic(shapes, dp_size)

    assert layout.has_equal_shard_sizes
    for index, shape in enumerate(shapes):
        assert all(count % prod(shape[1:]) == 0 for count in held_rows(layout, index))


@given(SHAPES, SIZES)
def test_unpadded_packing_stores_nothing_but_rows(
    shapes: list[tuple[int, ...]], dp_size: int
) -> None:
    """There is no padding at all, and no row is split."""
    layout = build_for_row_atomic_unpadding(shapes, dp_size)

    assert layout.numel == sum(prod(shape) for shape in shapes)
    for index, shape in enumerate(shapes):
        assert all(count % prod(shape[1:]) == 0 for count in held_rows(layout, index))


@given(SHAPES, SIZES)
def test_unpadded_shards_begin_within_half_a_row_of_their_even_part(
    shapes: list[tuple[int, ...]], dp_size: int
) -> None:
    """The longest row bounds how uneven the shards are."""
    layout = build_for_row_atomic_unpadding(shapes, dp_size)

    longest_row = max(prod(shape[1:]) for shape in shapes)
    for rank, offset in enumerate(layout.rank_to_offset):
        assert abs(2 * (offset * dp_size - rank * layout.numel)) <= longest_row * dp_size


@given(SHAPES, SIZES, st.sampled_from([build_for_row_atomic, build_for_row_atomic_unpadding]))
def test_every_element_of_every_tensor_is_in_one_shard(
    shapes: list[tuple[int, ...]], dp_size: int, build: Build
) -> None:
    """Shards cover the buffer, and tensors lie in it without overlap."""
    layout = build(shapes, dp_size)

    owner: list[int | None] = [None] * layout.numel
    for index in range(len(shapes)):
        tensor_range = layout.get_tensor_range(index)
        assert tensor_range.numel == prod(shapes[index])
        assert sum(held_rows(layout, index)) == tensor_range.numel
        for element in range(tensor_range.start, tensor_range.end):
            assert owner[element] is None
            owner[element] = index


@given(SHAPES, SIZES, st.integers(2, 4))
def test_blocks_of_rows_stay_together(
    shapes: list[tuple[int, ...]], dp_size: int, block_size: int
) -> None:
    """With a block size, shards begin between blocks of every tensor, padded or not."""
    shapes = [(shape[0] * block_size, *shape[1:]) for shape in shapes]

    for build in (build_for_row_atomic, build_for_row_atomic_unpadding):
        layout = build(shapes, dp_size, block_size=block_size)
        for index, shape in enumerate(shapes):
            atom = block_size * prod(shape[1:])
            assert all(count % atom == 0 for count in held_rows(layout, index))


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=5),
    SIZES,
    st.integers(1, 4),
)
@example([(1, 1024), (3, 7)], 4, 1)
@example([(301, 299), (300, 300)], 2, 1)
@example([(16, 31), (8, 29), (8, 27)], 3, 4)
def test_padding_is_bounded(shapes: list[tuple[int, ...]], dp_size: int, block_size: int) -> None:
    """The chosen packing pads no more than the larger of both bounds, and splits no block of rows."""
    shapes = [(shape[0] * block_size, *shape[1:]) for shape in shapes]

    layout = build_row_atomic_layout(shapes, dp_size, block_size=block_size)

    padding = layout.numel - layout.tensors_numel
    bound = max(layout.tensors_numel // PADDING_DIVISOR, PADDING_NUMEL_PER_RANK_MAX * dp_size)
    assert padding <= bound
    for index, shape in enumerate(shapes):
        atom = block_size * prod(shape[1:])
        assert all(count % atom == 0 for count in held_rows(layout, index))


def test_coprime_rows_choose_the_unpadded_packing() -> None:
    """27,627 elements of padding for 1,045 exceed both bounds; the shards become unequal."""
    layout = build_row_atomic_layout([(1, 1024), (3, 7)], 4)

    assert layout.numel == 1045
    assert not layout.has_equal_shard_sizes


@pytest.mark.parametrize(
    ("rows", "columns", "ranks", "is_padded"),
    [
        (8, 12289, 3, True),  # one row in eight: an eighth, and a column above 4,096 for each rank
        (7, 8193, 2, False),  # one in seven
        (7, 8192, 2, True),  # one in seven, but 4,096 for each rank
    ],
)
def test_padding_must_exceed_an_eighth_and_4096_for_each_rank_to_be_left_out(
    *, rows: int, columns: int, ranks: int, is_padded: bool
) -> None:
    """One row of padding; both bounds themselves are still padded."""
    layout = build_row_atomic_layout([(rows, columns)], ranks)

    assert layout.has_equal_shard_sizes == is_padded
    assert layout.numel == (rows + is_padded) * columns


def test_small_padding_keeps_equal_shards() -> None:
    """28 elements of padding for 68 exceed the fraction but not the number per rank."""
    layout = build_row_atomic_layout([(4, 16), (4,)], 2)

    assert layout.has_equal_shard_sizes
    assert layout.numel == 96


@pytest.mark.parametrize("build", [build_for_row_atomic, build_for_row_atomic_unpadding])
@pytest.mark.parametrize(
    ("shapes", "dp_size", "block_size", "message"),
    [
        ([(2, 2)], 0, 1, "dp_size must be a positive int, got 0; pass 1 or more"),
        ([(2, 2)], 2, 0, "block_size must be a positive int, got 0; pass 1 or more"),
        (
            [(2, 2), ()],
            2,
            1,
            (
                "a tensor sharded by rows needs at least one dim, "
                "got tensor 1 of shape (); use another shape"
            ),
        ),
        (
            [(2, 0)],
            2,
            1,
            "a tensor sharded by rows needs rows that are not empty, got tensor 0 of shape (2, 0); use another shape",
        ),
        (
            [(5, 2)],
            2,
            4,
            (
                "a tensor sharded by rows needs a number of rows divisible by 4, "
                "got tensor 0 of shape (5, 2); use another shape"
            ),
        ),
    ],
)
def test_what_cannot_be_packed_by_rows_is_refused(
    build: Build, shapes: list[tuple[int, ...]], dp_size: int, block_size: int, message: str
) -> None:
    """The error says what is needed and which tensor has it not."""
    with pytest.raises(ConfigError) as caught:
        build(shapes, dp_size, block_size=block_size)

    assert str(caught.value) == message


def test_whole_tensors_are_packed_owner_by_owner() -> None:
    """In index order within an owner, without padding."""
    layout = build_for_tensor_atomic([(4, 4), (2, 6), (1, 2)], 2, [0, 1, 1])

    assert layout.tensor_offsets == (0, 16, 28)
    assert layout.rank_to_offset == (0, 16)
    assert layout.numel == 30


@given(SHAPES, SIZES, st.data())
def test_each_whole_tensor_is_on_its_owner_alone(
    shapes: list[tuple[int, ...]], dp_size: int, data: st.DataObject
) -> None:
    """Owners may come in any order, and a rank may own nothing."""
    owners = data.draw(
        st.lists(st.integers(0, dp_size - 1), min_size=len(shapes), max_size=len(shapes))
    )

    layout = build_for_tensor_atomic(shapes, dp_size, owners)

    assert layout.numel == sum(prod(shape) for shape in shapes)
    for index, owner in enumerate(owners):
        counts = held_rows(layout, index)
        assert counts[owner] == prod(shapes[index])
        assert sum(counts) == counts[owner]


@pytest.mark.parametrize(
    ("owners", "error", "message"),
    [
        (
            [0],
            ConfigError,
            "each of the 2 tensors needs one owner, got 1 owners; pass as many owners as tensors",
        ),
        (
            [0, True],
            ConfigTypeError,
            "the owner of tensor 1 must be an int, got True; pass a rank of the mesh",
        ),
        (
            [0, -1],
            ConfigError,
            "the owner of tensor 1 must be in [0, 2), got -1; pass a rank of the mesh",
        ),
        (
            [2, 0],
            ConfigError,
            "the owner of tensor 0 must be in [0, 2), got 2; pass a rank of the mesh",
        ),
    ],
)
def test_an_owner_that_is_no_rank_is_refused(
    owners: list[Any], error: type[Exception], message: str
) -> None:
    """A bool is not a rank, and neither is what lies outside the group."""
    with pytest.raises(error) as caught:
        build_for_tensor_atomic([(2, 2), (2, 2)], 2, owners)

    assert str(caught.value) == message
