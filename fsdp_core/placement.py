"""Placements: how a flat buffer lies on each axis of a mesh, and the steps between two of them.

Sharded axes are always a suffix of the mesh's axes, so that each rank's piece is one contiguous
range (see `GlobalLayout.get_rank_range` for the order of the pieces).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from math import lcm

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_core.errors import ConfigError, ConfigTypeError, UnsupportedError


def is_positive_int(value: object) -> bool:
    """Whether `value` is an int above 0; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


class RowAtomic(Shard):
    """Sharded on dim 0 of each tensor; a row is never split."""

    def __init__(self) -> None:
        super().__init__(0)

    def __eq__(self, other: object) -> bool:
        """Equal to another `RowAtomic` only: a plain `Shard` promises other boundaries."""
        return type(other) is RowAtomic

    def __hash__(self) -> int:
        """Hash by kind."""
        return hash("RowAtomic")

    def __repr__(self) -> str:
        """Return the call that makes it."""
        return "RowAtomic()"


class BlockAtomic(Shard):
    """Sharded on dim 0 of each tensor; a block of `block_size` rows is never split."""

    def __init__(self, block_size: int) -> None:
        """Check and keep the block size.

        Raises:
            ConfigError: `block_size` is not a positive int.
        """
        if not is_positive_int(block_size):
            msg = (
                f"BlockAtomic needs a positive number of rows per block, got {block_size!r}; pass 1 "
                f"or more"
            )
            raise ConfigError(msg)
        super().__init__(0)
        self.block_size = block_size

    def __eq__(self, other: object) -> bool:
        """Equal to a `BlockAtomic` with the same block size."""
        return type(other) is BlockAtomic and other.block_size == self.block_size

    def __hash__(self) -> int:
        """Hash by kind and block size."""
        return hash(("BlockAtomic", self.block_size))

    def __repr__(self) -> str:
        """Return the call that makes it."""
        return f"BlockAtomic({self.block_size})"


class TensorAtomic(Shard):
    """Whole tensors, each on the rank that owns it; 1-D meshes only."""

    def __init__(self) -> None:
        super().__init__(0)

    def __eq__(self, other: object) -> bool:
        """Equal to another `TensorAtomic` only."""
        return type(other) is TensorAtomic

    def __hash__(self) -> int:
        """Hash by kind."""
        return hash("TensorAtomic")

    def __repr__(self) -> str:
        """Return the call that makes it."""
        return "TensorAtomic()"


@dataclass(frozen=True)
class Placements:
    """Where a unit's parameters, gradients and optimizer state live on its data-parallel axes.

    Attributes:
        dp_axes: mesh axes by index (negative ones count from the end) or name, in mesh order.
        parameter: one placement per axis, outermost first, of the weights at rest.
        gradient: the same, of gradients between microbatches.
        optimizer: the same, of main weights, optimizer state and the gradients it gets.
    """

    dp_axes: Sequence[int | str]
    parameter: Sequence[Placement]
    gradient: Sequence[Placement]
    optimizer: Sequence[Placement]

    def __post_init__(self) -> None:
        """Check the three lists against the axes, and freeze them as tuples.

        Raises:
            ConfigError: a list has another length than `dp_axes`, sharded axes that are not the
                innermost ones, or a role that cannot be brought to another one's placement.
            ConfigTypeError: a list holds something other than Replicate, Partial and Shard.
            UnsupportedError: a placement that is not built.
        """
        object.__setattr__(self, "dp_axes", tuple(self.dp_axes))
        for role in ("parameter", "gradient", "optimizer"):
            placements = tuple(getattr(self, role))
            if len(placements) != len(self.dp_axes):
                msg = (
                    f"Placements.{role} must have one placement for each of the "
                    f"{len(self.dp_axes)} axes in dp_axes, got {len(placements)}; pass as many"
                )
                raise ConfigError(msg)
            check_placements(placements, role=f"Placements.{role}")
            object.__setattr__(self, role, placements)
        for roles in zip(self.parameter, self.gradient, self.optimizer, strict=True):
            _check_roles(*specialize(roles))

    @property
    def kinds(self) -> tuple[Placement, ...]:
        """All placements of the three roles."""
        return (*self.parameter, *self.gradient, *self.optimizer)

    @property
    def block_size(self) -> int:
        """Rows that stay together whatever axis is sharded: whole blocks of every `BlockAtomic`."""
        return lcm(*(kind.block_size for kind in self.kinds if isinstance(kind, BlockAtomic)))

    def check_mesh(self, ndim: int, axis_names: Sequence[str] | None) -> None:
        """Check that `dp_axes` are all the axes of a mesh, in its order.

        Raises:
            ConfigError: an axis that the mesh lacks, a repeated axis, or another order.
            UnsupportedError: not all axes of the mesh are named.
        """
        axes = [_resolve_axis(axis, ndim, axis_names) for axis in self.dp_axes]
        if any(left >= right for left, right in pairwise(axes)):
            msg = (
                f"dp_axes must name each mesh axis once and in mesh order, got {self.dp_axes}; order "
                f"them as the mesh does"
            )
            raise ConfigError(msg)
        if len(axes) != ndim:
            msg = (
                f"dp_axes must name all {ndim} axes of the mesh, got {self.dp_axes}; pass the "
                f"sub-mesh of the data-parallel axes"
            )
            raise UnsupportedError(msg)


