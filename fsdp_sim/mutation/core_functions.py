"""Rank functions for fsdp_core: what programs as data cannot say - weights written by hand, models dropped."""

import shutil
import tempfile
import weakref
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate
from torch.utils.checkpoint import checkpoint

import fsdp_core

WIDTH = 4


class _Failure(RuntimeError):
    """What a block raises when it is told to."""


class _Block(nn.Module):
    """A linear layer that may fail, be left out, or have no backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.fails = False
        self.is_left_out = False
        self.has_no_backward = False

    def forward(self, rows: Tensor) -> Tensor:
        """Map rows of [2, WIDTH] to the same shape."""
        if self.fails:
            raise _Failure
        mapped: Tensor = self.linear(rows)
        return mapped.detach() if self.has_no_backward else mapped


class _Chain(nn.Sequential):
    """Blocks, of which some may be left out."""

    def forward(self, rows: Tensor) -> Tensor:
        """Run the blocks that are not left out."""
        for block in self:
            rows = rows if block.is_left_out else block(rows)
        return rows


def _model(
    *,
    hooks: bool = True,
    policy: fsdp_core.RuntimePolicy | None = None,
    weights: Any = fsdp_core.RowAtomic(),  # noqa: B008  a frozen value
    gradients: Any = fsdp_core.RowAtomic(),  # noqa: B008  a frozen value
) -> tuple[Any, fsdp_core.FsdpContext]:
    """Return three sharded blocks inside a unit of none of its own parameters, and their context."""
    torch.manual_seed(0)
    model = _Chain(*(_Block() for _ in range(3)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = fsdp_core.RowAtomic()
    placements = fsdp_core.Placements((0,), (weights,), (gradients,), (rows,))
    schedule = fsdp_core.SchedulePolicy(register_hooks=hooks)
    with fsdp_core.fully_shard_context("cpu", policy or fsdp_core.RuntimePolicy()) as context:
        for block in (*model, model):
            fsdp_core.fully_shard(block, mesh, placements, schedule_policy=schedule)
    return model, context


def _rows() -> Tensor:
    return torch.full((2, WIDTH), float(dist.get_rank() + 1))


def _write(weights: list[Any]) -> None:
    """Write main weights in place, on the current stream, as loading does."""
    with torch.no_grad():
        for weight in weights:
            weight.to_local().add_(1)


def _copies(weights: list[Any]) -> list[Tensor]:
    with torch.no_grad():
        return [weight.to_local().clone() for weight in weights]


def written_after_failure(_rank: int) -> list[Tensor]:
    """A forward fails while the next unit is being gathered; weights are written at once."""
    model, context = _model()
    weights = list(model.parameters())
    model[1].fails = True
    with suppress(_Failure):
        model(_rows())
    context.reset()
    _write(weights)
    model[1].fails = False
    return [model(_rows()).detach(), *_copies(weights)]


def _fail() -> None:
    raise _Failure


def written_after_broken_gather(_rank: int) -> list[Tensor]:
    """The second of a unit's two gathers fails while the first may run; weights are written at once."""
    unit = _sharded(nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2, dtype=torch.float64))
    unit.fsdp_unit.groups[1].unshard = _fail
    with suppress(_Failure):
        unit.unshard()
    weights = list(unit.parameters())
    _write(weights)
    return _copies(weights)


def written_after_unused_prefetch(_rank: int) -> list[Tensor]:
    """Backward gathers the first unit ahead and does not reach it; weights are written after it."""
    model, _ = _model()
    weights = list(model.parameters())
    model[0].has_no_backward = True
    model(_rows()).sum().backward()
    _write(weights)
    return _copies(weights)


def written_after_forward(_rank: int) -> list[Tensor]:
    """A training forward gathers a unit ahead and leaves it out; weights are written, not trained."""
    model, _ = _model()
    weights = list(model.parameters())
    model[2].is_left_out = True
    model(_rows())
    _write(weights)
    return _copies(weights)


