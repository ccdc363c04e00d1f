"""What the benchmarks on the host and on a GPU share: the size of a model, and its training step."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Step = Callable[[Tensor, Tensor], Tensor]
"""Trains once on tokens and targets, and returns the loss."""


@dataclass(frozen=True)
class Size:
    """A model and its batch."""

    layers: int
    width: int
    heads: int
    batch: int
    length: int


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Return the step of a model that maps tokens and targets to their mean loss."""

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step