def _check_roles(parameter: Placement, gradient: Placement, optimizer: Placement) -> None:
    """Check that on one axis gradients can reach the optimizer, and its weights the parameters.

    Raises:
        ConfigError: partial weights, a gradient that is a partial sum, or something sharded that
            the optimizer does not shard alike.
    """
    for role, weights in (("parameter", parameter), ("optimizer", optimizer)):
        if isinstance(weights, Partial):
            msg = (
                f"Placements.{role} must be Replicate or Shard, got {weights!r}; use one of "
                f"these, and Partial for gradients alone"
            )
            raise ConfigError(msg)
    if isinstance(gradient, Partial) and gradient.reduce_op != "avg":
        msg = (
            f"Placements.gradient must be a mean where it is partial, got {gradient!r}; use "
            f'Partial("avg")'
        )
        raise ConfigError(msg)
    for role, held in (("parameter", parameter), ("gradient", gradient)):
        if is_sharded(held) and held != optimizer:
            msg = (
                f"Placements.optimizer must shard an axis as Placements.{role} does, got "
                f"{optimizer!r} and {held!r}; use {held!r} for both"
            )
            raise ConfigError(msg)


def _resolve_axis(axis: int | str, ndim: int, axis_names: Sequence[str] | None) -> int:
    if isinstance(axis, str) and axis in (axis_names or ()):
        return list(axis_names or ()).index(axis)
    if isinstance(axis, int) and not isinstance(axis, bool) and -ndim <= axis < ndim:
        return axis % ndim
    msg = (
        f"dp_axes must name axes of the mesh ({ndim} axes, names {axis_names}), got {axis!r}; name "
        f"these"
    )
    raise ConfigError(msg)


def is_sharded(placement: Placement) -> bool:
    """Whether a placement divides the buffer (any kind of Shard)."""
    return isinstance(placement, Shard)


def copies_of(tensor: Tensor) -> int:
    """Return how many ranks hold each element of a tensor; all of them hold one that is no DTensor."""
    if not isinstance(tensor, DTensor):
        return dist.get_world_size()
    axes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in axes if isinstance(placement, Replicate))


def check_placements(placements: Sequence[Placement], *, role: str = "placements") -> None:
    """Check one list of placements, outermost axis first.

    Raises:
        ConfigTypeError: something other than Replicate, Partial and Shard.
        ConfigError: the sharded axes are not the innermost ones.
        UnsupportedError: a sharding dim other than 0, a reduction other than sum and avg, or
            TensorAtomic on more than one axis.
    """
    for placement in placements:
        _check_placement(placement, role)
    sharded = [is_sharded(placement) for placement in placements]
    if sharded != sorted(sharded):
        msg = (
            f"{role} must shard the innermost axes only, so that each rank's piece is one range, "
            f"got {tuple(placements)}; put Replicate and Partial before it"
        )
        raise ConfigError(msg)
    if len(placements) > 1 and any(isinstance(each, TensorAtomic) for each in placements):
        msg = (
            f"{role} may hold TensorAtomic on a 1-D mesh only, got {tuple(placements)}; "
            f"use RowAtomic"
        )
        raise UnsupportedError(msg)


