"""Handles, Futures and lifetimes: what NCCL would keep alive is kept, and nothing else."""

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn

import fsdp_sim

untyped: Any = dist
cpu: Any = torch.cpu


def run(program: Callable[[int], Any], world_size: int = 2) -> list[Any]:
    """Run a program that must give no finding."""
    return fsdp_sim.simulate(program, world_size, poison=True).results


def async_sum(value: torch.Tensor) -> Any:
    """Issue an all-reduce; return its handle."""
    return dist.all_reduce(value, async_op=True)


# ---------------------------------------------------------------------- handles


def test_a_handle_is_not_complete_before_the_last_rank_has_issued() -> None:
    """Rank 0 asks while rank 1 has not come."""

    def program(rank: int) -> bool:
        if rank == 1:
            untyped.distributed_c10d._get_default_store().get("asked")
        work = async_sum(torch.ones(1))
        is_complete = bool(work.is_completed())
        if rank == 0:
            untyped.distributed_c10d._get_default_store().set("asked", "")
        work.wait()
        return is_complete

    assert run(program)[0] is False


def test_a_handle_is_complete_once_the_host_has_waited() -> None:
    """After ``synchronize`` nothing is left to chance."""

    def program(rank: int) -> bool:
        work = async_sum(torch.ones(1))
        work.wait()
        cpu.synchronize()
        return bool(work.is_completed() and work.is_success() and work.exception() is None)

    assert run(program) == [True, True]


@pytest.mark.parametrize("join", ["wait", "synchronize", "block_current_stream"])
def test_each_way_of_joining_orders_the_current_stream(join: str) -> None:
    """Without one it is a race."""

    def program(rank: int, *, joins: bool) -> float:
        value = torch.ones(2)
        work = async_sum(value)
        if joins:
            getattr(work, join)()
        doubled = value * 2
        work.wait()
        return doubled.sum().item()

    assert fsdp_sim.simulate(lambda rank: program(rank, joins=True), 2).results == [8.0, 8.0]
    with pytest.raises(fsdp_sim.Race):
        fsdp_sim.simulate(lambda rank: program(rank, joins=False), 2)


def test_a_wait_orders_the_stream_that_is_current_then() -> None:
    """Not the one that the collective was issued from."""

    def program(rank: int) -> float:
        value, stream = torch.ones(2), cpu.Stream()
        work = async_sum(value)
        with cpu.stream(stream):
            work.wait()
        return (value * 2).sum().item()

    with pytest.raises(fsdp_sim.Race):
        run(program)


def test_a_synchronous_collective_runs_on_the_current_stream() -> None:
    """On a side stream it is that stream that the reader must wait for."""

    def program(rank: int, *, waits: bool) -> float:
        value, stream = torch.ones(2), cpu.Stream()
        stream.wait_stream(cpu.current_stream())
        with cpu.stream(stream):
            dist.all_reduce(value)
        if waits:
            cpu.current_stream().wait_stream(stream)
        return (value * 2).sum().item()

    assert fsdp_sim.simulate(lambda rank: program(rank, waits=True), 2).results == [8.0, 8.0]
    with pytest.raises(fsdp_sim.Race):
        fsdp_sim.simulate(lambda rank: program(rank, waits=False), 2)


def test_an_asynchronous_collective_is_behind_the_stream_that_issues_it() -> None:
    """Its input was written there."""

    def program(rank: int) -> float:
        stream, value = cpu.Stream(), torch.zeros(2)
        stream.wait_stream(cpu.current_stream())
        with cpu.stream(stream):
            value.add_(1)
            work = async_sum(value)
        work.wait()
        return value.sum().item()

    assert run(program) == [4.0, 4.0]


def test_overwriting_an_input_before_the_wait_is_a_race() -> None:
    """A gather may still read it."""

    def program(rank: int) -> None:
        out, value = [torch.empty(2), torch.empty(2)], torch.ones(2)
        work = dist.all_gather(out, value, async_op=True)
        value.zero_()
        assert work is not None
        work.wait()

    with pytest.raises(fsdp_sim.Race):
        run(program)


