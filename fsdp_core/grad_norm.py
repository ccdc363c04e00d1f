"""clip_grad_norm_ over sharded, replicated and expert gradients."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_core.errors import ConfigError
from fsdp_core.module import complete_gradients
from fsdp_core.placement import copies_of
from fsdp_core.torch_private import local_tensor, norms_of

# As in torch.nn.utils.clip_grad_norm_: added once to the whole norm, so that 0 can be divided by.
EPSILON = 1e-6


def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scale gradients in place so that their norm over all ranks is at most `max_norm`.

    Each element counts once: every rank adds up what it holds, divided by how many ranks of its mesh
    hold the same, and the default process group adds that up. So gradients on several meshes (dense
    and expert ones) have one norm, the same on every rank; ranks outside a parameter's mesh are taken
    to hold other parameters. A parameter of no unit is taken to be the same on all ranks.

    Args:
        parameters: those whose gradients are clipped; the same kinds on every rank.
        max_norm: the largest norm.
        norm_type: the order of the norm; `inf` is the largest absolute value.

    Ordering:
        Reads and writes gradients on the current stream, which is put behind the reductions.
        Collective on the default process group.

    Returns:
        The norm before clipping, a scalar on the device of the gradients.

    Raises:
        ConfigError: a norm that is no number, or an order that is not positive.
        StateError: some gradients are still to come.
    """
    _check_numbers(max_norm, norm_type)
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    complete_gradients(parameters)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    locals_ = [local_tensor(each) if isinstance(each, DTensor) else each for each in grads]
    held = [each for each in locals_ if each.numel()]
    with torch.no_grad():
        device = parameters[0].device if parameters else torch.device("cpu")
        total = _norm_over_ranks(grads, locals_, norm_type, device)
        coefficient = torch.clamp(max_norm / (total + EPSILON), max=1.0)
        if held:
            torch._foreach_mul_(held, coefficient)
    return total


def _check_numbers(max_norm: float, norm_type: float) -> None:
    if math.isnan(max_norm) or max_norm < 0:
        msg = (
            f"max_norm must be a number that is not negative, got {max_norm!r}; pass inf to clip "
            f"nothing"
        )
        raise ConfigError(msg)
    if math.isnan(norm_type) or norm_type <= 0:
        msg = (
            f"norm_type must be positive, or inf, got {norm_type!r}; pass 2 for the Euclidean norm"
        )
        raise ConfigError(msg)


def _norm_over_ranks(
    grads: list[Tensor], locals_: list[Tensor], norm_type: float, device: torch.device
) -> Tensor:
    by_copies: dict[int, list[Tensor]] = {}
    for whole, local in zip(grads, locals_, strict=True):
        if local.numel():
            by_copies.setdefault(copies_of(whole), []).append(local)
    norms = {copies: norms_of(held, norm_type) for copies, held in by_copies.items()}
    total = torch.zeros((), device=device)
    if math.isinf(norm_type):
        for each in norms.values():
            total = torch.maximum(total, each.max())
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
        return total
    for copies, each in norms.items():
        total = total + each.pow(norm_type).sum() / copies
    dist.all_reduce(total)
    return total.pow(1.0 / norm_type)
