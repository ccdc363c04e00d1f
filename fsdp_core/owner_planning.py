"""Which rank computes each whole tensor of a row-sharded buffer, and what it needs (pure).

A *holder* of a tensor is a rank whose shard has elements of it. Its *owner* is the holder that
gathers it, computes on it and scatters the result.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from torch.distributed.tensor.placement_types import Placement

from fsdp_core.errors import ConfigError, UnsupportedError
from fsdp_core.layout import GlobalLayout, Range, intersect_ranges
from fsdp_core.placement import is_sharded

# Iterations of the Newton-Schulz orthogonalisation that the default cost stands for.
ORTHOGONALIZATION_STEPS = 5


@dataclass(frozen=True, slots=True)
class Holder:
    """A rank and the range of the buffer that it holds.

    Attributes:
        rank: global rank.
        held: its elements.
    """

    rank: int
    held: Range


def list_holders(
    layout: GlobalLayout,
    axis_sizes: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
    global_rank_at: Callable[[tuple[int, ...]], int],
) -> tuple[Holder, ...]:
    """List the ranks that together hold the buffer once, in buffer order.

    On a replicated axis each replica is a set of its own: peers differ from `coordinate` on the
    sharded axes alone.

    Args:
        layout: of the buffer.
        axis_sizes: of the mesh, outermost first.
        placements: one for each axis.
        coordinate: this rank's place on each axis.
        global_rank_at: the rank at a place of the mesh.
    """
    places = [
        range(size) if is_sharded(placements[axis]) else (coordinate[axis],)
        for axis, size in enumerate(axis_sizes)
    ]
    holders = [
        Holder(global_rank_at(place), layout.get_rank_range(axis_sizes, placements, place))
        for place in product(*places)
    ]
    return tuple(sorted(holders, key=lambda each: (each.held.start, each.held.end, each.rank)))


def is_matrix(shape: Sequence[int]) -> bool:
    """Whether a tensor has at least two dims: what owners compute by default."""
    return len(shape) >= 2


def orthogonalization_cost(shape: Sequence[int]) -> int:
    """Estimate the work of orthogonalising a tensor seen as rows (dim 0) by columns (the rest).

    Units:
        Multiplications, up to one factor for all tensors.
    """
    numel = prod(shape)
    columns = prod(shape[1:])
    return numel * (min(shape[0], columns) * ORTHOGONALIZATION_STEPS + 1)


@dataclass(frozen=True, slots=True)
class Assignment:
    """Who owns each tensor, and how much each owner has to do in all.

    Attributes:
        owners: global rank of the owner by tensor index, in index order.
        load: cost by global rank, that of earlier assignments included.
    """

    owners: Mapping[int, int]
    load: Mapping[int, int]


def assign_owners(
    layout: GlobalLayout,
    holders: Sequence[Holder],
    indices: Sequence[int],
    *,
    cost: Callable[[Sequence[int]], int] = orthogonalization_cost,
    load: Mapping[int, int] | None = None,
) -> Assignment:
    """Choose an owner for each tensor among its holders, so that the work is even.

    Tensors with one holder go first, since they have no choice and their cost counts; then the
    others by falling cost, each to its least loaded holder, the first in buffer order of several.
    A function of its arguments alone, so that every rank finds the same owners.

    Args:
        layout: of the buffer.
        holders: in buffer order, as `list_holders` gives them.
        indices: the tensors that need an owner.
        cost: work of one tensor by its shape.
        load: work that ranks have already, from the assignments of other buffers.

    Raises:
        UnsupportedError: a tensor that no rank holds, having no elements.
    """
    load_of = dict(load or {})
    owners: dict[int, int] = {}
    candidates = {index: _holders_of(layout, holders, index) for index in indices}
    costs = {index: cost(layout.tensor_shapes[index]) for index in indices}
    for index in sorted(indices, key=lambda each: (len(candidates[each]) > 1, -costs[each], each)):
        owner = min(candidates[index], key=lambda rank: load_of.get(rank, 0))
        owners[index] = owner
        load_of[owner] = load_of.get(owner, 0) + costs[index]
    return Assignment({index: owners[index] for index in sorted(owners)}, load_of)


def _holders_of(layout: GlobalLayout, holders: Sequence[Holder], index: int) -> list[int]:
    tensor_range = layout.get_tensor_range(index)
    ranks = [each.rank for each in holders if intersect_ranges(tensor_range, each.held).numel]
    if not ranks:
        msg = (
            f"a tensor with an owner must have elements, got tensor {index} of shape "
            f"{layout.tensor_shapes[index]}; leave it to the element-wise optimizer"
        )
        raise UnsupportedError(msg)
    return ranks


@dataclass(frozen=True, slots=True)
class Part:
    """Elements of one tensor that one rank holds.

    Attributes:
        index: the tensor.
        start: first element, from the tensor's own start.
        numel: how many; never 0.
    """

    index: int
    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class Parcel:
    """What one rank sends to another in one message: parts in index order, one after the other.

    Attributes:
        peer: global rank of the other side.
        parts: what is in it.
    """

    peer: int
    parts: tuple[Part, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole message."""
        return sum(part.numel for part in self.parts)


