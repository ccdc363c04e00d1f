"""The example's training on simulated ranks, with its weights put back together at the end."""

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp_core
from ci.tour.figures import STEP_RANGE
from ci.tour.reference import CPU
from examples.train_lm import batches, make_model, make_optimizer, mean_over_ranks, shard, train


class Trained(NamedTuple):
    """What one rank has after its training."""

    losses: list[float]
    weights: dict[str, Tensor]


def train_on_rank(rank: int, options: argparse.Namespace, on_step: Callable[[], None]) -> Trained:
    """Train as the example does; call ``on_step`` on rank 0 after each step."""
    import torch

    model = make_model(options)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard(model, mesh, getattr(torch, options.dtype))
    optimizer = make_optimizer(model, options)
    fsdp_core.fully_shard_optimizer(optimizer)
    losses: list[float] = []
    steps = train(model, optimizer, batches(options, rank, CPU))
    for _ in range(options.steps):
        with record_function(STEP_RANGE):
            losses.append(mean_over_ranks(next(steps)))
        if rank == 0:
            on_step()
    return Trained(losses, {name: whole(weight) for name, weight in model.named_parameters()})


def whole(weight: Tensor) -> Tensor:
    """Return a weight as it was before it was sharded."""
    return weight.detach().full_tensor() if isinstance(weight, DTensor) else weight.detach()
