"""Programs for PyTorch's FSDP2 (torch.distributed.fsdp.fully_shard), each with a feature that orders work."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from fsdp_sim.engine import patches

WIDTH, ROWS, STEPS = 4, 2, 2


class Block(nn.Module):
    """Two linear layers, recomputed in backward if asked for."""

    def __init__(self, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.is_checkpointed = is_checkpointed

    def forward(self, rows: Tensor) -> Tensor:
        """Map rows of [ROWS, WIDTH] to the same shape."""
        if self.is_checkpointed:
            recomputed: Tensor = checkpoint(self._run, rows, use_reentrant=False)
            return recomputed
        return self._run(rows)

    def _run(self, rows: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.relu(self.up(rows)))
        return hidden


def _train(
    *,
    mesh: tuple[int, ...] | None = None,
    is_checkpointed: bool = False,
    microbatches: int = 1,
    postpone: str = "set_requires_gradient_sync",
    prepare: Callable[[nn.Sequential], None] = lambda _: None,
    after_step: Callable[[nn.Sequential], None] = lambda _: None,
    **options: Any,
) -> list[Tensor]:
    """Train three blocks for a few steps and return the losses and the local weights.

    ``postpone`` is the method that is told which microbatch is the last.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(is_checkpointed=is_checkpointed) for _ in range(3)])
    shape = mesh or (dist.get_world_size(),)
    names = ("replicate", "shard")[-len(shape) :]
    device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for block in model:
        fully_shard(block, mesh=device_mesh, **options)
    fully_shard(model, mesh=device_mesh, **options)
    prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        for number in range(microbatches):
            getattr(model, postpone)(number == microbatches - 1)
            torch.manual_seed(100 * step + 10 * number + dist.get_rank())
            loss = model(torch.randn(ROWS, WIDTH)).pow(2).mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        after_step(model)
        optimizer.zero_grad()
    return [*losses, *_local_weights(model)]


def _local_weights(model: nn.Module) -> list[Tensor]:
    with torch.no_grad():
        weights: list[Any] = [parameter.data for parameter in model.parameters()]
        return [weight.to_local().clone() for weight in weights]


def _prefetch_explicitly(model: nn.Sequential) -> None:
    blocks: list[Any] = list(model)
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])


def _unshard_asynchronously(model: nn.Sequential) -> None:
    root: Any = model
    patches.gather_asynchronously(root)


def _reduce_by_a_hook(model: nn.Sequential) -> None:
    for unit in (*model, model):
        fsdp: Any = unit
        fsdp.set_all_reduce_hook(lambda gradient: gradient.mul_(0.5))


def _gather_behind_the_optimizer(model: nn.Sequential) -> None:
    root: Any = model
    stream: Any = torch.cpu.current_stream()
    root.set_post_optim_event(stream.record_event())


def plain(_rank: int) -> list[Tensor]:
    """Full sharding."""
    return _train()


def mixed_precision(_rank: int) -> list[Tensor]:
    """Compute and gather in bf16, reduce in fp32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return _train(mp_policy=policy)


def hybrid(_rank: int) -> list[Tensor]:
    """Shards inside pairs of ranks, replicas between them."""
    return _train(mesh=(2, dist.get_world_size() // 2), microbatches=2)


def hybrid_mixed_precision(_rank: int) -> list[Tensor]:
    """Replicas reduce in bf16 what is added to fp32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return _train(mesh=(2, dist.get_world_size() // 2), mp_policy=policy)


def hybrid_accumulated(_rank: int) -> list[Tensor]:
    """Gradients are reduced to shards behind each microbatch, and over replicas once."""
    mesh = (2, dist.get_world_size() // 2)
    return _train(mesh=mesh, microbatches=2, postpone="set_requires_all_reduce")


def reduced_by_a_hook(_rank: int) -> list[Tensor]:
    """The program goes on with reduced gradients, on the stream of the second reduction."""
    return _train(prepare=_reduce_by_a_hook)


def gathered_behind_the_optimizer(_rank: int) -> list[Tensor]:
    """The next step gathers behind an event of the program, not behind all that came before."""
    return _train(after_step=_gather_behind_the_optimizer)


def kept_after_forward(_rank: int) -> list[Tensor]:
    """Weights stay gathered from forward to backward."""
    return _train(reshard_after_forward=False)


def accumulated(_rank: int) -> list[Tensor]:
    """Gradients of two microbatches are reduced once."""
    return _train(microbatches=2)


def recomputed(_rank: int) -> list[Tensor]:
    """Each block's forward runs again in backward."""
    return _train(is_checkpointed=True)


def explicitly_prefetched(_rank: int) -> list[Tensor]:
    """Each block gathers the next one's weights."""
    return _train(prepare=_prefetch_explicitly)


def asynchronously_gathered(_rank: int) -> list[Tensor]:
    """Gathers are asynchronous collectives on the group's own stream."""
    return _train(prepare=_unshard_asynchronously)


def resharded_to_pairs(_rank: int) -> list[Tensor]:
    """After forward, weights stay spread over pairs of ranks."""
    return _train(reshard_after_forward=2)


PROGRAMS = (
    plain,
    mixed_precision,
    hybrid,
    hybrid_mixed_precision,
    hybrid_accumulated,
    reduced_by_a_hook,
    gathered_behind_the_optimizer,
    kept_after_forward,
    accumulated,
    recomputed,
    explicitly_prefetched,
    asynchronously_gathered,
    resharded_to_pairs,
)
RANKS = 4
