"""Distributed checkpoints: save and load; chunk metadata of uneven shards."""

from torch import nn
from torch.optim import Optimizer


def save_checkpoint(model: nn.Module, optimizer: Optimizer, checkpoint_dir: str) -> None:
    """Save model and optimizer, sharded."""
    msg = "save_checkpoint is not built yet"
    raise NotImplementedError(msg)


def load_checkpoint(
    model: nn.Module, optimizer: Optimizer, checkpoint_dir: str, *, sync_model_weights: bool = True
) -> None:
    """Load model and optimizer in place."""
    msg = "load_checkpoint is not built yet"
    raise NotImplementedError(msg)