def test_reading_an_input_before_the_wait_is_clean() -> None:
    """Two readers do not collide."""

    def program(rank: int) -> float:
        out, value = [torch.empty(2), torch.empty(2)], torch.ones(2)
        work = dist.all_gather(out, value, async_op=True)
        doubled = value * 2
        assert work is not None
        work.wait()
        return doubled.sum().item()

    assert run(program) == [4.0, 4.0]


def test_many_collectives_may_be_in_flight() -> None:
    """One rank is far ahead of the other; values arrive where they belong."""

    def program(rank: int) -> list[float]:
        values = [torch.full((1,), float(each)) for each in range(50)]
        works = [async_sum(value) for value in values]
        for work in works:
            work.wait()
        return [value.item() for value in values]

    assert run(program) == [[2.0 * each for each in range(50)]] * 2


def test_a_collective_may_take_the_output_of_one_in_flight() -> None:
    """As a reduce-scatter that feeds an all-reduce: the second waits for values, not the host."""

    def program(rank: int) -> float:
        value = torch.full((4,), rank + 1.0)
        piece = torch.empty(2)
        dist.reduce_scatter(piece, list(value.split(2)))
        works = [async_sum(piece), async_sum(piece)]
        for work in works:
            work.wait()
        return piece.sum().item()

    assert run(program) == [24.0, 24.0]


# ---------------------------------------------------------------------- futures


def test_a_future_joins_when_it_is_waited_for() -> None:
    """And gives the output tensors."""

    def program(rank: int) -> float:
        value = torch.ones(2)
        (result,) = async_sum(value).get_future().wait()
        return (result * 2).sum().item()

    assert run(program) == [8.0, 8.0]


def test_a_callback_of_a_future_runs_on_a_stream_of_its_own() -> None:
    """Behind the collective; who reads its result must wait for its Future."""

    def program(rank: int, *, waits: bool) -> float:
        value = torch.ones(2)
        future = async_sum(value).get_future().then(lambda each: each.value()[0] * 3)
        result = future.wait() if waits else future.value()
        total = (result + 1).sum()
        future.wait()
        return total.item()

    assert fsdp_sim.simulate(lambda rank: program(rank, waits=True), 2).results == [14.0, 14.0]
    with pytest.raises(fsdp_sim.Race):
        fsdp_sim.simulate(lambda rank: program(rank, waits=False), 2)


def test_a_callback_is_behind_the_collective_alone() -> None:
    """What the program has launched since is no concern of the stream that it runs on."""

    def program(rank: int, *, before: bool) -> float:
        value, other = torch.ones(2), torch.zeros(2)
        if before:
            other.fill_(1)
        future = async_sum(value).get_future()
        if not before:
            other.fill_(1)
        total = future.then(lambda each: (each.value()[0] + other).sum())
        return total.wait().item()

    assert fsdp_sim.simulate(lambda rank: program(rank, before=True), 2).results == [6.0, 6.0]
    with pytest.raises(fsdp_sim.Race, match=r"'add.*may still write"):
        fsdp_sim.simulate(lambda rank: program(rank, before=False), 2)


def test_a_future_protects_its_value_on_the_stream_that_waits() -> None:
    """Its memory is used again only when that stream is done, as after ``record_stream``."""

    def program(rank: int, *, by_future: bool) -> float:
        side, main = torch.cpu.Stream(), torch.cpu.current_stream()
        value = torch.ones(2)
        work = async_sum(value)
        future = work.get_future()
        with torch.cpu.stream(side):
            (future if by_future else work).wait()
            total = value.sum()
        (future if by_future else work).wait()
        del value, future, work
        torch.zeros(2)
        main.wait_stream(side)
        return total.item()

    assert fsdp_sim.simulate(lambda rank: program(rank, by_future=True), 2).results == [4.0, 4.0]
    with pytest.raises(fsdp_sim.UseAfterFree):
        fsdp_sim.simulate(lambda rank: program(rank, by_future=False), 2)


def test_an_exception_in_a_callback_comes_out_of_its_future() -> None:
    """As itself."""

    def program(rank: int) -> None:
        def fail(_: Any) -> None:
            raise KeyError("in a callback")

        async_sum(torch.ones(1)).get_future().then(fail).wait()

    with pytest.raises(Exception, match="in a callback"):
        run(program)


