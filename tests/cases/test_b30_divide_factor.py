"""B30: a divisor of one's own means the same on meshes of one and of two axes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import fsdp_sim
from fsdp_core import MixedPrecisionPolicy
from fsdp_core.parameter_group import ParameterGroup
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


def test_a_divisor_that_also_counts_the_outer_axis_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The defect planted: half as much on a mesh of two axes as on one of a single axis."""
    reduce = ParameterGroup.reduce

    def divide_by_replicas(group: ParameterGroup) -> None:
        spec = group._spec
        replicas = torch.Size(spec.axes.sizes[:-1]).numel()
        group._spec = replace(spec, grad_divisor=spec.grad_divisor * replicas)
        reduce(group)
        group._spec = spec

    monkeypatch.setattr(ParameterGroup, "reduce", divide_by_replicas)

    def program(_rank: int, mesh: tuple[int, ...]) -> float:
        model = Factor()
        shard(model, "", mesh=mesh, grad_divisor=256)
        model(1.0).backward()
        gradient = model.weight.grad.full_tensor()  # type: ignore[union-attr]
        return float(gradient[0, 0])

    for mesh, expected in (((8,), 1 / 256), ((2, 4), 1 / 512)):
        assert fsdp_sim.simulate(program, 8, args=(mesh,)).results == [expected] * 8
