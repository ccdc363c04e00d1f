"""The example's training on simulated ranks, whose weights can be put back together."""

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp_core
from ci.tour.reference import CPU
from examples.train_lm import batches, make_model, make_optimizer, mean_over_ranks, shard, train


class Trained(NamedTuple):
    """What one rank has after its training."""

    losses: list[float]
    shards: dict[str, Tensor]


def train_on_rank(rank: int, options: argparse.Namespace, on_step: Callable[[], None]) -> Trained:
    """Train as the example does; call ``on_step`` on rank 0 after each step."""
    model = make_model(options)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard(model, mesh, getattr(torch, options.dtype))
    optimizer = make_optimizer(model, options)
    fsdp_core.fully_shard_optimizer(optimizer)
    losses: list[float] = []
    for loss in train(model, optimizer, batches(options, rank, CPU)):
        losses.append(mean_over_ranks(loss))
        if rank == 0:
            on_step()
    return Trained(losses, {name: shard_of(weight) for name, weight in model.named_parameters()})


def shard_of(weight: Tensor) -> Tensor:
    """Return this rank's rows of a weight."""
    assert isinstance(weight, DTensor)
    return weight.to_local().detach().clone()


def whole_weights(of_ranks: list[Trained]) -> dict[str, Tensor]:
    """Put the weights back together: rows lie on the ranks in order."""
    names = of_ranks[0].shards
    return {name: torch.cat([trained.shards[name] for trained in of_ranks]) for name in names}