def kept_and_written_after_unused_prefetch(_rank: int) -> list[Tensor]:
    """As before, with weights that stay gathered: only what changed is gathered ahead."""
    model, _ = _model(weights=Replicate())
    weights = list(model.parameters())
    model[2].is_left_out = True
    for _ in range(2):
        _write(weights)
        model(_rows()).sum().backward()
    _write(weights)
    return _copies(weights)


def written_while_gathered(_rank: int) -> list[Tensor]:
    """Weights are written while a unit holds the gathered ones; the next use gathers them again."""
    model, _ = _model()
    weights = list(model.parameters())
    model[0].unshard()
    _write(weights)
    model[0].unshard()
    first = model[0](_rows()).detach()
    model[0].reshard()
    with torch.no_grad():
        return [first, model(_rows())]


def written_inside_a_forward(_rank: int) -> list[Tensor]:
    """A unit's weights are written when it was gathered ahead, in the forward that comes to it next."""
    model, context = _model()
    weights = list(model[1].parameters())

    def write(*_: object) -> None:
        torch.cpu.current_stream().wait_stream(context.allgather_stream)
        _write(weights)

    model[1].register_forward_pre_hook(write, prepend=True)
    return [model(_rows()).detach(), *_copies(weights)]


def written_before_recomputation(_rank: int) -> list[Tensor]:
    """Weights are written between a forward and a backward whose first gather is a recomputation's."""
    model, _ = _model()
    weights = list(model[2].parameters())
    rows = model[1](model[0](_rows()))
    loss = checkpoint(model[2], rows, use_reentrant=True).sum()
    _write(weights)
    loss.backward()
    return _copies([weight.grad for weight in weights])


def replaced_in_a_window(_rank: int) -> list[Tensor]:
    """A gradient is replaced, unseen, behind the first microbatch; the last one has no backward."""
    policy = fsdp_core.RuntimePolicy(overlap_outer_communication=True)
    model, context = _model(weights=Replicate(), gradients=Partial("avg"), policy=policy)
    weights = list(model.parameters())
    model[1].is_left_out = model[2].is_left_out = True
    with fsdp_core.microbatch(context, is_last=False):
        model(_rows()).sum().backward()
    weights[0].grad = torch.ones_like(weights[0].grad)
    with fsdp_core.microbatch(context, is_last=True):
        pass
    return _copies([weights[0].grad])


def replaced_behind_the_outer_reduction(_rank: int) -> list[Tensor]:
    """A gradient is replaced, unseen, while the reduction that ends its window may run."""
    policy = fsdp_core.RuntimePolicy(
        overlap_outer_communication=True, caller_managed_grad_sync=True
    )
    model, context = _model(weights=Replicate(), gradients=Partial("avg"), policy=policy)
    weights = list(model.parameters())
    for _ in range(2):
        model(_rows()).sum().backward()
        weights[2].grad = torch.ones_like(weights[2].grad)
    model(_rows()).sum().backward()
    context.finish_grad_sync()
    return _copies([weight.grad for weight in weights])


def zeroed_in_place(_rank: int) -> list[Tensor]:
    """Gradients are set to zero between two windows, not dropped: the optimizer's rows of them."""
    model, _ = _model(weights=Replicate(), gradients=Partial("avg"))
    weights = list(model.parameters())
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        model(_rows()).sum().backward()
    return _copies([weight.grad for weight in weights])


def accumulated(_rank: int) -> list[Tensor]:
    """Two microbatches: what is shown behind the first one is a sum of this rank's own, not yet reduced."""
    model, context = _model(weights=Replicate(), gradients=Partial("avg"))
    weights, shown = list(model.parameters()), []
    for is_last in (False, True):
        with fsdp_core.microbatch(context, is_last):
            model(_rows()).sum().backward()
        shown += _copies([weight.grad for weight in weights])
    return shown


