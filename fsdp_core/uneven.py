"""Uneven DTensors: what DTensor's own arithmetic, which assumes even shards, would get wrong.

A DTensor computes from its global shape which rows each rank holds; ours are packed with others in
one buffer, so they lie elsewhere. What is element-wise is right all the same; what moves rows is not,
and says so to nobody. So each DTensor that is handed out carries its own ways of becoming whole.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from fsdp_core.collectives import MeshAxes
from fsdp_core.errors import UnsupportedError
from fsdp_core.placement import is_sharded
from fsdp_core.torch_private import attach_chunk, local_tensor


class _WithoutBackward(torch.autograd.Function):
    """The identity, whose backward says that a loss must not come this way."""

    @staticmethod
    def forward(ctx: Any, _leaf: Tensor, whole: Tensor, fqn: str) -> Tensor:
        """Return `whole`."""
        ctx.fqn = fqn
        return whole

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> Any:
        """Refuse.

        Raises:
            UnsupportedError: always.
        """
        raise loss_of_shards(ctx.fqn)


def is_described(dtensor: DTensor) -> bool:
    """Whether a DTensor carries its own ways of becoming whole."""
    return "full_tensor" in vars(dtensor)


def loss_of_shards(fqn: str, unit: str = "") -> UnsupportedError:
    """Say that a loss was computed from a sharded parameter."""
    of_unit = f" of unit {unit!r}" if unit else ""
    msg = (
        f"a loss must be computed from full parameters, got a gradient for the sharded {fqn!r}"
        f"{of_unit}; compute its term inside the unit's forward, or use the optimizer's weight_decay"
    )
    return UnsupportedError(msg, fqn=fqn)


# Methods of Tensor that make a tensor of the same rows: copies, other dtypes and devices.
_SAME_ROWS = ("clone", "to", "float", "cpu")


@dataclass(frozen=True)
class Rows:
    """One rank's rows of a tensor, and where they belong.

    It refers to the local tensor and not to the DTensor that carries it: that would be a cycle.

    Attributes:
        local: the rows [n, ...].
        axes: the mesh.
        placements: plain ones, as the DTensor has them.
        shape: of the whole tensor.
        offsets: of the local tensor in the whole one.
        fqn: the parameter that it is, or belongs to.
        full_name: makes of that the name in the whole model, which is known once units have names.
        carrier: the DTensor that the rows were attached to, weakly.
    """

    local: Tensor
    axes: MeshAxes
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    fqn: str
    full_name: Callable[[str], str] = str
    carrier: weakref.ref[DTensor] | None = None

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.full_name(self.fqn)

    def as_dtensor(self) -> DTensor:
        """Return the rows as a DTensor."""
        dtensor = self._plain(self.local)
        self.attach(dtensor)
        return dtensor

    def _plain(self, local: Tensor) -> DTensor:
        shape = torch.Size(self.shape)
        return DTensor.from_local(
            local,
            self.axes.mesh,
            self.placements,
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )

    def attach(self, dtensor: DTensor) -> None:
        """Make a DTensor over these rows whole by its true rows, and checkpoints save those."""
        rows = replace(self, local=local_tensor(dtensor), carrier=weakref.ref(dtensor))
        attach_chunk(rows.local, self.offsets, tuple(rows.local.shape))
        dtensor.full_tensor = rows.full_tensor  # type: ignore[method-assign]
        dtensor.redistribute = rows.redistribute  # type: ignore[method-assign]
        dtensor.detach = rows.detach  # type: ignore[method-assign]
        for name in _SAME_ROWS:
            setattr(dtensor, name, partial(rows.copied, name))
        dtensor.__reduce_ex__ = rows.reduce  # type: ignore[method-assign]
        if not isinstance(dtensor, nn.Parameter):
            dtensor.__deepcopy__ = rows.deepcopy  # type: ignore[method-assign]

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return the whole tensor on every rank, as `DTensor.full_tensor`.

        No gradient comes back from it: a backward that would need one raises.

        Ordering:
            Collective on each sharded axis, on the current stream.

        Raises:
            UnsupportedError: an axis is still to be reduced, or a gradient is asked for.
        """
        if grad_placements is not None or any(each.is_partial() for each in self.placements):
            msg = (
                f"full_tensor of {self.name!r} needs reduced rows and takes no grad_placements, got "
                f"placements {self.placements} and {grad_placements}; run the last microbatch first"
            )
            raise UnsupportedError(msg, fqn=self.name)
        whole = torch.zeros(self.shape, dtype=self.local.dtype, device=self.local.device)
        with torch.no_grad():
            if self.local.numel():
                whole.narrow(0, self.offsets[0], self.local.shape[0]).copy_(self.local)
            # Each element is on one rank of the sharded axes, and zero bytes on the others: sums
            # of bytes keep every bit of it.
            flat = whole.view(-1).view(torch.uint8)
            for axis, placement in enumerate(self.placements):
                if is_sharded(placement):
                    dist.all_reduce(flat, group=self.axes.process_groups[axis])
        carrier = None if self.carrier is None else self.carrier()
        if carrier is None or not (carrier.requires_grad and torch.is_grad_enabled()):
            return whole
        # A leaf of its own: a whole tensor that somebody keeps must not keep the parameter alive.
        leaf = torch.empty(0, device=whole.device, requires_grad=True)
        result: Tensor = _WithoutBackward.apply(leaf, whole, self.name)  # type: ignore[no-untyped-call]
        return result

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        """Return the tensor replicated on every axis, as `DTensor.redistribute`.

        Raises:
            UnsupportedError: other placements are asked for.
        """
        wanted = None if placements is None else tuple(placements)
        if device_mesh not in (None, self.axes.mesh) or wanted != (Replicate(),) * len(
            self.placements
        ):
            msg = (
                f"the rows of {self.name!r} can be redistributed to Replicate() on their own mesh "
                f"only, got {wanted}; use full_tensor()"
            )
            raise UnsupportedError(msg, fqn=self.name)
        del options
        return DTensor.from_local(self.full_tensor(), self.axes.mesh, wanted, run_check=False)

    def detach(self) -> DTensor:
        """Return the same rows outside autograd, as `Tensor.detach`; state dicts hold these."""
        return replace(self, local=self.local.detach()).as_dtensor()

    def copied(self, method: str, *args: Any, **kwargs: Any) -> Tensor:
        """Return what a method of Tensor that keeps all rows returns, with ways of its own.

        Why: averages of weights are made by these.
        """
        carrier = None if self.carrier is None else self.carrier()
        source = self._plain(self.local) if carrier is None else carrier
        result: Tensor = getattr(Tensor, method)(source, *args, **kwargs)
        if isinstance(result, DTensor) and result is not carrier:
            self.attach(result)
        return result

    def deepcopy(self, memo: dict[int, Any]) -> DTensor:
        """Return a copy of the rows, as `copy.deepcopy` asks for."""
        copied = replace(self, local=self.local.detach().clone()).as_dtensor()
        memo[id(copied)] = copied
        return copied

    def reduce(self, protocol: SupportsIndex) -> Any:
        """Say how to pickle a plain DTensor of these rows: what is attached stays out of files.

        Why a copy: PyTorch cannot pickle a DTensor whose rows begin inside a buffer.
        """
        return self._plain(self.local.detach().clone()).__reduce_ex__(protocol)
