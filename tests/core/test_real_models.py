"""Models that nobody here wrote, randomly initialised, sharded layer by layer: the bits of one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_core
import fsdp_sim
from tests.cases.programs import shard

transformers = pytest.importorskip("transformers", reason="needs the package transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "use_cache": False,
    "attn_implementation": "eager",
}


def build(kind: str) -> nn.Module:
    """A small model with the same weights each time."""
    torch.manual_seed(0)
    if kind == "llama":
        model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    else:
        config = transformers.MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **SIZES)
        model = transformers.MixtralForCausalLM(config)
    return model


def loss_of(model: nn.Module, number: int, rank: int) -> Tensor:
    """The loss on a rank's tokens of a step."""
    generator = torch.Generator().manual_seed(10 * number + rank)
    tokens = torch.randint(0, 32, (2, 6), generator=generator)
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def train_shards(rank: int, kind: str, steps: int) -> list[Tensor]:
    """Losses of a rank, sharded layer by layer."""
    model = build(kind)
    shard(model, "model.layers.0", "model.layers.1", "")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    fsdp_core.fully_shard_optimizer(optimizer)
    losses = []
    for number in range(steps):
        loss = loss_of(model, number, rank)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_unsharded(kind: str, steps: int) -> list[list[Tensor]]:
    """Losses by rank: each rank's batch in turn, gradients added in rank order and averaged."""
    model = build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses: list[list[Tensor]] = [[], []]
    for number in range(steps):
        for rank in range(2):
            loss = loss_of(model, number, rank)
            loss.backward()
            losses[rank].append(loss.detach())
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_model_of_transformers_trains_as_unsharded(kind: str) -> None:
    """Losses of three AdamW steps are equal bit for bit, and nothing is found."""
    report = fsdp_sim.simulate(train_shards, 2, args=(kind, 3))

    assert report.results == train_unsharded(kind, 3)
