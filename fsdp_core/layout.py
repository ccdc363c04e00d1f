"""GlobalLayout: where each tensor lies in a flat buffer, and where each shard begins (pure).

Shape symbols of this package: W ranks, N elements of one tensor, P elements of the whole flat
buffer with its padding, S elements of one rank's shard. Offsets are in elements.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

from torch.distributed.tensor.placement_types import Placement

from fsdp_core.errors import ConfigError
from fsdp_core.placement import is_sharded


@dataclass(frozen=True, slots=True)
class Range:
    """A run of elements of a flat buffer.

    Attributes:
        start: the first element.
        numel: how many; may be 0.
    """

    start: int
    numel: int

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.start + self.numel

    def contains(self, other: "Range") -> bool:
        """Whether `other` lies inside."""
        return self.start <= other.start and other.end <= self.end


def intersect_ranges(left: Range, right: Range) -> Range:
    """Return what two ranges share; empty, at the later start, if they share nothing."""
    start = max(left.start, right.start)
    return Range(start, max(0, min(left.end, right.end) - start))


@dataclass(frozen=True)
class GlobalLayout:
    """Where each tensor lies in a flat buffer, and where each of its shards begins.

    It depends on shapes and the number of shards alone, so every rank derives the same one
    without communication. It knows no placements: the same layout serves the whole buffer, its
    shards on one axis, and those on several.

    Attributes:
        tensor_shapes: shape of each tensor, in index order.
        tensor_offsets: first element of each tensor.
        numel: elements of the whole buffer with its padding [P].
        rank_to_offset: first element of each shard, one for each of the W ranks.
    """

    tensor_shapes: tuple[tuple[int, ...], ...]
    tensor_offsets: tuple[int, ...]
    numel: int
    rank_to_offset: tuple[int, ...]

    def __post_init__(self) -> None:
        """Assert what every builder must ensure: order and bounds of shards and tensors."""
        assert len(self.tensor_shapes) == len(self.tensor_offsets)
        assert self.rank_to_offset[0] == 0
        assert all(left <= right for left, right in pairwise(self.rank_to_offset))
        assert self.rank_to_offset[-1] <= self.numel
        self._assert_disjoint()

    def _assert_disjoint(self) -> None:
        end = 0
        for tensor_range in sorted(self.tensor_ranges, key=lambda each: (each.start, each.numel)):
            assert tensor_range.start >= end, f"tensors overlap at {tensor_range.start}"
            end = tensor_range.end
        assert end <= self.numel

    @property
    def dp_size(self) -> int:
        """Number of shards [W]."""
        return len(self.rank_to_offset)

    @cached_property
    def tensor_ranges(self) -> tuple[Range, ...]:
        """Where each tensor lies."""
        pairs = zip(self.tensor_offsets, self.tensor_shapes, strict=True)
        return tuple(Range(offset, prod(shape)) for offset, shape in pairs)

    @cached_property
    def tensors_numel(self) -> int:
        """Elements of all tensors, without padding."""
        return sum(each.numel for each in self.tensor_ranges)

    @cached_property
    def has_equal_shard_sizes(self) -> bool:
        """Whether each rank's shard has the same number of elements."""
        return len({self.rank_size(rank) for rank in range(self.dp_size)}) == 1

    def get_tensor_range(self, index: int) -> Range:
        """Return where tensor `index` lies."""
        return self.tensor_ranges[index]

    def rank_size(self, rank: int) -> int:
        """Return the elements of one rank's shard [S]."""
        return self.get_segments_range(rank, 1).numel

    def get_segments_range(self, first: int, count: int) -> Range:
        """Return the range that `count` consecutive shards cover."""
        ends = (*self.rank_to_offset, self.numel)
        return Range(ends[first], ends[first + count] - ends[first])

    def get_rank_range(
        self,
        axis_sizes: Sequence[int],
        placements: Sequence[Placement],
        coordinate: Sequence[int],
    ) -> Range:
        """Return the one range that a rank holds of a buffer with these placements.

        The innermost sharded axis is the most significant digit of the shard's number. So on
        (outer, inner) the piece of a rank under [replicate, shard] is the pieces of its outer
        peers under [shard, shard], one after the other: what outer collectives work on is
        contiguous.

        Args:
            axis_sizes: sizes of the mesh's axes, outermost first.
            placements: one for each axis.
            coordinate: the rank's place on each axis.

        Raises:
            ConfigError: the number of shards does not divide the layout's.
        """
        shard_count, shard_index = 1, 0
        for axis in reversed(range(len(axis_sizes))):
            if is_sharded(placements[axis]):
                shard_count *= axis_sizes[axis]
                shard_index = shard_index * axis_sizes[axis] + coordinate[axis]
        if self.dp_size % shard_count:
            msg = (
                f"the number of shards must divide the layout's {self.dp_size}, got {shard_count}; "
                f"build the layout for the whole mesh"
            )
            raise ConfigError(msg)
        segments = self.dp_size // shard_count
        return self.get_segments_range(shard_index * segments, segments)


def row_numel(shape: Sequence[int]) -> int:
    """Return the elements of one row (dim 0) of a tensor."""
    return prod(shape[1:])


def validate_row_atomic(layout: GlobalLayout, *, block_size: int = 1) -> None:
    """Check that no shard begins inside a row (or a block of rows) of a tensor.

    Raises:
        ConfigError: one does.
    """
    for index, tensor_range in enumerate(layout.tensor_ranges):
        atom = block_size * row_numel(layout.tensor_shapes[index])
        for offset in layout.rank_to_offset:
            inside = tensor_range.start < offset < tensor_range.end
            if inside and (offset - tensor_range.start) % atom:
                msg = (
                    f"a shard must begin at a row of tensor {index} (shape "
                    f"{layout.tensor_shapes[index]}, atoms of {atom} elements), got element "
                    f"{offset - tensor_range.start} of it; move it to the row's start"
                )
                raise ConfigError(msg)


def validate_tensor_atomic(layout: GlobalLayout) -> None:
    """Check that each tensor that has elements lies inside one shard.

    Raises:
        ConfigError: one does not.
    """
    for index, tensor_range in enumerate(layout.tensor_ranges):
        if any(tensor_range.start < offset < tensor_range.end for offset in layout.rank_to_offset):
            msg = (
                f"each tensor must lie inside one shard, got tensor {index} (shape "
                f"{layout.tensor_shapes[index]}) split; use build_for_tensor_atomic"
            )
            raise ConfigError(msg)
