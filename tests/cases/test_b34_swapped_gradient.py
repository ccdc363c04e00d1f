"""B34: a gradient buffer is allocated, used and replaced on one stream."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, cpu, nn

import fsdp_core
import fsdp_sim
from fsdp_core import FsdpModule, RuntimePolicy
from fsdp_core.torch_private import reduce_scatter_single
from tests.cases.programs import Training, check_parity
from tests.cases.test_b28_no_sync import Factor

MICROBATCHES = 3


def step(model: nn.Module, rank: int, number: int) -> None:
    """Three microbatches, and memory of the gradient's size taken right behind each backward."""
    context = model.context if isinstance(model, FsdpModule) else None
    for microbatch in range(MICROBATCHES):
        loss = model(rank + 10.0 * microbatch + number)
        if context is None:
            loss.backward()
            continue
        with fsdp_core.microbatch(context, is_last=microbatch == MICROBATCHES - 1):
            loss.backward()
        torch.empty(4, 2).fill_(float("nan"))
        torch.empty(2, 2).fill_(float("nan"))


TRAINING = Training(Factor, step, ("",), steps=2, mesh=(2, 2))


@pytest.mark.parametrize("overlap", [True, False])
def test_three_microbatches_have_parity_beside_allocations_of_the_same_size(overlap: bool) -> None:
    """NVIDIA/Megatron-LM#6187, #5956, #5972: one run stands for all timings of the devices."""
    options = {"runtime_policy": RuntimePolicy(overlap_outer_communication=overlap)}

    check_parity(Training(Factor, step, ("",), 2, (2, 2), options), poison=True)


def test_no_order_of_the_hosts_spoils_it() -> None:
    """What timings of the devices do not cover."""
    search = fsdp_sim.explore(fsdp_core_training, 4, schedules=4)

    assert search.first is not None


def fsdp_core_training(rank: int) -> None:
    """The training above, without its results."""
    from tests.cases.programs import train_shards

    train_shards(rank, TRAINING)


def swapped(rank: int, home: str) -> Tensor:
    """Accumulate reductions into a buffer that is replaced by each; it is born on `home`'s stream."""
    assert dist.group.WORLD is not None
    compute, reduce = cpu.current_stream(), cpu.Stream()
    with cpu.stream(reduce if home == "reduce" else compute):
        main_grad = torch.zeros(4)
    reduce.wait_stream(compute)
    for microbatch in range(MICROBATCHES):
        partial = torch.full((8,), rank + 10.0 * microbatch)
        reduce.wait_stream(compute)
        with cpu.stream(reduce):
            contribution = torch.empty(4)
            reduce_scatter_single(contribution, partial, dist.group.WORLD)
            main_grad = main_grad + contribution
        if home == "reduce":
            compute.wait_stream(reduce)
        activation = torch.full((4,), 7.0)
        del partial, contribution, activation
    compute.wait_stream(reduce)
    return main_grad.clone()


def test_a_buffer_born_on_another_stream_is_found_without_any_sleep() -> None:
    """The report has the block, its stream, the last user, the missing edge and a line to replay."""
    with pytest.raises(fsdp_sim.UseAfterFree) as caught:
        fsdp_sim.simulate(swapped, 2, args=("compute",))

    message = str(caught.value)
    assert re.search(
        r"block \d+ was freed to stream 0 \(default\), which allocates again while 'add\.Tensor' on "
        r"stream \d+ \(stream made at .*\) may still access it",
        message,
    )
    assert "missing edge: stream 0 (default) must wait for stream" in message
    line = caught.value.schedule
    assert line is not None
    with pytest.raises(fsdp_sim.UseAfterFree):
        fsdp_sim.replay(swapped, line, args=("compute",))


def test_a_buffer_that_lives_on_the_stream_that_uses_it_is_no_finding() -> None:
    """The mended program: 2 * 0.5 + 10 * 3 * 2 summed over two ranks."""
    report = fsdp_sim.simulate(swapped, 2, args=("reduce",))

    assert [each.tolist() for each in report.results] == [[63.0] * 4] * 2