def _check_placement(placement: Placement, role: str) -> None:
    if not isinstance(placement, (Replicate, Partial, Shard)):
        msg = f"{role} must be Replicate, Partial or Shard, got {placement!r}; pass one of these"
        raise ConfigTypeError(msg)
    if isinstance(placement, Shard) and placement.dim != 0:
        msg = f"{role} must shard dim 0, got {placement!r}; use Shard(0)"
        raise UnsupportedError(msg)
    if isinstance(placement, Partial) and placement.reduce_op not in ("sum", "avg"):
        msg = f"{role} must reduce by sum or avg, got {placement!r}; use Partial('avg')"
        raise UnsupportedError(msg)


def specialize(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Replace each plain `Shard(0)` by `RowAtomic`; explicit kinds pass through.

    A tuple without plain ones comes back as itself, which makes later comparisons cheap.
    """
    if isinstance(placements, tuple) and Shard not in map(type, placements):
        return placements
    return tuple(RowAtomic() if type(each) is Shard else each for each in placements)


class Transition(Enum):
    """What changing one axis of a buffer's placements takes."""

    ALL_GATHER = "shard to replicate"
    REDUCE_SCATTER = "partial to shard"
    ALL_REDUCE = "partial to replicate"
    SLICE = "replicate to shard, without communication"
    RELABEL = "replicate to partial avg, without communication"


@dataclass(frozen=True)
class Step:
    """One axis that changes.

    Attributes:
        transition: what is done.
        axis: the mesh axis.
        placements: of the buffer after the step.
        average: the reduction ends with a division by the axis' size.
    """

    transition: Transition
    axis: int
    placements: tuple[Placement, ...]
    average: bool = False


def plan_redistribution(
    source: Sequence[Placement], target: Sequence[Placement]
) -> tuple[Step, ...]:
    """List the steps that turn `source` placements into `target`, each changing one axis.

    Axes are reduced and sliced from the innermost to the outermost, then gathered from the
    outermost to the innermost. So the sharded axes stay a suffix after each step, each piece
    stays one range, and reductions come before gathers make the data larger.

    Raises:
        UnsupportedError: a change that has no meaning here (shard to partial, sum to avg,
            replicate to sum, one kind of shard to another).
    """
    assert len(source) == len(target)
    current = list(source)
    steps = []
    gathers = []
    for axis in reversed(range(len(current))):
        if source[axis] == target[axis]:
            continue
        transition = _transition(source[axis], target[axis])
        if transition is Transition.ALL_GATHER:
            gathers.append(axis)
            continue
        before = source[axis]
        average = isinstance(before, Partial) and before.reduce_op == "avg"
        current[axis] = target[axis]
        steps.append(Step(transition, axis, tuple(current), average))
    for axis in reversed(gathers):
        current[axis] = target[axis]
        steps.append(Step(Transition.ALL_GATHER, axis, tuple(current)))
    return tuple(steps)


def _transition(source: Placement, target: Placement) -> Transition:
    match source, target:
        case Shard(), Replicate():
            return Transition.ALL_GATHER
        case Partial(), Shard():
            return Transition.REDUCE_SCATTER
        case Partial(), Replicate():
            return Transition.ALL_REDUCE
        case Replicate(), Shard():
            return Transition.SLICE
        case Replicate(), Partial(reduce_op="avg"):
            return Transition.RELABEL
        case _:
            pass
    msg = (
        f"a buffer must go to placements that a collective makes, got {source!r} to {target!r}; "
        f"choose others"
    )
    raise UnsupportedError(msg)
