"""The same training unsharded, in one process: what the simulated ranks must equal bit for bit."""

import argparse
from collections.abc import Iterator
from functools import reduce

import torch
from torch import Tensor, nn

from examples.train_lm import Batch, batches, loss_of, make_model, make_optimizer

CPU = torch.device("cpu")


def gradients_of(model: nn.Module, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of one rank's batch and its gradients, in the order of the parameters."""
    loss = loss_of(model, batch)
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


def train_in_turn(
    model: nn.Module, options: argparse.Namespace, world_size: int
) -> Iterator[float]:
    """Train a model with each rank's batch in turn, and yield the mean loss of each step.

    Gradients are added in rank order and divided once, as the simulated reduction does, so the result
    is the sharded one to the last bit.
    """
    optimizer = make_optimizer(model, options)
    for of_ranks in zip(*(batches(options, rank, CPU) for rank in range(world_size)), strict=True):
        losses, gradients = zip(*(gradients_of(model, batch) for batch in of_ranks), strict=True)
        for parameter, parts in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
            parameter.grad = reduce(torch.add, parts) / world_size
        optimizer.step()
        yield torch.stack(losses).mean().item()


def train_at_once(options: argparse.Namespace, world_size: int) -> Iterator[float]:
    """Train on all ranks' batches as one: the same mathematics, other roundings."""
    model = make_model(options)
    optimizer = make_optimizer(model, options)
    for of_ranks in zip(*(batches(options, rank, CPU) for rank in range(world_size)), strict=True):
        inputs, targets = (torch.cat(parts) for parts in zip(*of_ranks, strict=True))
        loss = loss_of(model, (inputs, targets))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()
