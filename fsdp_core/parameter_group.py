"""ParameterGroup: parameters that travel together, their buffers and their representations.

The only conductor: it alone calls buffers, which alone call collectives. One group has one dtype
and is part of one unit. Each parameter is two objects, whatever happens: the *sharded* one (a
DTensor over the main weights, which the optimizer and state dicts see) and the *full* one (the
module's original `Parameter`, a view of the gathered buffer, which autograd sees).
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter, is_
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim import Optimizer

from fsdp_core.collectives import MeshAxes
from fsdp_core.dbuffer import DBuffer
from fsdp_core.errors import StateError
from fsdp_core.layout import GlobalLayout
from fsdp_core.layout_builder import build_for_tensor_atomic, build_row_atomic_layout
from fsdp_core.mixed_precision import MixedPrecisionPolicy
from fsdp_core.placement import Placements, TensorAtomic, is_sharded, specialize
from fsdp_core.torch_private import local_tensor, storage_holders, versions_of, wrap_instead
from fsdp_core.uneven import Rows, is_described

DELAYED_HOOK = "register_wgrad_accumulation_and_reduce_hooks"
"""The method by which a module tells that it has put a delayed gradient in place."""


@dataclass(frozen=True)
class Slot:
    """A place where a module holds a parameter.

    Attributes:
        owner: the module that holds it, weakly.
        registry: that module's dict of parameters. Held strongly: it refers to no module.
        name: the key there.
        fqn: the name relative to the unit's root module.
    """

    owner: weakref.ref[nn.Module]
    registry: dict[str, nn.Parameter | None]
    name: str
    fqn: str


@dataclass
class Member:
    """One physical parameter of a group.

    Attributes:
        full: the module's original parameter, a view of the gathered buffer once committed.
        slots: every place that holds it; a tied parameter has several.
        sharded: the DTensor parameter over this rank's rows.
        is_watched: its unit is told of its gradients.
        accumulation: where autograd would accumulate into the sharded parameter, once watched.
    """

    full: nn.Parameter
    slots: list[Slot]
    sharded: nn.Parameter = field(init=False)
    is_watched: bool = False
    accumulation: Any = None

    @property
    def fqn(self) -> str:
        """The parameter's first name, relative to its unit's root module."""
        return self.slots[0].fqn

    @property
    def is_delayed(self) -> bool:
        """Whether its gradient comes after autograd's, by a call of its own module.

        Source: Transformer Engine marks such parameters so.
        """
        return bool(getattr(self.full, "skip_backward_post_hook", False))


@dataclass(frozen=True)
class GroupSpec:
    """What a group is built from, besides its parameters.

    Attributes:
        axes: the mesh with its groups.
        placements: of parameters, gradients and optimizer state.
        precision: the dtypes.
        grad_divisor: applied to each contribution on top of the mean over the mesh.
        owners: the rank that holds each parameter, where placements are TensorAtomic.
    """

    axes: MeshAxes
    placements: Placements
    precision: MixedPrecisionPolicy
    grad_divisor: float
    owners: dict[nn.Parameter, int] | None = None


class ParameterGroup:
    """Parameters of one dtype that are gathered and reduced together.

    Construction allocates and fills buffers and touches no module; `commit` swaps, and cannot
    fail.

    Attributes:
        members: the parameters, in index order of the layout.
        layout: where each lies; one layout serves all buffers.
        main_weight: what the optimizer updates, in optimizer placements.
        full_weight: what compute reads, replicated. Its storage exists only while it is needed,
            unless `keeps_full`.
        keeps_full: the parameter placement is replicated, so the full weights always exist.
        full_numel: elements of the whole parameters, padding included.
        finished_in: the pass, by the context's count, whose window was finished on a stream apart.
        unit: the unit that the group is part of, weakly; set by the unit.
    """

    def __init__(self, members: Sequence[Member], spec: GroupSpec) -> None:
        self.members = tuple(members)
        self._spec = spec
        own_dtype = members[0].full.dtype
        precision = spec.precision
        main_dtype = precision.main_params_dtype or own_dtype
        self._compute_dtype = precision.compute_dtype or own_dtype
        self._main_grad_dtype = precision.main_grads_dtype or own_dtype
        self._reduce_dtype = precision.grad_comm_dtype or self._compute_dtype
        self._parameter = specialize(spec.placements.parameter)
        self._gradient = specialize(spec.placements.gradient)
        self._optimizer = specialize(spec.placements.optimizer)
        self._replicated = (Replicate(),) * len(self._parameter)
        self.layout = _build_layout(self.members, spec)
        self.full_numel = self.layout.numel
        self._build_weights(main_dtype)
        self._main_grad: DBuffer | None = None
        self._grad_is_final = False
        self._awaits_finish = False
        self.finished_in = -1
        self._sharded_grads: tuple[DTensor, ...] = ()
        self._window_grads: tuple[DTensor, ...] = ()
        self._own_grad_holders = 0
        self._main_version = -1
        self._fulls = [member.full for member in self.members]
        self._shardeds: list[nn.Parameter] = []
        self._written: list[Tensor] = []
        self.unit: weakref.ref[Any] = weakref.ref(self)
        if self.is_trainable:
            self._build_gradients()

    # -- construction ------------------------------------------------------------------------

    def _build_weights(self, main_dtype: torch.dtype) -> None:
        axes, layout = self._spec.axes, self.layout
        stored_apart = self._parameter != self._optimizer or (
            self._parameter == self._replicated and main_dtype != self._compute_dtype
        )
        self._stored: DBuffer | None = None
        self._stored_slice: DBuffer | None = None
        if stored_apart:
            self._stored = DBuffer.empty(axes, self._parameter, layout, self._compute_dtype)
            self._stored_slice = self._stored.view(self._optimizer)
        if self._stored_slice is not None and main_dtype == self._compute_dtype:
            # The main weights are this rank's slice of what is stored anyway.
            self.main_weight = self._stored_slice
        else:
            self.main_weight = DBuffer.empty(axes, self._optimizer, layout, main_dtype)
        self.keeps_full = self._parameter == self._replicated
        if self.keeps_full:
            self.full_weight = self._stored or self.main_weight
            return
        self.full_weight = DBuffer.empty(axes, self._replicated, layout, self._compute_dtype)
        # Views must be made while there is memory; they outlive it. `unshard` takes it again.
        self._make_views(self.full_weight)
        self._gather = (self._stored or self.main_weight).redistribution(self.full_weight)
        self.full_weight.release_storage()

    def _make_views(self, buffer: DBuffer) -> list[Tensor]:
        return [buffer.get_tensor_view(index) for index in range(len(self.members))]

    def _build_gradients(self) -> None:
        axes, layout = self._spec.axes, self.layout
        summands = (Partial("avg"),) * len(self._gradient)
        self._main_grad = DBuffer.empty(axes, self._gradient, layout, self._main_grad_dtype)
        self._partial = DBuffer.empty(axes, summands, layout, self._reduce_dtype)
        self._partial_views = self._make_views(self._partial)
        # What this rank keeps of a reduction is written over its own part of the summands.
        self._contribution = self._partial.view(self._gradient)
        self._reduce_in_place = self._partial.redistribution(self._contribution)
        self._reduce_directly: Callable[[], None] | None = None
        if self._reduce_dtype == self._main_grad_dtype and self._gradient != summands:
            self._reduce_directly = self._partial.redistribution(self._main_grad)
        self._partial.release_storage()
        self._final_grad = self._main_grad.view(self._optimizer)
        self._sharded_grads = self._window_grads = self._grad_dtensors(self._final_grad)
        if self.finishes_apart:
            self._window_grads = self._grad_dtensors(self._main_grad)
        self._own_grad_holders = self._grad_holders()
        self._main_grad.release_storage()

    def commit(self) -> None:
        """Fill the main weights and make both representations; from now on modules hold shards.

        Ordering:
            Reads the original parameters on the current stream.
        """
        with torch.no_grad():
            self.main_weight.flat.zero_()
            for index, member in enumerate(self.members):
                self.main_weight.copy_from(index, member.full)
            for index, member in enumerate(self.members):
                self._make_sharded(index, member)
                self._point_to_buffer(index, member)
        self._shardeds = [member.sharded for member in self.members]
        self._written = [self.main_weight.flat, *self._shardeds]
        for member in self.members:
            for slot in member.slots:
                slot.registry[slot.name] = member.sharded

    def _make_sharded(self, index: int, member: Member) -> None:
        rows = self._rows_of(self.main_weight, index)
        member.sharded = nn.Parameter(rows.as_dtensor(), requires_grad=member.full.requires_grad)
        # What a Parameter wraps has a version counter of its own: writes to it must be seen.
        wrap_instead(member.sharded, rows.local)
        self.describe(index, member.sharded)
        if self._main_grad_dtype != rows.local.dtype:
            member.sharded.grad_dtype = self._main_grad_dtype
        for key, value in vars(member.full).items():
            setattr(member.sharded, key, value)
        mark_owner(member.sharded, self, member.fqn)
        member.sharded.register_hook = partial(_refuse_hook, member.fqn)  # type: ignore[method-assign]

    def _point_to_buffer(self, index: int, member: Member) -> None:
        view = self.full_weight.get_tensor_view(index)
        member.full.data = view
        member.full.grad = None
        mark_owner(member.full, self, member.fqn)

    def index_of(self, parameter: Tensor) -> int:
        """Return the index of a sharded parameter of this group."""
        return next(i for i, member in enumerate(self.members) if member.sharded is parameter)

    def full_name(self, fqn: str) -> str:
        """Return the name of a parameter relative to its unit's root, as far as that is known.

        Before the construction scope ends the unit has no name yet.
        """
        unit_fqn = getattr(self.unit(), "fqn", "")
        return f"{unit_fqn}.{fqn}" if unit_fqn else fqn

    def _rows_of(self, buffer: DBuffer, index: int, suffix: str = "") -> Rows:
        """Return this rank's rows of a parameter in one of the buffers, with its name in messages."""
        rows = buffer.get_rows(index, self.members[index].fqn + suffix)
        return replace(rows, full_name=partial(_full_name, weakref.ref(self)))

    def as_sharded(self, index: int, local: Tensor) -> DTensor:
        """Return rows like those of a sharded parameter as a DTensor that checkpoints understand.

        Shapes:
            local: as this rank's rows of parameter `index`.
        """
        rows = self._rows_of(self.main_weight, index)
        return replace(rows, local=local).as_dtensor()

    def describe(self, index: int, dtensor: Tensor) -> None:
        """Note on a DTensor which rows of parameter `index` it holds."""
        assert isinstance(dtensor, DTensor)
        self._rows_of(self.main_weight, index).attach(dtensor)

    def gather_main_weight(self) -> DBuffer:
        """Return the whole main weights, gathered into a new buffer on the current stream."""
        return self.main_weight.redistribute(self._replicated)

    @property
    def stores(self) -> bool:
        """Whether gathered weights are kept from one use to the next."""
        return self._stored is not None

    @property
    def keeps_writes(self) -> bool:
        """Whether what is written to the full weights is written to the main weights."""
        return self.keeps_full and self.main_weight in (self.full_weight, self._stored_slice)

    @property
    def full_nbytes(self) -> int:
        """Bytes of the full weights."""
        return self.full_numel * self._compute_dtype.itemsize

    # -- weights -----------------------------------------------------------------------------

    @property
    def is_stale(self) -> bool:
        """Whether the main weights were written since the full ones were taken from them.

        Why by version counter: whoever writes them in place (a loaded state dict, an initialiser)
        moves it, so nobody has to tell. Fused and foreach optimizers do not: see `mark_written`.
        """
        # Of each parameter too: an operator on a DTensor moves its own counter, and one on what it
        # wraps that of the buffer.
        return versions_of(self._written) != self._main_version

    def mark_written(self) -> None:
        """Note that the main weights were written by something that moves no version counter."""
        self._main_version = -1

    def mark_current(self) -> None:
        """Note that the full weights stay as they are, though the main weights were written."""
        self._main_version = versions_of(self._written)

    def unshard(self) -> int:
        """Fill the full weights, on the current stream.

        Ordering:
            Requires that the current stream is the all-gather stream, behind the last writes of
            the main weights.

        Returns:
            The number of gathers issued.
        """
        gathers = 0
        if self._stored is not None and self.is_stale:
            gathers += self._refresh()
        self.mark_current()
        if self.keeps_full:
            return gathers
        self.full_weight.reallocate_storage()
        self._gather()
        return gathers + 1

    def _refresh(self) -> int:
        """Bring what is stored in parameter placements up to date with the main weights."""
        assert self._stored is not None
        assert self._stored_slice is not None
        if self.main_weight is not self._stored_slice:
            self.main_weight.cast(self._compute_dtype, out=self._stored_slice)
        if self._parameter == self._optimizer:
            return 0
        self._stored_slice.redistribute(self._parameter, out=self._stored)
        return 1

    def reshard(self) -> None:
        """Give the memory of the full weights back.

        Ordering:
            Requires that the current stream is the all-gather stream, behind every reader.
        """
        if not self.keeps_full:
            self.full_weight.release_storage()

    # -- gradients ---------------------------------------------------------------------------

    @property
    def final_grad(self) -> DBuffer:
        """The gradients that the optimizer gets, in optimizer placements."""
        assert self._main_grad is not None
        return self._final_grad

    @property
    def bound_grads(self) -> tuple[DTensor, ...]:
        """The objects that the parameters' `.grad` are after a window; empty if none is to come."""
        return self._sharded_grads

    @property
    def is_trainable(self) -> bool:
        """Whether some parameter is to get a gradient."""
        return bool(trainable_among(self._fulls))

    @property
    def finishes_apart(self) -> bool:
        """Whether a window ends with a reduction of its own."""
        return self._gradient != self._optimizer

    def allocate_gradients(self) -> None:
        """Take memory for the gradients of the whole parameters, on the reduction stream.

        And for those that this rank keeps, where `release_gradients` gave it back.
        """
        if self._main_grad is None:
            self._build_gradients()
        assert self._main_grad is not None
        if self._main_grad.is_released:
            self._main_grad.reallocate_storage()
        self._partial.reallocate_storage()

    def copy_in(self) -> None:
        """Copy the gradients of the full parameters into the partial buffer, and drop them.

        A parameter without a gradient counts as zeros, so that every rank reduces the same
        elements whatever its own use was.

        Ordering:
            Runs on the current stream, which must be behind the allocation.
        """
        views, grads = [], []
        for view, full in zip(self._partial_views, self._fulls, strict=True):
            grad = full.grad
            if grad is None:
                view.zero_()
            else:
                views.append(view)
                # Of an embedding's rows alone: another rank has others, so all are reduced.
                grads.append(grad.to_dense() if grad.is_sparse else grad)
                full.grad = None
        if views:
            torch._foreach_copy_(views, grads)

    def foreign_gradients(self) -> list[int]:
        """Return which parameters have a gradient that somebody put in the place of the group's."""
        held = map(_GRAD, self._shardeds)
        grads = zip(held, self._sharded_grads, self._window_grads, strict=True)
        return [
            index
            for index, (grad, final, window) in enumerate(grads)
            if grad is not None and grad is not final and grad is not window
        ]

    def adopt_gradient(self, index: int) -> bool:
        """Copy a foreign gradient into the group's, so that the next reduction adds to it.

        Ordering:
            Runs on the current stream, which must be behind all reductions of the group.

        Returns:
            Whether it could: it must have the rows of the group's.
        """
        buffer = self._main_grad if self._awaits_finish else self._final_grad
        assert buffer is not None
        grad, view = self.members[index].sharded.grad, buffer.get_tensor_view(index)
        if not isinstance(grad, DTensor) or local_tensor(grad).shape != view.shape:
            return False
        with torch.no_grad():
            view.copy_(local_tensor(grad))
        self._grad_is_final = not self._awaits_finish
        return True

    def reduce(self) -> None:
        """Reduce the partial buffer and add it to the window's gradients, on the current stream.

        Ordering:
            Requires that the current stream is the reduction stream, behind the copy-in. The
            partial buffer's memory goes back to that stream's pool.
        """
        assert self._main_grad is not None
        accumulate = self._prepare_window()
        if self._reduce_directly is not None and not accumulate:
            contribution = self._main_grad
            self._reduce_directly()
        else:
            contribution = self._contribution
            self._reduce_in_place()
        if self._spec.grad_divisor != 1:
            contribution.flat.div_(self._spec.grad_divisor)
        if accumulate:
            self._main_grad.flat.add_(contribution.flat)
        elif contribution is not self._main_grad:
            self._main_grad.flat.copy_(contribution.flat)
        self._partial.release_storage()
        self._awaits_finish = True

    @property
    def awaits_finish(self) -> bool:
        """Whether gradients were reduced that are not in optimizer placements yet.

        Those that `zero_grad` dropped since then belong to a window that was given up.
        """
        return self._awaits_finish and have_gradients(self._shardeds)

    def finish_window(self) -> None:
        """Bring the window's gradients into optimizer placements, in place, on the current stream.

        Ordering:
            Requires that the current stream is behind every `reduce` of the window.
        """
        assert self._main_grad is not None
        self._main_grad.redistribute(self._optimizer, out=self._final_grad)

    def bind(self, *, is_over: bool) -> None:
        """Show the window's gradients as those of the sharded parameters.

        Args:
            is_over: they are in optimizer placements, and complete.
        """
        if is_over:
            self._grad_is_final = True
            self._awaits_finish = False
        grads = self._sharded_grads if is_over else self._window_grads
        for sharded, full, grad in zip(self._shardeds, self._fulls, grads, strict=True):
            if full.requires_grad and sharded.grad is not grad:
                sharded.grad = grad

    def _prepare_window(self) -> bool:
        """Make the main gradient ready to be added to.

        Returns:
            Whether to add: some sharded gradient exists, be it one of a parameter that is frozen
            by now. If not, the next one overwrites.
        """
        missing = [grad is None for grad in map(_GRAD, self._shardeds)]
        accumulate = not all(missing)
        assert self._main_grad is not None
        if accumulate and any(missing):
            self._zero_missing()
        if accumulate and self._grad_is_final and self.finishes_apart:
            self._reopen_window()
        self._grad_is_final = False
        return accumulate

    def _zero_missing(self) -> None:
        """Let a gradient that was dropped alone count as zeros."""
        current = self._final_grad if self._grad_is_final else self._main_grad
        assert current is not None
        for index, member in enumerate(self.members):
            if member.sharded.grad is None:
                current.get_tensor_view(index).zero_()

    def _reopen_window(self) -> None:
        """Turn finished gradients back into summands, so that more can be added.

        An average over an axis that was scattered becomes, on the rank that holds it, the axis'
        size times its value, and zeros elsewhere: the same average, exact where the size is a
        power of two. One that was all-reduced is its own average already.
        """
        assert self._main_grad is not None
        scattered = 1
        for axis, (before, after) in enumerate(zip(self._gradient, self._optimizer, strict=True)):
            if isinstance(before, Partial) and is_sharded(after):
                scattered *= self._spec.axes.sizes[axis]
        if scattered == 1:
            return
        kept = self._final_grad.flat * scattered
        self._main_grad.flat.zero_()
        self._final_grad.flat.copy_(kept)

    def _grad_dtensors(self, buffer: DBuffer) -> tuple[DTensor, ...]:
        return tuple(
            self._rows_of(buffer, index, ".grad").as_dtensor() for index in range(len(self.members))
        )

    def release_gradients(self) -> None:
        """Give the memory of gradients back if all were dropped; the next reduction takes it again.

        A gradient that somebody else still holds (or a view of one) keeps it.

        Ordering:
            The memory goes back to the pool of the reduction stream, which must be behind all that
            used it before it is next allocated from.
        """
        buffer = self._main_grad
        if buffer is None or buffer.is_released:
            return
        if not have_gradients(self._shardeds) and self._grad_holders() == self._own_grad_holders:
            buffer.release_storage()
            self._awaits_finish = False

    def _grad_holders(self) -> int:
        """Return how many references there are to gradients and to views of them."""
        assert self._main_grad is not None
        grads = sum(map(sys.getrefcount, (*self._sharded_grads, *self._window_grads)))
        return grads + storage_holders(self._main_grad.flat)

    def drop_gradients(self) -> None:
        """Forget every gradient, full and sharded."""
        for member in self.members:
            member.full.grad = None
            member.sharded.grad = None
        self._grad_is_final = False
        self._awaits_finish = False


