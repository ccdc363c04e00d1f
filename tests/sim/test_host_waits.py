"""Host waits: what stops CUDA's host, what does not, and whose a tensor is on a CPU mesh."""

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fsdp_sim
from fsdp_sim.op import Kind
from tests.sim.litmus import cpu, findings, is_racy, ops_of


def stops_the_host(action: Callable[[Tensor], Any]) -> bool:
    """Whether ``action`` on a tensor of a side stream makes the host wait for that stream."""

    def program() -> None:
        side, x = cpu.Stream(), torch.zeros(4)
        side.wait_stream(cpu.current_stream())
        with cpu.stream(side):
            x.fill_(1)
            action(x)
        x.add(1)

    return not is_racy(program)


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0] > 0),
    "float": lambda x: float(x[0]),
    "int": lambda x: int(x[0]),
    "format": lambda x: f"{x[0]:.1f}",
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "dlpack": lambda x: np.from_dlpack(x),
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu"),
    "to cpu by keyword": lambda x: x.to(device="cpu"),
    "repr": lambda x: repr(x),
    "print in a string": lambda x: f"{x}",
    "save": lambda x: torch.save(x, io.BytesIO()),
    "in": lambda x: 1.0 in x,
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "nonzero": lambda x: x.nonzero(),
    "where without values": lambda x: torch.where(x > 0),
    "masked_select": lambda x: x.masked_select(x > 0),
    "index by a mask": lambda x: x[x > 0],
    "set by a mask": lambda x: x.clone().__setitem__(x > 0, torch.zeros(4)),
    "unique": lambda x: torch.unique(x),
    "bincount": lambda x: torch.bincount(x.long()),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x.long()),
    "copy to the host": lambda x: torch.tensor([0.0] * 4).copy_(x),
    "cholesky": lambda x: torch.linalg.cholesky(torch.diag(x)),
}

GOES_ON: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda x: x * 2,
    "compare": lambda x: x > 0,
    "to another dtype": lambda x: x.to(torch.float64),
    "to the device": lambda x: x.to(torch.device("cpu")),
    "cpu without blocking": lambda x: x.to("cpu", non_blocking=True),
    "copy to the host without blocking": lambda x: torch.tensor([0.0] * 4).copy_(
        x, non_blocking=True
    ),
    "copy from the host": lambda x: x.copy_(torch.tensor([0.0] * 4)),
    "index by positions": lambda x: x[torch.tensor([0, 1])],
    "set one number by a mask": lambda x: x.clone().__setitem__(x > 0, 0.0),
    "where with values": lambda x: torch.where(x > 0, x, 0.0),
    "repeat_interleave to a given size": lambda x: torch.repeat_interleave(
        x, x.long(), output_size=4
    ),
    "deepcopy": lambda x: copy.deepcopy(x),
    "data_ptr": lambda x: x.data_ptr(),
    "shape": lambda x: (x.shape, x.numel(), len(x)),
    "assertion on the device": lambda x: torch._assert_async(x[0] > 0),
}


@pytest.mark.parametrize("name", READS)
def test_the_host_waits_to_see_a_value(name: str) -> None:
    """Whatever shows the host a value or a size that depends on values waits for the stream."""
    assert stops_the_host(READS[name])


@pytest.mark.parametrize("name", GOES_ON)
def test_the_host_goes_on_where_it_sees_no_value(name: str) -> None:
    """Work that stays on the device does not stop the host."""
    assert not stops_the_host(GOES_ON[name])


def test_a_host_wait_parks_until_the_values_are_there() -> None:
    """A read behind a collective gives the collective's result, on every rank."""

    def program(rank: int) -> list[float]:
        x = torch.full((2,), float(rank))
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()
        values: list[float] = x.tolist()
        return values

    assert fsdp_sim.simulate(program, 3).results == [[3.0, 3.0]] * 3


def test_printing_is_one_read() -> None:
    """What formatting does inside PyTorch is no part of the trace."""
    ops = ops_of(lambda: repr(torch.ones(4)))

    assert [op.name for op in ops if op.kind is Kind.ATEN] == ["ones", "print"]


# ---------------------------------------------------------------------- whose a tensor is


def test_what_is_computed_from_python_data_alone_is_the_hosts() -> None:
    """Adam's step counter is read every step without stopping the host."""

    def program() -> None:
        step = torch.tensor(0.0)
        step += 1
        (step * 2).item()

    kinds = {op.kind for op in ops_of(program)}

    assert Kind.ATEN not in kinds
    assert Kind.HOST_WAIT_STREAM not in kinds


def test_adam_does_not_stop_the_host() -> None:
    """A step of the single-tensor loop reads its counters, and waits for nothing."""

    def program() -> None:
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = torch.optim.Adam([weight], foreach=False)
        for _ in range(2):
            weight.sum().backward()
            optimizer.step()

    assert Kind.HOST_WAIT_STREAM not in {op.kind for op in ops_of(program)}


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([1.0], device=torch.device("cpu")),
        lambda: torch.as_tensor([1.0], device=torch.device("cpu")),
        lambda: torch.ones(1).new_tensor([1.0]),
        lambda: torch.full((1,), 1.0),
    ],
)
def test_what_is_made_on_a_device_is_the_devices(make: Callable[[], Tensor]) -> None:
    """A device given by name, or a factory of the device, makes a device tensor."""
    ops = ops_of(lambda: make().item())

    assert Kind.HOST_WAIT_STREAM in {op.kind for op in ops}


def test_python_data_used_together_with_device_tensors_moves_to_the_device() -> None:
    """A batch made from Python data is a device tensor once the model has used it."""

    def program() -> None:
        batch = torch.tensor([[1.0, 2.0]])
        batch @ torch.ones(2, 2)
        batch.tolist()

    ops = ops_of(program)

    assert [op.name for op in ops if op.kind is Kind.HOST_WAIT_STREAM] == ["tolist"]


def test_a_collective_moves_its_tensors_to_the_device() -> None:
    """NCCL takes no host tensors: what was made from Python data is read as the device's."""

    def program(rank: int) -> float:
        x = torch.tensor([float(rank)])
        dist.all_reduce(x)
        return x.item()

    assert fsdp_sim.simulate(program, 3).results == [3.0] * 3


def test_a_single_number_of_the_host_may_take_part_anywhere() -> None:
    """A zero-dimensional host tensor scales device tensors and stays the host's."""

    def program() -> None:
        factor = torch.tensor(2.0)
        torch.ones(4) * factor
        factor.item()

    assert Kind.HOST_WAIT_STREAM not in {op.kind for op in ops_of(program)}


def test_a_number_that_gathers_device_values_is_the_devices() -> None:
    """A running sum in a zero-dimensional tensor is on the device: reading it waits."""

    def program() -> float:
        total = torch.tensor(0.0)
        total += torch.ones(4).sum()
        return total.item()

    assert Kind.HOST_WAIT_STREAM in {op.kind for op in ops_of(program)}


def test_outputs_of_an_op_that_waits_are_device_memory() -> None:
    """The result of nonzero is allocated on the stream, and races like any other tensor."""

    def program() -> None:
        side = cpu.Stream()
        with cpu.stream(side):
            positions = torch.ones(4).nonzero()
            positions.add_(1)
        positions.add(1)

    assert "Race" in {finding.kind for finding in findings(program)}
