"""Packing of tensors into a flat buffer by rows, blocks of rows, or whole tensors (pure)."""

from collections.abc import Sequence
from math import lcm, prod

from fsdp_core.errors import ConfigError, ConfigTypeError
from fsdp_core.layout import (
    GlobalLayout,
    Range,
    row_numel,
    validate_row_atomic,
    validate_tensor_atomic,
)
from fsdp_core.placement import is_positive_int

Shape = Sequence[int]

# Padding is accepted unless it exceeds both: a fraction of what is stored, so that large units
# waste little, and a number of elements per rank, so that small units keep equal shards (equal
# gathers are one collective; unequal ones are one broadcast for each rank).
PADDING_DIVISOR = 8
PADDING_NUMEL_PER_RANK_MAX = 4096


def build_row_atomic_layout(
    shapes: Sequence[Shape], dp_size: int, *, block_size: int = 1
) -> GlobalLayout:
    """Pack tensors by rows, with equal shards where padding stays within bounds.

    Args:
        shapes: shape of each tensor, in index order.
        dp_size: number of shards.
        block_size: rows that stay together.

    Raises:
        ConfigError: see `build_for_row_atomic`.
    """
    padded = build_for_row_atomic(shapes, dp_size, block_size=block_size)
    padding = padded.numel - padded.tensors_numel
    too_large = (
        padding * PADDING_DIVISOR > padded.tensors_numel
        and padding > PADDING_NUMEL_PER_RANK_MAX * dp_size
    )
    if too_large:
        return build_for_row_atomic_unpadding(shapes, dp_size, block_size=block_size)
    return padded


def build_for_row_atomic(
    shapes: Sequence[Shape], dp_size: int, *, block_size: int = 1
) -> GlobalLayout:
    """Pack tensors by rows into equal shards.

    Every shard begins at a multiple of the quantum, the least common multiple of all tensors'
    rows (or blocks), and every tensor begins or ends at one, so no row is split. What that
    leaves free is filled with tensors smaller than the quantum.

    Raises:
        ConfigError: a count that is not positive, a tensor without rows or with empty ones, or
            one whose rows are not whole blocks.
    """
    _check_shapes(shapes, dp_size, block_size)
    quantum = lcm(*(block_size * row_numel(shape) for shape in shapes))
    offsets, end = _Packing(shapes, quantum, block_size).place_all()
    shard_numel = _align_up(end, quantum * dp_size) // dp_size
    layout = GlobalLayout(
        tensor_shapes=tuple(tuple(shape) for shape in shapes),
        tensor_offsets=offsets,
        numel=shard_numel * dp_size,
        rank_to_offset=tuple(shard_numel * rank for rank in range(dp_size)),
    )
    validate_row_atomic(layout, block_size=block_size)
    return layout


class _Packing:
    """One run of the padded builder: tensors get offsets, the cursor moves by whole quanta."""

    def __init__(self, shapes: Sequence[Shape], quantum: int, block_size: int) -> None:
        self.numels = [prod(shape) for shape in shapes]
        self.atoms = [block_size * row_numel(shape) for shape in shapes]
        self.quantum = quantum
        self.offsets: dict[int, int] = {}
        regular = [index for index, numel in enumerate(self.numels) if numel >= quantum]
        fragments = [index for index, numel in enumerate(self.numels) if numel < quantum]
        self.regular = regular
        self.fragments = sorted(fragments, key=lambda index: -self.numels[index])

    def place_all(self) -> tuple[tuple[int, ...], int]:
        """Place the regular tensors with fragments in their gaps, then the other fragments.

        Returns:
            The offset of each tensor, and the end of the last one.
        """
        cursor = 0
        while self.regular:
            index = self.regular.pop(0)
            self.offsets[index] = cursor
            cursor = self._close_gap(index, cursor + self.numels[index])
        end = self._fill(Range(cursor, sum(self.numels) + sum(self.atoms)))
        assert not self.fragments
        return tuple(self.offsets[index] for index in range(len(self.numels))), end

    def _close_gap(self, index: int, end: int) -> int:
        """Use the space between a regular tensor's end and the next quantum; return the cursor."""
        cursor = _align_up(end, self.quantum)
        gap_end = cursor
        partner = self._find_partner(index)
        if partner is not None:
            self.regular.remove(partner)
            gap_end -= self.numels[partner] % self.quantum
            self.offsets[partner] = gap_end
            cursor = gap_end + self.numels[partner]
        self._fill(Range(end, gap_end - end))
        return cursor

    def _find_partner(self, index: int) -> int | None:
        """Find the first later tensor whose last partial quantum fits beside this one's."""
        free = -self.numels[index] % self.quantum
        for candidate in self.regular:
            if 0 < self.numels[candidate] % self.quantum <= free:
                return candidate
        return None

    def _fill(self, gap: Range) -> int:
        """Put fragments into a gap, largest first, each aligned to its rows; return the end."""
        position = gap.start
        for index in tuple(self.fragments):
            start = _align_up(position, self.atoms[index])
            if start + self.numels[index] <= gap.end:
                self.fragments.remove(index)
                self.offsets[index] = start
                position = start + self.numels[index]
        return position