def recomputed_between_gradients(_rank: int) -> list[Tensor]:
    """A unit is used twice; its second gradient, of the two that are declared, needs a recomputation."""
    unit = nn.Linear(WIDTH, WIDTH, bias=False)
    nn.init.ones_(unit.weight)
    declared = fsdp_core.SchedulePolicy(grad_accumulation_count=2)
    rows = (fsdp_core.RowAtomic(),)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with fsdp_core.fully_shard_context("cpu"):
        fsdp_core.fully_shard(
            unit, mesh, fsdp_core.Placements((0,), rows, rows, rows), schedule_policy=declared
        )
    weight = unit.weight
    unit(checkpoint(unit, _rows().requires_grad_(), use_reentrant=True)).sum().backward()
    fsdp_core.fully_shard_optimizer(torch.optim.SGD([weight], lr=1.0)).step()
    return _copies([weight])


def driven_by_hand(_rank: int) -> list[Tensor]:
    """Nothing is hooked: each unit is gathered and freed by hand."""
    model, _ = _model(hooks=False)
    weights, out = list(model.parameters()), _rows()
    with torch.no_grad():
        for _ in range(2):
            for block in model:
                block.unshard()
                out = block(out)
                block.reshard()
            _write(weights)
    return [out]


def dropped_in_flight(_rank: int) -> Tensor:
    """The model goes while its gradients are being reduced; its memory is used again at once."""
    policy = fsdp_core.RuntimePolicy(caller_managed_grad_sync=True)
    model, context = _model(policy=policy)
    model(_rows()).sum().backward()
    del model, context
    used = torch.ones(WIDTH * WIDTH)
    torch.cpu.synchronize()
    return used


def dropped(_rank: int) -> list[bool]:
    """The model goes after a step; nothing of it may wait for the garbage collector."""
    model, context = _model()
    model(_rows()).sum().backward()
    refs = [weakref.ref(part) for part in (context, *model.modules(), *model.parameters())]
    del model, context
    return [ref() is None for ref in refs]


def saved_and_loaded(_rank: int) -> list[Tensor]:
    """Weights whose rows do not spread evenly are saved, and loaded into a model of other ones."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    saved, other = _uneven(1.0), _uneven(2.0)
    fsdp_core.save_checkpoint(*saved, str(folder[0]))
    fsdp_core.load_checkpoint(*other, str(folder[0]))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(str(folder[0]))
    return _copies(list(other[0].parameters()))


def _uneven(scale: float) -> tuple[Any, torch.optim.Optimizer]:
    """Return a unit of five and three rows, numbered and scaled, and its optimizer."""
    unit = _sharded(nn.Linear(WIDTH, 5, bias=False), nn.Linear(5, 3, bias=False), scale=scale)
    optimizer = torch.optim.SGD(unit.parameters(), lr=1.0)
    fsdp_core.fully_shard_optimizer(optimizer)
    return unit, optimizer


def _sharded(*layers: nn.Module, scale: float = 1.0) -> Any:
    """Return layers with numbered and scaled weights, as one sharded unit."""
    unit = nn.Sequential(*layers)
    with torch.no_grad():
        for weight in unit.parameters():
            weight.copy_(scale * torch.arange(float(weight.numel())).view_as(weight))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = (fsdp_core.RowAtomic(),)
    with fsdp_core.fully_shard_context("cpu"):
        fsdp_core.fully_shard(unit, mesh, fsdp_core.Placements((0,), rows, rows, rows))
    return unit


PROGRAMS = (
    written_after_failure,
    written_after_broken_gather,
    written_after_unused_prefetch,
    written_after_forward,
    kept_and_written_after_unused_prefetch,
    written_while_gathered,
    written_inside_a_forward,
    written_before_recomputation,
    replaced_in_a_window,
    replaced_behind_the_outer_reduction,
    zeroed_in_place,
    accumulated,
    recomputed_between_gradients,
    driven_by_hand,
    dropped_in_flight,
    dropped,
    saved_and_loaded,
)
RANKS = 2