# As functions in C, since they are asked of each parameter several times a step.
_GRAD = attrgetter("grad")
_IS_NONE = partial(is_, None)
_REQUIRES_GRAD = attrgetter("requires_grad")


def have_gradients(parameters: Iterable[Tensor]) -> bool:
    """Whether some parameter has a gradient."""
    return not all(map(_IS_NONE, map(_GRAD, parameters)))


def trainability_of(parameters: Iterable[Tensor]) -> list[bool]:
    """Return whether each parameter is to get a gradient."""
    return list(map(_REQUIRES_GRAD, parameters))


def trainable_among(parameters: Iterable[Tensor]) -> int:
    """Return how many parameters are to get a gradient."""
    return sum(map(_REQUIRES_GRAD, parameters))


def _refuse_hook(fqn: str, _hook: object) -> NoReturn:
    """Refuse a hook of a sharded parameter that autograd would never call.

    Raises:
        StateError: always.
    """
    msg = (
        f"a hook must be one that is called, got register_hook on the sharded parameter {fqn!r}, "
        f"whose gradient is reduced, not accumulated; use register_post_accumulate_grad_hook"
    )
    raise StateError(msg, fqn=fqn)


def _build_layout(members: Sequence[Member], spec: GroupSpec) -> GlobalLayout:
    shapes = [tuple(member.full.shape) for member in members]
    dp_size = spec.axes.mesh.size()
    if any(isinstance(kind, TensorAtomic) for kind in spec.placements.kinds):
        assert spec.owners is not None
        return build_for_tensor_atomic(shapes, dp_size, [spec.owners[m.full] for m in members])
    return build_row_atomic_layout(shapes, dp_size, block_size=spec.placements.block_size)


