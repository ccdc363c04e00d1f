"""A package under mutation: one call of each verb, each needed or not as its name says."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

cpu: Any = torch.cpu  # in a world it has all that torch.cuda has, which its types do not say


def reduced(value: Tensor) -> Tensor:
    """Reduce on a side stream; every call here is needed."""
    side = cpu.Stream()
    side.wait_stream(cpu.current_stream())
    with cpu.stream(side):
        dist.all_reduce(value)
    event = side.record_event()
    cpu.current_stream().wait_event(event)
    return value * 2


def reduced_by_work(value: Tensor) -> Tensor:
    """Reduce asynchronously."""
    work = dist.all_reduce(value, async_op=True)
    assert work is not None
    work.wait()
    return value * 2


def reduced_by_the_group(value: Tensor) -> Tensor:
    """Reduce synchronously, as the functions of torch.distributed do it."""
    options = dist.AllreduceOptions()
    options.asyncOp = False
    work = dist.group.WORLD.allreduce([value], options)  # type: ignore[union-attr]
    if work is not None:
        work.wait()
    return value * 2


def moved_by_host(value: Tensor) -> Tensor:
    """Use a value on another stream after the host has waited for it."""
    first, second = cpu.Stream(), cpu.Stream()
    first.wait_stream(cpu.current_stream())
    with cpu.stream(first):
        value.add_(1)
    first.synchronize()
    with cpu.stream(second):
        value.add_(1)
    second.synchronize()
    return value * 2


def lent(value: Tensor) -> None:
    """Let another stream use a tensor whose last reference goes here."""
    side, block = cpu.Stream(), value * 2
    side.wait_stream(cpu.current_stream())
    with cpu.stream(side):
        value.mul_(block)
    block.record_stream(side)
    del block
    torch.ones(4)
    cpu.current_stream().wait_stream(side)


def waited_twice(value: Tensor) -> Tensor:
    """Wait for a stream twice: either wait alone would do."""
    side = cpu.Stream()
    side.wait_stream(cpu.current_stream())
    with cpu.stream(side):
        value.add_(1)
    cpu.current_stream().wait_stream(side)
    cpu.current_stream().wait_stream(side)
    return value * 2


def waited_for_nothing(value: Tensor) -> Tensor:
    """Wait for a stream that did nothing."""
    cpu.current_stream().wait_stream(cpu.Stream())
    return value * 2


def timed(value: Tensor) -> float:
    """Ask for the time between two events, which raises if one was not recorded."""
    start, end = (cpu.Event(enable_timing=True) for _ in range(2))
    start.record()
    value.add_(1)
    end.record()
    end.synchronize()
    elapsed: float = start.elapsed_time(end)
    return elapsed


def released(value: Tensor) -> int:
    """Give memory back."""
    value.untyped_storage().resize_(0)
    return value.untyped_storage().nbytes()