@pytest.mark.parametrize("together", [torch.futures.wait_all, torch.futures.collect_all])
def test_several_futures_are_joined_together(together: Callable[..., Any]) -> None:
    """``wait_all`` waits; what ``collect_all`` gives is waited for."""

    def program(rank: int) -> float:
        values = [torch.ones(2), torch.ones(2)]
        joined = together([async_sum(value).get_future() for value in values])
        if together is torch.futures.collect_all:
            joined.wait()
        return sum((value * 2).sum().item() for value in values)

    assert run(program) == [16.0, 16.0]


# ---------------------------------------------------------------------- lifetimes


def test_tensors_of_an_asynchronous_collective_live_until_its_wait() -> None:
    """NCCL's stash: the program may drop them at once."""

    def program(rank: int) -> list[bool]:
        value = torch.ones(2)
        alive = weakref.ref(value.untyped_storage())
        work = async_sum(value)
        del value
        before = alive() is not None
        work.wait()
        return [before, alive() is not None]

    assert run(program) == [[True, False]] * 2


def test_a_synchronous_collective_keeps_nothing_alive() -> None:
    """Its tensors die where they would without the simulator."""

    def program(rank: int) -> list[bool]:
        value, out = torch.ones(2), [torch.empty(2), torch.empty(2)]
        dist.all_gather(out, value)
        alive = [weakref.ref(each.untyped_storage()) for each in (value, *out)]
        dist.barrier()
        del value, out
        return [each() is not None for each in alive]

    assert run(program) == [[False] * 3] * 2


def test_a_handle_that_is_dropped_keeps_its_tensors_while_it_may_run() -> None:
    """They are let go once their memory's stream is ordered behind: no early reuse, and no leak."""

    def program(rank: int) -> list[bool]:
        value = torch.ones(2)
        alive = weakref.ref(value.untyped_storage())
        async_sum(value)
        del value
        gc.collect()
        before = alive() is not None
        cpu.synchronize()
        async_sum(torch.ones(1)).wait()
        return [before, alive() is not None]

    assert (
        fsdp_sim.simulate(program, 2, checkers=("races", "lifetime")).results == [[True, False]] * 2
    )


def test_a_freed_output_of_a_collective_in_flight_is_not_written() -> None:
    """A prefetched gather whose buffer is released before its values have come."""

    def program(rank: int) -> float:
        out, value = torch.empty(4), torch.ones(2)
        gather = dist.all_gather(list(out.split(2)), value, async_op=True)
        assert gather is not None
        gather.wait()
        out.untyped_storage().resize_(0)
        out.untyped_storage().resize_(16)
        out.fill_(7.0)
        return out.sum().item()

    assert run(program) == [28.0, 28.0]


# ---------------------------------------------------------------------- what PyTorch does around them


def test_differentiable_collectives_use_the_ranks_own_group() -> None:
    """Their ``group`` is a default argument that is bound when their module is imported."""

    def program(rank: int) -> list[float]:
        x = torch.full((2,), rank + 1.0, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer versions deprecate them
            summed = dist_nn.all_reduce(x * 2)
            gathered = torch.cat(dist_nn.all_gather(x))
        (summed.sum() + (gathered * (rank + 1)).sum()).backward()
        assert x.grad is not None
        return [summed[0].item(), *x.grad.tolist()]

    assert run(program) == [[6.0, 7.0, 7.0]] * 2


def test_pytorchs_debug_wrapper_is_left_out() -> None:
    """Under DETAIL PyTorch wraps groups in one that opens sockets."""
    level = untyped.get_debug_level()
    untyped.set_debug_level(untyped.DebugLevel.DETAIL)
    try:
        results = run(lambda rank: [torch.ones(1).mul_(rank).item(), dist.get_backend()])
    finally:
        untyped.set_debug_level(level)

    assert results == [[0.0, "sim"], [1.0, "sim"]]


def test_an_operator_sized_without_values_waits_for_them() -> None:
    """``repeat_interleave`` with a size given stops no host, and still needs its input."""

    def program(rank: int) -> list[float]:
        repeats = torch.ones(2, dtype=torch.long)
        dist.all_reduce(repeats)
        return torch.repeat_interleave(torch.arange(2.0), repeats, output_size=4).tolist()

    assert run(program) == [[0.0, 0.0, 1.0, 1.0]] * 2