@dataclass(frozen=True, slots=True)
class Owner:
    """Which group a parameter belongs to, and its name there.

    Attributes:
        group: the group, weakly: a parameter must not keep its unit alive.
        fqn: the parameter's name relative to the unit's root module.
    """

    group: weakref.ref[ParameterGroup]
    fqn: str


_OWNER = "_fsdp_core_owner"


_WHOLE = "_fsdp_core_whole"


def mark_whole(parameter: Tensor) -> None:
    """Note on a parameter that its unit keeps it as it is, on every rank."""
    setattr(parameter, _WHOLE, True)


def is_whole(parameter: Tensor) -> bool:
    """Whether a parameter is one that its unit keeps as it is."""
    return bool(getattr(parameter, _WHOLE, False))


def mark_owner(parameter: Tensor, group: ParameterGroup, fqn: str) -> None:
    """Note on a parameter which group it belongs to."""
    setattr(parameter, _OWNER, Owner(weakref.ref(group), fqn))


def owner_of(parameter: Tensor) -> Owner | None:
    """Return which group a parameter belongs to; None for a foreign one."""
    owner: Owner | None = getattr(parameter, _OWNER, None)
    return owner


def parameters_held(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of an optimizer's groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def describe_state(parameter: Tensor, state: dict[str, Any]) -> None:
    """Note on what an optimizer made of a sharded parameter by itself which rows it holds."""
    owner = owner_of(parameter)
    if owner is None:
        return
    for value in state.values():
        if (
            isinstance(value, DTensor)
            and value.shape == parameter.shape
            and not is_described(value)
        ):
            group = living_group(owner)
            group.describe(group.index_of(parameter), value)


def _full_name(group: weakref.ref[ParameterGroup], fqn: str) -> str:
    """Return the name of a parameter in the whole model, as long as its group lives."""
    living = group()
    return fqn if living is None else living.full_name(fqn)


def living_group(owner: Owner) -> ParameterGroup:
    """Return the group of a parameter.

    Raises:
        StateError: its model was deleted.
    """
    group = owner.group()
    if group is None:
        raise without_model(owner.fqn)
    return group


def without_model(fqn: str) -> StateError:
    """Say that the model of a parameter was deleted."""
    msg = (
        f"the model of parameter {fqn!r} must be alive, got one that was deleted; keep a reference "
        f"to it, or build another optimizer"
    )
    return StateError(msg, fqn=fqn)
