"""B30: a divisor of one's own means the same on meshes of one and of two axes."""

import pytest
import torch
from torch import Tensor

import fsdp_sim
from fsdp_core import MixedPrecisionPolicy
from tests.cases.programs import local_rows, shard
from tests.cases.test_b28_no_sync import Factor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mesh", [(8,), (2, 4)])
def test_the_divisor_comes_on_top_of_the_mean(mesh: tuple[int, ...], dtype: torch.dtype) -> None:
    """pytorch#155903: gradients of 1 on 8 ranks give 1/300, rounded once, in the reduce dtype."""

    def program(rank: int) -> Tensor | None:
        model = Factor()
        policy = MixedPrecisionPolicy(grad_comm_dtype=dtype)
        shard(model, "", mesh=mesh, grad_divisor=300, mixed_precision_policy=policy)
        model(1.0).backward()
        return local_rows(model, grads=True)["weight"]

    one = (torch.ones((), dtype=dtype) / 300).float()
    for gradient in fsdp_sim.simulate(program, 8).results:
        assert torch.equal(gradient, one.expand_as(gradient))
