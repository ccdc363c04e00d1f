"""The models that are timed, and the ways of training them that are compared."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from ci.gpu.process import device
from ci.training import Size, Step, plain_step

VOCABULARY = 50304


SIZES = {
    "small": Size(layers=24, width=512, heads=8, batch=4, length=512),
    "large": Size(layers=24, width=2048, heads=16, batch=4, length=2048),
    "huge": Size(layers=40, width=4096, heads=32, batch=1, length=4096),
    "tiny": Size(layers=2, width=32, heads=2, batch=1, length=8),
}


class Block(nn.Module):
    """One transformer block: attention and a two-layer perceptron, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, length, width] to the same shape."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Gpt(nn.Module):
    """A decoder-only transformer with tied embedding and head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of [batch, length] tokens."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def _adamw(parameters: Sequence[Tensor]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def unsharded_bf16(model: Gpt) -> Step:
    """All in bf16: weights, gradients, optimizer state."""
    model.to(torch.bfloat16)
    return plain_step(model, _adamw(list(model.parameters())))


def floor(model: Gpt) -> Step:
    """Unsharded mixed precision: bf16 compute weights, fp32 main weights, fused AdamW on fp32."""
    mains: list[Tensor] = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    model.to(torch.bfloat16)
    weights: list[Tensor] = list(model.parameters())
    optimizer = _adamw(mains)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        for main, weight in zip(mains, weights, strict=True):
            assert weight.grad is not None
            main.grad = weight.grad.float()
            weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(weights, mains)
        return loss

    return step


def ddp(model: Gpt) -> Step:
    """PyTorch's replicated data parallelism, in bf16."""
    from torch.nn.parallel import DistributedDataParallel

    model.to(torch.bfloat16)
    wrapped = DistributedDataParallel(model)
    return plain_step(wrapped, _adamw(list(model.parameters())))


def fsdp2(model: Gpt) -> Step:
    """PyTorch's own fully-sharded data parallelism: bf16 compute, fp32 main weights."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return plain_step(model, _adamw(list(model.parameters())))


def fsdp_core_(model: Gpt) -> Step:
    """This repository's runtime: bf16 compute, fp32 main weights."""
    import fsdp_core

    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    shards = (Shard(0),)
    placements = fsdp_core.Placements((0,), shards, shards, shards)
    policy = fsdp_core.MixedPrecisionPolicy(
        main_grads_dtype=torch.float32, compute_dtype=torch.bfloat16
    )
    with fsdp_core.fully_shard_context():
        for block in model.blocks:
            fsdp_core.fully_shard(block, mesh, placements, policy)
        fsdp_core.fully_shard(model, mesh, placements, policy)
    optimizer = _adamw(list(model.parameters()))
    fsdp_core.fully_shard_optimizer(optimizer)
    return plain_step(model, optimizer)


WAYS: dict[str, Callable[[Gpt], Step]] = {
    "unsharded bf16": unsharded_bf16,
    "floor": floor,
    "DDP": ddp,
    "FSDP2": fsdp2,
    "fsdp_core": fsdp_core_,
}
