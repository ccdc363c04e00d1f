"""The steps of a redistribution as collectives on the current stream.

Nothing here knows of parameters or of tensors inside a buffer: only of ranges of a layout.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from fsdp_core import device as accelerator
from fsdp_core.errors import ConfigError
from fsdp_core.layout import GlobalLayout, Range
from fsdp_core.placement import Step, Transition, plan_redistribution
from fsdp_core.torch_private import all_gather_single, preserve_version, reduce_scatter_single


@dataclass(frozen=True, slots=True)
class MeshAxes:
    """What collectives need of a mesh, looked up once.

    Attributes:
        mesh: the mesh.
        sizes: of its axes, outermost first.
        coordinate: this rank's place on each axis.
        process_groups: one for each axis.
        device: this rank's device.
    """

    mesh: DeviceMesh
    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]
    process_groups: tuple[dist.ProcessGroup, ...]
    device: torch.device

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "MeshAxes":
        """Look a mesh up.

        Raises:
            ConfigError: this rank is not part of the mesh, or its ranks do not rise on an axis.
        """
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            msg = f"this rank must be part of the mesh, got {mesh}; shard on its own ranks only"
            raise ConfigError(msg)
        process_groups = tuple(mesh.get_group(axis) for axis in range(mesh.ndim))
        if [dist.get_rank(each) for each in process_groups] != list(coordinate):
            msg = f"ranks must rise along each axis of the mesh, got {mesh}; use init_device_mesh"
            raise ConfigError(msg)
        return cls(
            mesh=mesh,
            sizes=tuple(mesh.shape),
            coordinate=tuple(coordinate),
            process_groups=process_groups,
            device=accelerator.default_device(mesh.device_type),
        )


@dataclass(frozen=True, slots=True)
class Span:
    """A flat tensor and the range of the layout that it holds.

    Attributes:
        flat: the elements [numel of `held`].
        held: where they lie in the whole buffer.
    """

    flat: Tensor
    held: Range

    def part(self, held: Range) -> "Span":
        """Return the span of a range inside this one, sharing memory."""
        if held is self.held or held == self.held:
            return self
        return Span(self.flat.narrow(0, held.start - self.held.start, held.numel), held)

    def copy_from(self, source: "Span") -> None:
        """Copy a span of the same range, unless both are the same memory already."""
        assert self.held.numel == source.held.numel
        if self.flat is not source.flat and self.flat.data_ptr() != source.flat.data_ptr():
            self.flat.copy_(source.flat)


@dataclass(frozen=True, slots=True)
class Stage:
    """One `Step` on one layout and mesh.

    Attributes:
        step: the change.
        held: this rank's range after the step.
        pieces: the range of each rank of the axis, on the side where the axis is sharded; they
            follow each other, and together are this rank's range on the other side.
        has_equal_pieces: all pieces have one size, so that one collective does it.
        collective: how ranks communicate; None if they need not.
        divisor: what the result is divided by, for an average.
    """

    step: Step
    held: Range
    pieces: tuple[Range, ...]
    has_equal_pieces: bool
    collective: "Collective | None"
    divisor: int


def plan_stages(
    layout: GlobalLayout, axes: MeshAxes, source: Sequence[Placement], target: Sequence[Placement]
) -> tuple[Stage, ...]:
    """List what this rank does to bring a buffer from `source` to `target` placements.

    Raises:
        UnsupportedError: see `plan_redistribution`.
    """
    stages = []
    before = tuple(source)
    for step in plan_redistribution(source, target):
        sharded_side = before if step.transition is Transition.ALL_GATHER else step.placements
        places = [
            (*axes.coordinate[: step.axis], rank, *axes.coordinate[step.axis + 1 :])
            for rank in range(axes.sizes[step.axis])
        ]
        held = layout.get_rank_range(axes.sizes, step.placements, axes.coordinate)
        pieces = [layout.get_rank_range(axes.sizes, sharded_side, place) for place in places]
        stages.append(
            Stage(
                step=step,
                held=held,
                pieces=tuple(pieces),
                has_equal_pieces=all(piece.numel == pieces[0].numel for piece in pieces),
                collective=_COLLECTIVES.get(step.transition),
                divisor=axes.sizes[step.axis] if step.average else 1,
            )
        )
        before = step.placements
    return tuple(stages)


def run_stages(
    stages: Sequence[Stage], axes: MeshAxes, source: Span, out: Span, own: Span | None = None
) -> None:
    """Move the elements of `source` through all stages into `out`.

    Those of another dtype are first converted into `own`, the part of `out` that is of this rank.


    While pieces shrink, the last shrinking stage writes into `out` and earlier ones into a
    temporary that lives on the current stream alone. While they grow, each stage writes into the
    part of `out` that it covers, so its input is already in place there.
    """
    data = source
    with preserve_version(out.flat):
        if own is not None:
            own.flat.copy_(source.flat)
            data = own
        for stage in stages:
            if stage.collective is not None:
                target = _target(stage, out)
                stage.collective(stage, axes.process_groups[stage.step.axis], data, target)
                data = target
            elif stage.step.transition is Transition.SLICE:
                data = data.part(stage.held)
            if stage.divisor > 1:
                data.flat.div_(stage.divisor)
        if data is not out:
            out.copy_from(data)


def _target(stage: Stage, out: Span) -> Span:
    if stage.held == out.held:
        return out
    if out.held.contains(stage.held):
        return out.part(stage.held)
    flat = accelerator.allocate(stage.held.numel, out.flat.dtype, out.flat.device)
    return Span(flat, stage.held)


def _all_gather(stage: Stage, process_group: dist.ProcessGroup, data: Span, target: Span) -> None:
    """Put all pieces of one axis into `target`; this rank's may be in place there already."""
    if stage.has_equal_pieces:
        all_gather_single(target.flat, data.flat, process_group)
        return
    target.part(data.held).copy_from(data)
    for rank, piece in enumerate(stage.pieces):
        if piece.numel:
            dist.broadcast(target.part(piece).flat, group_src=rank, group=process_group)


def _reduce_scatter(
    stage: Stage, process_group: dist.ProcessGroup, data: Span, target: Span
) -> None:
    """Sum over one axis and keep this rank's piece; unequal pieces are summed in place first."""
    if stage.has_equal_pieces:
        reduce_scatter_single(target.flat, data.flat, process_group)
        return
    for rank, piece in enumerate(stage.pieces):
        if piece.numel:
            dist.reduce(data.part(piece).flat, group_dst=rank, group=process_group)
    target.copy_from(data.part(stage.held))


def _all_reduce(_stage: Stage, process_group: dist.ProcessGroup, data: Span, target: Span) -> None:
    """Sum over one axis into `target`, leaving `data` intact unless it is the same memory."""
    target.copy_from(data)
    dist.all_reduce(target.flat, group=process_group)


Collective = Callable[[Stage, dist.ProcessGroup, Span, Span], None]
"""Moves the elements of a stage from one span to another."""

_COLLECTIVES: dict[Transition, Collective] = {
    Transition.ALL_GATHER: _all_gather,
    Transition.REDUCE_SCATTER: _reduce_scatter,
    Transition.ALL_REDUCE: _all_reduce,
}
