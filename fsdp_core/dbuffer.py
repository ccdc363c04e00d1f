"""DBuffer: a flat buffer spread over a mesh; changes of its placements become collectives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_core import device as accelerator
from fsdp_core.collectives import MeshAxes, Span, Stage, plan_stages, run_stages
from fsdp_core.errors import ConfigError, UnsupportedError
from fsdp_core.layout import GlobalLayout, Range, intersect_ranges, row_numel
from fsdp_core.layout_builder import build_row_atomic_layout
from fsdp_core.placement import check_placements, is_sharded, specialize
from fsdp_core.torch_private import preserve_version
from fsdp_core.uneven import Rows


@dataclass(frozen=True, slots=True)
class Chunk:
    """The box of a tensor that one rank holds, as checkpoints describe it.

    Attributes:
        offsets: of the first element, one for each dim.
        sizes: one for each dim; the first is 0 where the rank holds nothing.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class DBuffer:
    """A flat buffer of tensors, of which each rank of a mesh holds one range.

    The data is `flat`, this rank's range of the layout. Collectives are issued on the current
    stream and end there: the host does not wait for them (gloo's does, having no streams).
    What a buffer is given by another one (`cast`, `redistribute`) does not move autograd's version
    counters, since refilling is no change; what comes from outside (`copy_from`) does.

    Attributes:
        flat: this rank's elements [numel of `held`].
        axes: the mesh with its groups.
        placements: one for each mesh axis, outermost first.
        layout: where tensors and shards lie.
        held: this rank's range of the layout.
        span: `flat` and `held` as collectives take them.
    """

    def __init__(
        self,
        flat: Tensor,
        axes: MeshAxes,
        placements: tuple[Placement, ...],
        layout: GlobalLayout,
    ) -> None:
        self.flat = flat
        self.axes = axes
        self.placements = placements
        self.layout = layout
        self.held = layout.get_rank_range(axes.sizes, placements, axes.coordinate)
        assert flat.shape == (self.held.numel,)
        self.span = Span(flat, self.held)
        self._views: dict[int, Tensor] = {}
        self._stages: dict[tuple[Placement, ...], tuple[Stage, ...]] = {}

    # -- construction ------------------------------------------------------------------------

    @classmethod
    def empty(
        cls,
        mesh: DeviceMesh | MeshAxes,
        placements: Sequence[Placement],
        layout: GlobalLayout,
        dtype: torch.dtype,
    ) -> "DBuffer":
        """Allocate an uninitialised buffer on the mesh's device, from the current stream's pool.

        Args:
            mesh: the mesh, or another buffer's `axes`, which saves looking it up again.
            placements: one for each mesh axis; a plain `Shard(0)` means `RowAtomic`.
            layout: for as many shards as the mesh has ranks.
            dtype: of the elements.

        Raises:
            ConfigError: see `check_placements`; placements or layout do not fit the mesh.
        """
        axes, placements = _check_spread(mesh, placements)
        held = layout.get_rank_range(axes.sizes, placements, axes.coordinate)
        flat = accelerator.allocate(held.numel, dtype, axes.device)
        return cls(flat, axes, placements, layout)

    @classmethod
    def from_local(
        cls,
        local: Tensor,
        mesh: DeviceMesh | MeshAxes,
        placements: Sequence[Placement],
        layout: GlobalLayout,
    ) -> "DBuffer":
        """Wrap this rank's elements without copying.

        Raises:
            ConfigError: `local` is not flat, contiguous and as long as this rank's range.
        """
        axes, placements = _check_spread(mesh, placements)
        held = layout.get_rank_range(axes.sizes, placements, axes.coordinate)
        if local.shape != (held.numel,) or not local.is_contiguous():
            msg = (
                f"local must be contiguous and of shape ({held.numel},), got shape "
                f"{tuple(local.shape)} with strides {local.stride()}; pass this rank's piece, flat"
            )
            raise ConfigError(msg)
        return cls(local.detach(), axes, placements, layout)

    @classmethod
    def distribute_tensors(
        cls,
        tensors: Sequence[Tensor],
        mesh: DeviceMesh | MeshAxes,
        placements: Sequence[Placement],
        layout: GlobalLayout | None = None,
    ) -> "DBuffer":
        """Copy this rank's part of each tensor into a new buffer, without communication.

        A tensor on the meta device contributes its shape; its elements stay uninitialised.

        Args:
            tensors: whole tensors, the same on every rank, on any device.
            mesh: as in `empty`.
            placements: as in `empty`.
            layout: None packs by rows.

        Raises:
            ConfigError: no tensor, several dtypes, or a layout of other shapes.
        """
        if not tensors:
            msg = "a buffer needs at least one tensor, got none; pass one, which may be empty"
            raise ConfigError(msg)
        dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors))
        if len(dtypes) > 1:
            msg = (
                f"the tensors of one buffer must have one dtype, got {dtypes}; use one buffer each"
            )
            raise ConfigError(msg)
        axes = mesh if isinstance(mesh, MeshAxes) else MeshAxes.of(mesh)
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        if layout is None:
            layout = build_row_atomic_layout(shapes, axes.mesh.size())
        if layout.tensor_shapes != shapes:
            msg = (
                f"the layout must be built for shapes {shapes}, got {layout.tensor_shapes}; build it "
                f"from these tensors, or leave it out"
            )
            raise ConfigError(msg)
        buffer = cls.empty(axes, placements, layout, dtypes[0])
        for index, tensor in enumerate(tensors):
            buffer.copy_from(index, tensor)
        return buffer

    # -- tensors in the buffer ---------------------------------------------------------------

    def get_tensor_view(self, index: int) -> Tensor:
        """Return this rank's rows of a tensor, sharing the buffer's storage.

        The view stays valid when the storage is released and reallocated.

        Shapes:
            result: [rows held, *trailing dims]; a tensor of which this rank holds nothing gives
            a fresh empty one, [0, *trailing dims].

        Raises:
            UnsupportedError: this rank's range does not hold whole rows of the tensor.
        """
        view = self._views.get(index)
        if view is None:
            view = self._views[index] = self._make_tensor_view(index)
        return view

    def _make_tensor_view(self, index: int) -> Tensor:
        shape = self.layout.tensor_shapes[index]
        part = intersect_ranges(self.layout.get_tensor_range(index), self.held)
        with torch.inference_mode(mode=False), torch.no_grad():
            if part.numel == 0:
                shape = (0, *shape[1:]) if shape else shape
                return torch.empty(shape, dtype=self.flat.dtype, device=self.flat.device)
            self._row_offset(index, part)
            rows = part.numel // row_numel(shape)
            return self.span.part(part).flat.view(rows, *shape[1:])

    def _row_offset(self, index: int, part: Range) -> int:
        """Return the first row of a tensor's part, which must be whole rows."""
        row = row_numel(self.layout.tensor_shapes[index])
        start = part.start - self.layout.get_tensor_range(index).start
        if start % row or part.numel % row:
            msg = (
                f"a view of tensor {index} needs whole rows of {row} elements, got elements "
                f"{start} to {start + part.numel}; build the layout by rows"
            )
            raise UnsupportedError(msg)
        return start // row

    def get_tensor_chunk(self, index: int) -> Chunk:
        """Return which box of a tensor this rank holds.

        Why: DTensor's own arithmetic assumes even shards and would describe other rows than those
        really held.
        """
        shape = self.layout.tensor_shapes[index]
        tensor_range = self.layout.get_tensor_range(index)
        part = intersect_ranges(tensor_range, self.held)
        if part.numel == 0:
            return Chunk(_empty_offsets(tensor_range, part, shape), (0, *shape[1:]))
        first = self._row_offset(index, part)
        rows = part.numel // row_numel(shape)
        return Chunk((first,) + (0,) * (len(shape) - 1), (rows, *shape[1:]))

    def get_rows(self, index: int, fqn: str = "") -> Rows:
        """Return this rank's rows of a tensor, and where they belong.

        The internal kinds of Shard become plain `Shard(0)`, so that nothing private leaks.

        Args:
            index: of the tensor.
            fqn: what messages call it.
        """
        return Rows(
            self.get_tensor_view(index),
            self.axes,
            tuple(Shard(0) if is_sharded(each) else each for each in self.placements),
            self.layout.tensor_shapes[index],
            self.get_tensor_chunk(index).offsets,
            fqn or f"tensor {index}",
        )

    def get_dtensor(self, index: int) -> DTensor:
        """Return this rank's rows of a tensor as a DTensor of its global shape."""
        return self.get_rows(index).as_dtensor()

    def copy_from(self, index: int, tensor: Tensor) -> None:
        """Copy this rank's part of a whole tensor into the buffer, on the current stream.

        Shapes:
            tensor: the global shape of tensor `index`; on the meta device nothing is copied.

        Raises:
            ConfigError: another shape.
        """
        shape = self.layout.tensor_shapes[index]
        if tuple(tensor.shape) != shape:
            msg = (
                f"tensor {index} of the buffer must have shape {shape}, got {tuple(tensor.shape)}; "
                f"pass the whole tensor"
            )
            raise ConfigError(msg)
        tensor_range = self.layout.get_tensor_range(index)
        part = intersect_ranges(tensor_range, self.held)
        if tensor.is_meta or part.numel == 0:
            return
        source = tensor.detach().contiguous().view(-1)
        source = source.narrow(0, part.start - tensor_range.start, part.numel)
        with torch.no_grad():
            self.span.part(part).flat.copy_(source)

    # -- the same elements, elsewhere --------------------------------------------------------

    def view(self, placements: Sequence[Placement]) -> "DBuffer":
        """Return the part of this buffer that other placements keep, sharing storage.

        Also relabels: a range that is the same under other placements keeps its elements, and
        the caller says what they mean now.

        Raises:
            ConfigError: the other range is not inside this rank's.
        """
        placements = specialize(placements)
        if placements == self.placements:
            return self
        axes, placements = _check_spread(self.axes, placements)
        held = self.layout.get_rank_range(axes.sizes, placements, axes.coordinate)
        if not self.held.contains(held):
            msg = (
                f"a view must lie inside this rank's range {self.held}, got {held} for "
                f"{placements}; redistribute instead"
            )
            raise ConfigError(msg)
        flat = self.span.part(held).flat
        return DBuffer(flat, axes, placements, self.layout)

    def cast(self, dtype: torch.dtype, out: "DBuffer | None" = None) -> "DBuffer":
        """Convert the elements on the current stream; without need and without `out`, self.

        Raises:
            ConfigError: `out` differs in mesh, placements, layout, dtype or device.
        """
        if out is None:
            if dtype == self.flat.dtype:
                return self
            out = DBuffer.empty(self.axes, self.placements, self.layout, dtype)
        else:
            self._check_out(out, self.placements, dtype)
        with preserve_version(out.flat):
            out.flat.copy_(self.flat)
        return out

    def redistribute(
        self, placements: Sequence[Placement], out: "DBuffer | None" = None
    ) -> "DBuffer":
        """Change placements, by collectives on the current stream where they are needed.

        Each changed axis is one collective: all-gather (shard to replicate), reduce-scatter
        (partial to shard) or all-reduce (partial to replicate); see `plan_redistribution` for
        their order. Unequal pieces take one broadcast or reduce for each piece that is not empty.
        An average is a sum, divided on each rank by the axis' size after each reduction: the one
        rule that gives the same bits on every backend, exact where the size is a power of two.

        Args:
            placements: of the result.
            out: where to put it; may be a `view` of this buffer, or this one of it. Its version
                counters are preserved.

        Ordering:
            Requires that the current stream is behind the writes of this buffer and behind all
            uses of `out`. The result is complete on the current stream.

        Returns:
            `out`, or a new buffer; without `out` and without communication one that shares this
            buffer's storage (itself, if nothing changes). A reduction of unequal pieces leaves
            this buffer's elements undefined; otherwise they stay.

        Raises:
            UnsupportedError: no collective makes this change.
            ConfigError: `out` differs in mesh, placements, layout, dtype or device.
        """
        target = specialize(placements)
        if out is not None:
            self._check_out(out, target, self.flat.dtype)
        stages = self._plan(target)
        if out is None:
            if all(stage.collective is None for stage in stages):
                return self.view(target)
            out = DBuffer.empty(self.axes, target, self.layout, self.flat.dtype)
        run_stages(stages, self.axes, self.span, out.span)
        return out

    def redistribution(self, out: "DBuffer") -> Callable[[], None]:
        """Return `redistribute` into `out`, checked and planned once, to be called any number of times.

        Elements of another dtype than those of `out` are converted on the way, into the part of
        `out` that this rank has before any communication.

        Raises:
            UnsupportedError: see `redistribute`.
            ConfigError: `out` differs in mesh, layout or device; or in dtype, and does not contain
                this rank's range.
        """
        self._check_out(out, out.placements, out.flat.dtype)
        stages = self._plan(out.placements)
        casts = self.flat.dtype != out.flat.dtype
        own = out.view(self.placements).span if casts else None
        return partial(run_stages, stages, self.axes, self.span, out.span, own)

    def _plan(self, placements: tuple[Placement, ...]) -> tuple[Stage, ...]:
        """Return the stages of a change, planned once."""
        stages = self._stages.get(placements)
        if stages is None:
            check_placements(placements)
            stages = plan_stages(self.layout, self.axes, self.placements, placements)
            self._stages[placements] = stages
        return stages

    def _check_out(
        self, out: "DBuffer", placements: tuple[Placement, ...], dtype: torch.dtype
    ) -> None:
        """Refuse an `out` that is not what the result would be."""
        if out.placements != placements:
            expected, got = f"placements {placements}", f"{out.placements}"
        elif out.flat.dtype != dtype:
            expected, got = f"dtype {dtype}", f"{out.flat.dtype}"
        elif out.flat.device != self.flat.device:
            expected, got = f"device {self.flat.device}", f"{out.flat.device}"
        elif out.layout is not self.layout and out.layout != self.layout:
            expected, got = "the layout of this buffer", "another one"
        elif out.axes is not self.axes and out.axes.mesh != self.axes.mesh:
            expected, got = f"the mesh {self.axes.mesh}", f"{out.axes.mesh}"
        else:
            return
        msg = f"out must have {expected}, got {got}; allocate it so, or leave it out"
        raise ConfigError(msg)

    # -- storage -----------------------------------------------------------------------------

    def release_storage(self) -> None:
        """Give the memory back to its pool; views stay valid and empty.

        Ordering:
            Requires that the current stream is the one the memory was allocated on, and behind
            every reader.
        """
        accelerator.release(self.flat)

    def reallocate_storage(self) -> None:
        """Take memory from the current stream's pool again; contents are undefined."""
        accelerator.reallocate(self.flat)

    @property
    def is_released(self) -> bool:
        """Whether the memory was given back."""
        return accelerator.is_released(self.flat)


def _check_spread(
    mesh: DeviceMesh | MeshAxes, placements: Sequence[Placement]
) -> tuple[MeshAxes, tuple[Placement, ...]]:
    """Check that placements fit a mesh; return both in their usable forms."""
    axes = mesh if isinstance(mesh, MeshAxes) else MeshAxes.of(mesh)
    placements = specialize(placements)
    check_placements(placements)
    if len(placements) != len(axes.sizes):
        msg = (
            f"a mesh of {len(axes.sizes)} axes must have as many placements, got {len(placements)}; "
            f"pass one for each axis"
        )
        raise ConfigError(msg)
    return axes, placements


def _empty_offsets(tensor_range: Range, part: Range, shape: Sequence[int]) -> tuple[int, ...]:
    """Return where a rank's empty part of a tensor lies: behind the rows of earlier ranks."""
    rows_before = (part.start - tensor_range.start) // max(1, row_numel(shape))
    return (min(rows_before, shape[0]),) + (0,) * (len(shape) - 1)
