"""B44: gradients on two meshes have one norm, in which replicated elements count once."""

import math

import pytest
import torch
from torch import Tensor, nn

import fsdp_core
import fsdp_sim
from fsdp_core import grad_norm
from tests.cases.programs import HYBRID, SHARDED, linear, mesh_of

DENSE, EXPERT = 3.0, 4.0


def build() -> nn.Module:
    """A dense and an expert layer of one element each."""
    return nn.ModuleDict({"dense": linear(1, 1), "expert": linear(1, 1)})


def norm_of_both(rank: int, norm_type: float = 2.0, max_norm: float = 10.0) -> float:
    """Shard one layer over 4 ranks, the other over 2 with a copy on the other 2."""
    model = build()
    with fsdp_core.fully_shard_context():
        fsdp_core.fully_shard(model.get_submodule("dense"), mesh_of(4), SHARDED)
        fsdp_core.fully_shard(model.get_submodule("expert"), mesh_of(2, 2), HYBRID)
    one = torch.ones(1, 1)
    dense: Tensor = model.get_submodule("dense")(one)
    expert: Tensor = model.get_submodule("expert")(one)
    (dense * DENSE + expert * EXPERT).sum().backward()
    return fsdp_core.clip_grad_norm_(model.parameters(), max_norm, norm_type).item()


def test_the_norm_of_3_and_4_is_5_on_every_rank() -> None:
    """NVIDIA/Megatron-LM#6489, pytorch#180346: three ranks hold nothing of the dense layer."""
    assert fsdp_sim.simulate(norm_of_both, 4).results == [5.0] * 4


def test_the_largest_element_is_4_on_every_rank() -> None:
    """The norm of infinite order."""
    assert fsdp_sim.simulate(norm_of_both, 4, args=(math.inf,)).results == [4.0] * 4


def test_a_copy_that_counts_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect planted: the expert's element is added once on each of two replicas."""
    monkeypatch.setattr(grad_norm, "copies_of", lambda _grad: 1)

    norms = fsdp_sim.simulate(norm_of_both, 4).results

    assert norms == [pytest.approx(math.sqrt(DENSE**2 + 2 * EXPERT**2))] * 4
