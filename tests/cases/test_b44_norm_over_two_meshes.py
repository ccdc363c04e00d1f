"""B44: gradients on two meshes have one norm, in which replicated elements count once."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_core
import fsdp_sim
from fsdp_core import grad_norm
from tests.cases.programs import HYBRID, SHARDED, Tensors, assert_equal, linear, mesh_of
from tests.core.worlds import on_ranks, unsharded

DENSE, EXPERT = 3.0, 4.0


def build() -> nn.Module:
    """A dense and an expert layer of one element each."""
    return nn.ModuleDict({"dense": linear(1, 1), "expert": linear(1, 1)})


def loss_of(model: nn.Module) -> Tensor:
    """A loss whose gradients are 3 for the dense layer and 4 for the expert."""
    one = torch.ones(1, 1)
    dense: Tensor = model.get_submodule("dense")(one)
    expert: Tensor = model.get_submodule("expert")(one)
    return (dense * DENSE + expert * EXPERT).sum()


def clip_both(_rank: int, norm_type: float = 2.0, max_norm: float = 10.0) -> tuple[float, Tensors]:
    """Shard one layer over 4 ranks, the other over 2 with a copy on the other 2; clip, and make whole."""
    model = build()
    with fsdp_core.fully_shard_context():
        fsdp_core.fully_shard(model.get_submodule("dense"), mesh_of(4), SHARDED)
        fsdp_core.fully_shard(model.get_submodule("expert"), mesh_of(2, 2), HYBRID)
    loss_of(model).backward()
    norm = fsdp_core.clip_grad_norm_(model.parameters(), max_norm, norm_type).item()
    named: Any = model.named_parameters()
    return norm, {name: each.grad.full_tensor() for name, each in named}


def clip_whole(norm_type: float, max_norm: float) -> tuple[float, Tensors]:
    """What PyTorch does with the whole model."""
    model = build()
    loss_of(model).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    return norm.item(), {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.everywhere
@pytest.mark.parametrize(("norm_type", "expected"), [(2.0, 5.0), (math.inf, EXPERT)])
def test_gradients_of_both_are_clipped_by_one_norm_on_every_rank(
    norm_type: float, expected: float
) -> None:
    """NVIDIA/Megatron-LM#6489, pytorch#180346: three ranks hold nothing of the dense layer."""
    norm, clipped = unsharded(lambda: clip_whole(norm_type, 1.0))

    assert norm == expected
    for mine, gradients in on_ranks(lambda rank: clip_both(rank, norm_type, 1.0), 4):
        assert mine == norm
        assert_equal(gradients, clipped)


@pytest.mark.everywhere
def test_gradients_within_the_norm_keep_their_bits() -> None:
    """A norm of 5 where 10 is allowed."""
    _, gradients = unsharded(lambda: clip_whole(2.0, math.inf))

    for norm, clipped in on_ranks(clip_both, 4):
        assert norm == 5.0
        assert_equal(clipped, gradients)


def test_a_copy_that_counts_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect planted: the expert's element is added once on each of two replicas."""
    monkeypatch.setattr(grad_norm, "copies_of", lambda _grad: 1)

    norms = [norm for norm, _ in fsdp_sim.simulate(clip_both, 4).results]

    assert norms == [pytest.approx(math.sqrt(DENSE**2 + 2 * EXPERT**2))] * 4
