"""B66: a process group that was built by hand is refused on first use, and never does nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup

import fsdp_sim
from fsdp_sim.op import Kind

WORLD_SIZE = 3


def fake_group(rank: int) -> Any:
    """PyTorch's fake backend, made without its start-up."""
    return FakeProcessGroup._create_internal(rank, WORLD_SIZE)


def plain_group(rank: int) -> Any:
    """A process group around that backend."""
    group = dist.ProcessGroup(dist.HashStore(), rank, WORLD_SIZE)
    custom = dist.ProcessGroup.BackendType.CUSTOM
    group._register_backend(torch.device("cpu"), custom, fake_group(rank))
    group._set_default_backend(custom)
    return group


def by_method(group: Any, tensor: Tensor) -> None:
    """Call the group itself."""
    group.allreduce([tensor]).wait()


def by_function(group: Any, tensor: Tensor) -> None:
    """Call torch.distributed."""
    dist.all_reduce(tensor, group=group)


@pytest.mark.parametrize("make", [fake_group, plain_group])
@pytest.mark.parametrize("reduce", [by_method, by_function])
def test_a_group_that_no_start_up_made_raises(
    make: Callable[[int], Any], reduce: Callable[[Any, Tensor], None]
) -> None:
    """pytorch#162129: each rank would keep its own numbers, and the trace would show nothing."""

    def program(rank: int) -> None:
        tensor = torch.tensor([1.0, 2.0, 3.0])
        with pytest.raises((RuntimeError, ValueError)) as caught:
            reduce(make(rank), tensor)
        assert any(
            said in str(caught.value)
            for said in (
                "by hand",
                "own in the running world",
                "not initialized in the world group",
            )
        )

    report = fsdp_sim.simulate(program, WORLD_SIZE, trace=True)

    assert [op for op in report.trace.all_ops() if op.kind is Kind.COLLECTIVE] == []


def test_a_group_of_torch_distributed_adds_up_and_is_in_the_trace() -> None:
    """What the program should have done."""

    def program(rank: int) -> list[float]:
        tensor = torch.tensor([1.0, 2.0, 3.0])
        by_function(dist.new_group([0, 1, 2]), tensor)
        return tensor.tolist()

    report = fsdp_sim.simulate(program, WORLD_SIZE, trace=True)

    assert report.results == [[3.0, 6.0, 9.0]] * WORLD_SIZE
    ops = [op for op in report.trace.all_ops() if op.kind is Kind.COLLECTIVE]
    assert [op.name for op in ops] == ["all_reduce"] * WORLD_SIZE
