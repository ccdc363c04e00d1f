"""Models whose arithmetic is small, so that a step is host work."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ci.training import Size

VOCABULARY = 128


# Batches are those of all ranks together.
SIZES = {
    "toy": Size(layers=4, width=64, heads=4, batch=64, length=4),
    "deep": Size(layers=24, width=128, heads=4, batch=8, length=4),
}


class Block(nn.Module):
    """A transformer block of separate projections: ten parameters' worth of host work."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_in, self.norm_mid = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, length, width] to the same shape."""
        h = self.norm_in(x)
        q, k, v = (
            part(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mid(x))))


class Toy(nn.Module):
    """A small language model."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of [batch, length] tokens."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).flatten(0, 1)), targets.flatten())


def batch(size: Size, world_size: int) -> tuple[Tensor, Tensor]:
    """Return one rank's tokens and targets."""
    generator = torch.Generator().manual_seed(0)
    shape = (max(size.batch // world_size, 1), size.length + 1)
    tokens = torch.randint(0, VOCABULARY, shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