@dataclass(frozen=True, slots=True)
class OwnerPlan:
    """What one rank does in a gather to owners; a scatter is the same with directions reversed.

    Attributes:
        shapes: of the tensors that take part, by index.
        held: this rank's part of each tensor of which it has one, by index.
        owned: indices of the tensors that this rank owns.
        to_owners: what it sends when gathering, in buffer order of the peers.
        from_holders: what it receives when gathering, in buffer order of the peers.
    """

    shapes: Mapping[int, tuple[int, ...]]
    held: Mapping[int, Part]
    owned: tuple[int, ...]
    to_owners: tuple[Parcel, ...]
    from_holders: tuple[Parcel, ...]


def plan_owner(
    layout: GlobalLayout, holders: Sequence[Holder], owners: Mapping[int, int], rank: int
) -> OwnerPlan:
    """List what `rank` sends, receives and keeps when each tensor goes to its owner.

    Args:
        layout: of the buffer.
        holders: in buffer order.
        owners: global rank of the owner by tensor index; other tensors take no part.
        rank: global rank, one of the holders.

    Raises:
        ConfigError: an owner that holds nothing of its tensor.
    """
    for index, owner in owners.items():
        _check_owner(layout, holders, index, owner)
    indices = sorted(owners)
    held_by = {each.rank: each.held for each in holders}
    peers = [each.rank for each in holders if each.rank != rank]
    owned = tuple(index for index in indices if owners[index] == rank)
    to_owners = (
        Parcel(peer, _parts(layout, held_by[rank], [i for i in indices if owners[i] == peer]))
        for peer in peers
    )
    from_holders = (Parcel(peer, _parts(layout, held_by[peer], owned)) for peer in peers)
    return OwnerPlan(
        shapes={index: layout.tensor_shapes[index] for index in indices},
        held={part.index: part for part in _parts(layout, held_by[rank], indices)},
        owned=owned,
        to_owners=tuple(parcel for parcel in to_owners if parcel.parts),
        from_holders=tuple(parcel for parcel in from_holders if parcel.parts),
    )


def _check_owner(layout: GlobalLayout, holders: Sequence[Holder], index: int, owner: int) -> None:
    candidates = _holders_of(layout, holders, index)
    if owner not in candidates:
        msg = (
            f"the owner of tensor {index} must be one of the ranks that hold part of it, "
            f"{candidates}, got {owner}; name one of them"
        )
        raise ConfigError(msg)


def _parts(layout: GlobalLayout, held: Range, indices: Sequence[int]) -> tuple[Part, ...]:
    """List which elements of the given tensors lie in a range; tensors without any are absent."""
    parts = []
    for index in indices:
        tensor_range = layout.get_tensor_range(index)
        shared = intersect_ranges(tensor_range, held)
        if shared.numel:
            parts.append(Part(index, shared.start - tensor_range.start, shared.numel))
    return tuple(parts)
