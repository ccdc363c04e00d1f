"""Train a byte-level language model, sharded over all ranks.

Run it with ``torchrun --nproc-per-node 2 examples/train_lm.py``. The text is Python's own
documentation of its topics, so nothing is downloaded. One NCCL rank a GPU where there are GPUs, else
gloo on the CPU. Weights start from one seed on every rank; each rank draws its own batches. The loss is
printed in decimal and exactly, so that two runs can be compared bit for bit.
"""

import argparse
import os
from collections.abc import Iterable, Iterator
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn import functional as F

import fsdp_core

BYTE_VALUES = 256
Batch = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Causal self-attention of several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(width, 3 * width, bias=False)
        self.to_out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, length, width] to the same shape."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(
                1, 2
            )  # [batch, heads, length, head width]
            for part in self.to_qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.to_out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One transformer block: attention and a two-layer perceptron, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, length, width] to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    """A transformer that predicts the next byte."""

    def __init__(self, *, blocks: int, width: int, heads: int, context: int, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTE_VALUES, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, BYTE_VALUES, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, inputs: Tensor) -> Tensor:
        """Map bytes [batch, length] to logits [batch, length, 256]."""
        x = self.embedding(inputs) + self.position[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of one batch, in nats a byte."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())


def make_model(options: argparse.Namespace) -> LanguageModel:
    """Build the whole model with the weights that the seed gives, the same on every rank."""
    torch.manual_seed(options.seed)
    return LanguageModel(
        blocks=options.blocks,
        width=options.width,
        heads=options.heads,
        context=options.context,
        tied=options.tied,
    )


def make_optimizer(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    """Return AdamW over the model's parameters as they are now: shard the model first."""
    return torch.optim.AdamW(model.parameters(), lr=options.lr)


def shard(model: LanguageModel, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shard weights, gradients and optimizer state over the mesh, a unit for each block and the rest."""
    placements = fsdp_core.Placements(
        dp_axes=[0], parameter=[Shard(0)], gradient=[Shard(0)], optimizer=[Shard(0)]
    )
    precision = fsdp_core.MixedPrecisionPolicy(compute_dtype=dtype)
    with fsdp_core.fully_shard_context(torch.device(mesh.device_type)):
        for block in model.blocks:
            fsdp_core.fully_shard(block, mesh, placements, precision)
        fsdp_core.fully_shard(model, mesh, placements, precision)


def batches(options: argparse.Namespace, rank: int, device: torch.device) -> Iterator[Batch]:
    """Draw this rank's batches: inputs and targets, each bytes [batch, context]."""
    text = "".join(topics[name] for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(options.seed + rank)
    for _ in range(options.steps):
        starts = torch.randint(len(data) - options.context, (options.batch, 1), generator=generator)
        windows = data[starts + torch.arange(options.context + 1)].long().to(device)
        yield windows[:, :-1], windows[:, 1:]


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterable[Batch]
) -> Iterator[Tensor]:
    """Train one step a batch, and yield this rank's loss after each."""
    for batch in data:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def mean_over_ranks(loss: Tensor) -> float:
    """Average a loss over all ranks: gathered, then added in one order on every backend."""
    losses = [torch.empty_like(loss) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, loss)
    return torch.stack(losses).mean().item()


def start() -> torch.device:
    """Join the process group that torchrun describes; return the device of this rank."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="train a byte-level language model, sharded")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4, help="sequences a rank and step")
    parser.add_argument("--context", type=int, default=64, help="bytes a sequence")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--tied", action="store_true", help="the head shares the embedding's weight"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    return parser.parse_args(arguments)


def main() -> None:
    """Train, and print the mean loss of each step on rank 0."""
    options = parse()
    device = start()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world_size,))

    model = make_model(options).to(device)
    shard(model, mesh, getattr(torch, options.dtype))
    optimizer = make_optimizer(model, options)
    fsdp_core.fully_shard_optimizer(optimizer)

    losses = train(model, optimizer, batches(options, rank, device))
    for step, loss in enumerate(losses):
        mean = mean_over_ranks(loss)
        if rank == 0:
            print(f"step {step:4d}  loss {mean:.6f}  {mean.hex()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
