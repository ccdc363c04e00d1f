"""torch.amp.GradScaler on shards: an overflow that one rank sees is one that all see.

PyTorch asks the ranks of one mesh alone, that of the optimizer's first gradient. Others would step
where these skip, and go on with another scale.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_core.module import complete_gradients
from fsdp_core.parameter_group import owner_of, parameters_held
from fsdp_core.placement import copies_of
from fsdp_core.torch_private import local_tensor, unscale_through

# What a GradScaler found on each device: 1 if some gradient there is infinite or no number.
Found = dict[torch.device, Tensor]


def watch_scalers() -> None:
    """Have every GradScaler of the process ask all ranks of sharded gradients, from the first unit on."""
    unscale_through(_unscale)


def _unscale(optimizer: Optimizer, unscale: Callable[[Any], Found]) -> Found:
    """Unscale the gradients of an optimizer in place, and have all ranks find the same.

    Why all, and not those of its meshes: a scaler has one scale, and other optimizers, which are to
    go on alike on every rank.

    Args:
        optimizer: with sharded parameters or without.
        unscale: what PyTorch does with the parameters of anything that has groups of them.

    Ordering:
        Reads and writes gradients on the current stream, which is put behind the reductions.
        Collective on the default process group, unless every rank holds all elements.

    Raises:
        StateError: some gradients are still to come.
    """
    parameters = parameters_held(optimizer)
    if not any(map(owner_of, parameters)):
        return unscale(optimizer)
    complete_gradients(parameters)
    grads = [each.grad for each in parameters if each.grad is not None]
    found = unscale(
        SimpleNamespace(param_groups=[{"params": list(map(_on_this_rank, parameters))}])
    )
    if any(copies_of(grad) < dist.get_world_size() for grad in grads):
        for each in found.values():
            dist.all_reduce(each, op=dist.ReduceOp.MAX)
    return found


def _on_this_rank(parameter: Tensor) -> Tensor:
    """Return something whose gradient is a plain tensor over this rank's rows of a parameter's."""
    grad = parameter.grad
    if not isinstance(grad, DTensor):
        return parameter
    rows = local_tensor(grad).detach()
    rows.grad = local_tensor(grad)
    return rows
