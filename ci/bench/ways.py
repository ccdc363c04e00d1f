"""The ways of training a bench model that are compared."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from ci.bench.models import Toy
from ci.training import Step, plain_step


def unsharded(model: Toy) -> Step:
    """No distribution at all."""
    return plain_step(model, torch.optim.Adam(model.parameters(), lr=1e-3))


def ddp(model: Toy) -> Step:
    """Replicated; its backward does not run on the ``fake`` backend."""
    wrapped = nn.parallel.DistributedDataParallel(model)
    return plain_step(wrapped, torch.optim.Adam(model.parameters(), lr=1e-3))


def fsdp2(model: Toy) -> Step:
    """PyTorch's own sharding: each block and the root."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return plain_step(model, torch.optim.Adam(model.parameters(), lr=1e-3))


def fsdp_core(model: Toy) -> Step:
    """This repository's: each block and the root."""
    import fsdp_core as core

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shards = (Shard(0),)
    placements = core.Placements((0,), shards, shards, shards)
    with core.fully_shard_context():
        for block in model.blocks:
            core.fully_shard(block, mesh, placements)
        core.fully_shard(model, mesh, placements)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    core.fully_shard_optimizer(optimizer)
    return plain_step(model, optimizer)


WAYS: dict[str, Callable[[Toy], Step]] = {
    "unsharded": unsharded,
    "FSDP2": fsdp2,
    "fsdp_core": fsdp_core,
    "DDP": ddp,
}