def build_for_row_atomic_unpadding(
    shapes: Sequence[Shape], dp_size: int, *, block_size: int = 1
) -> GlobalLayout:
    """Pack tensors by rows without any padding; shards may be unequal or empty.

    Each shard begins at the row (or block) nearest to its even part, so two shards differ by at
    most one row of the tensors they begin in.

    Raises:
        ConfigError: see `build_for_row_atomic`.
    """
    _check_shapes(shapes, dp_size, block_size)
    offsets, end = _pack_in_order(shapes, range(len(shapes)))
    atoms = [block_size * row_numel(shape) for shape in shapes]
    starts = [_nearest_atom(shapes, offsets, atoms, rank * end, dp_size) for rank in range(dp_size)]
    layout = GlobalLayout(
        tensor_shapes=tuple(tuple(shape) for shape in shapes),
        tensor_offsets=offsets,
        numel=end,
        rank_to_offset=tuple(starts),
    )
    validate_row_atomic(layout, block_size=block_size)
    return layout


def _nearest_atom(
    shapes: Sequence[Shape],
    offsets: Sequence[int],
    atoms: Sequence[int],
    dividend: int,
    divisor: int,
) -> int:
    """Return the atom boundary nearest to `dividend / divisor`, the lower one of two."""
    for index, offset in enumerate(offsets):
        if dividend < (offset + prod(shapes[index])) * divisor:
            atom = atoms[index] * divisor
            count = (2 * (dividend - offset * divisor) + atom - 1) // (2 * atom)
            return offset + count * atoms[index]
    return dividend // divisor


def build_for_tensor_atomic(
    shapes: Sequence[Shape], dp_size: int, owners: Sequence[int]
) -> GlobalLayout:
    """Pack whole tensors owner by owner, in index order within an owner, without padding.

    Args:
        shapes: shape of each tensor, in index order.
        dp_size: number of shards.
        owners: the rank that holds each tensor.

    Raises:
        ConfigTypeError: an owner that is not an int.
        ConfigError: an owner out of range, another number of owners than of tensors, or a number
            of shards that is not positive.
    """
    _check_positive("dp_size", dp_size)
    _check_owners(owners, len(shapes), dp_size)
    order = sorted(range(len(shapes)), key=lambda index: owners[index])
    offsets, end = _pack_in_order(shapes, order)
    numel_before = [
        sum(prod(shape) for shape, owner in zip(shapes, owners, strict=True) if owner < rank)
        for rank in range(dp_size)
    ]
    layout = GlobalLayout(
        tensor_shapes=tuple(tuple(shape) for shape in shapes),
        tensor_offsets=offsets,
        numel=end,
        rank_to_offset=tuple(numel_before),
    )
    validate_tensor_atomic(layout)
    return layout


def _pack_in_order(shapes: Sequence[Shape], order: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Put tensors one after the other; return their offsets in index order, and the end."""
    offsets = [0] * len(shapes)
    end = 0
    for index in order:
        offsets[index] = end
        end += prod(shapes[index])
    return tuple(offsets), end


def _align_up(value: int, multiple: int) -> int:
    return multiple * -(-value // multiple)


def _check_shapes(shapes: Sequence[Shape], dp_size: int, block_size: int) -> None:
    _check_positive("dp_size", dp_size)
    _check_positive("block_size", block_size)
    for index, shape in enumerate(shapes):
        problem = _shape_problem(shape, block_size)
        if problem:
            msg = (
                f"a tensor sharded by rows needs {problem}, got tensor {index} of shape "
                f"{tuple(shape)}; use another shape"
            )
            raise ConfigError(msg)


def _shape_problem(shape: Shape, block_size: int) -> str | None:
    if len(shape) == 0:
        return "at least one dim"
    if row_numel(shape) == 0:
        return "rows that are not empty"
    if shape[0] % block_size:
        return f"a number of rows divisible by {block_size}"
    return None


def _check_positive(name: str, value: int) -> None:
    if not is_positive_int(value):
        msg = f"{name} must be a positive int, got {value!r}; pass 1 or more"
        raise ConfigError(msg)


def _check_owners(owners: Sequence[object], tensor_count: int, dp_size: int) -> None:
    if len(owners) != tensor_count:
        msg = (
            f"each of the {tensor_count} tensors needs one owner, got {len(owners)} owners; pass as "
            f"many owners as tensors"
        )
        raise ConfigError(msg)
    for index, owner in enumerate(owners):
        if isinstance(owner, bool) or not isinstance(owner, int):
            msg = f"the owner of tensor {index} must be an int, got {owner!r}; pass a rank of the mesh"
            raise ConfigTypeError(msg)
        if not 0 <= owner < dp_size:
            msg = (
                f"the owner of tensor {index} must be in [0, {dp_size}), got {owner}; pass a rank of "
                f"the mesh"
            )
            raise ConfigError(msg)
