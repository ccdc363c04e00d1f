"""Events: streams, events and collectives together, in programs that once went wrong in the field."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fsdp_sim
from fsdp_sim.op import Kind
from tests.sim.litmus import cpu, findings, ops_of

# ---------------------------------------------------------------------- collectives' own streams


def prefetched_gather(wait: Callable[[Any, Any], Any]) -> Callable[[], None]:
    """Return a step that gathers the next unit while this one computes, joined by ``wait``."""

    def program() -> None:
        compute, gather = cpu.current_stream(), cpu.Stream()
        shard, weight = torch.ones(2), torch.ones(4)
        full = torch.zeros(4)
        gather.wait_stream(compute)
        with cpu.stream(gather):
            dist.all_gather(list(full.chunk(dist.get_world_size())), shard)
        weight * 2
        wait(compute, gather)
        full * 2

    return program


WAITS: dict[str, Callable[[Any, Any], Any]] = {
    "stream": lambda compute, gather: compute.wait_stream(gather),
    "event": lambda compute, gather: compute.wait_event(gather.record_event()),
    "host": lambda _, gather: gather.synchronize(),
    "device": lambda *_: cpu.synchronize(),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_gather_that_is_joined_in_time_is_clean(name: str) -> None:
    """A collective reads its inputs and writes its outputs on its own stream; each wait covers it."""
    assert findings(prefetched_gather(WAITS[name]), 2) == ()


def test_a_gather_that_is_not_joined_is_one_race() -> None:
    """One missing wait is one finding, on all ranks together."""
    found = findings(prefetched_gather(lambda *_: None), 2)

    assert [finding.kind for finding in found] == ["Race"]
    assert found[0].ranks == (0, 1)
    assert [op.name for op in found[0].ops] == ["all_gather", "mul.Tensor"]


def test_an_asynchronous_collective_is_joined_by_its_handle() -> None:
    """``wait`` orders the stream that is current when it is called, and no other."""

    def program(waiter: Callable[[Any], Any]) -> Callable[[], None]:
        def run() -> None:
            side, x = cpu.Stream(), torch.ones(4)
            work = dist.all_reduce(x, async_op=True)
            assert work is not None
            with cpu.stream(waiter(side)):
                work.wait()
            x.add(1)

        return run

    assert findings(program(lambda _: None), 2) == ()
    assert [finding.kind for finding in findings(program(lambda side: side), 2)] == ["Race"]


def test_events_that_died_are_not_confused_with_new_ones() -> None:
    """An event made where another was freed has a history of its own."""

    def program() -> None:
        side, x = cpu.Stream(), torch.zeros(4)
        for _ in range(3):
            event = cpu.Event()
            event.record(side)
            cpu.current_stream().wait_event(event)
            del event
        side.wait_stream(cpu.current_stream())
        with cpu.stream(side):
            x.fill_(1)
        cpu.current_stream().wait_event(cpu.Event())
        x.add(1)

    assert [finding.kind for finding in findings(program)] == ["Race"]


# ---------------------------------------------------------------------- deferred work


def delayed_gradient(*, launches_inside: bool) -> Callable[[], None]:
    """Return a step with a deferred weight gradient, on the stream of its closure or of its call."""

    def program() -> None:
        compute, late, reduce = cpu.current_stream(), cpu.Stream(), cpu.Stream()
        activation, grad = torch.ones(4), torch.zeros(4)
        created_on = cpu.current_stream()

        def compute_gradient() -> None:
            with cpu.stream(cpu.current_stream() if launches_inside else created_on):
                grad.add_(activation)

        late.wait_stream(compute)
        with cpu.stream(late):
            compute_gradient()
        reduce.wait_stream(late)
        with cpu.stream(reduce):
            dist.all_reduce(grad)
        compute.wait_stream(reduce)

    return program


def test_deferred_work_on_the_stream_of_its_making_is_a_race() -> None:
    """The reduction waits for the intended stream; the message says which stream it really was."""
    (found,) = [
        finding
        for finding in findings(delayed_gradient(launches_inside=False), 2)
        if finding.kind == "Race"
    ]

    assert [op.name for op in found.ops] == ["add_.Tensor", "all_reduce"]
    assert "(default)" in found.ops[0].stream
    assert "test_events.py" in found.ops[1].stream
    assert findings(delayed_gradient(launches_inside=True), 2) == ()


# ---------------------------------------------------------------------- ranges


def test_ranges_of_record_function_and_nvtx_label_what_is_issued_inside() -> None:
    """The innermost range of a runtime is the label; others are none; a range may be left by error."""

    def program() -> None:
        with torch.profiler.record_function("fsdp_core::unshard layer"):
            with torch.profiler.record_function("somebody's own"):
                torch.ones(1)
            torch.cuda.nvtx.range_push("FSDP::all_gather")
            torch.ones(1)
            torch.cuda.nvtx.range_pop()
            torch.ones(1)
        with (
            pytest.raises(ValueError, match=r"^out$"),
            torch.profiler.record_function("fsdp_core::forward"),
        ):
            raise ValueError("out")
        torch.ones(1)

    labels = [op.annotation for op in ops_of(program) if op.name == "ones"]

    assert labels == [
        "fsdp_core::unshard layer",
        "FSDP::all_gather",
        "fsdp_core::unshard layer",
        None,
    ]


def test_ranges_are_a_ranks_own() -> None:
    """A range that one rank has open labels nothing of another's."""

    def program(rank: int) -> None:
        if rank == 0:
            with torch.profiler.record_function("fsdp_core::forward"):
                dist.barrier()
                torch.ones(1)
        else:
            dist.barrier()
            torch.ones(1)

    options: dict[str, Any] = {"trace": True, "strict": False, "checkers": ()}
    ops = fsdp_sim.simulate(program, 2, **options).trace.ops

    assert {op.rank: op.annotation for op in ops if op.name == "ones"} == {
        0: "fsdp_core::forward",
        1: None,
    }


# ---------------------------------------------------------------------- what no op moves


def test_swapping_a_tensors_data_is_no_access() -> None:
    """``x.data = y`` moves no bytes; later ops are on the new storage."""

    def program() -> None:
        x, y = torch.zeros(4), torch.ones(4)
        x.data = y
        x.add_(1)

    written = [
        access.storage
        for op in ops_of(program)
        if op.name == "add_.Tensor"
        for access in op.accesses
    ]
    made = [op.other for op in ops_of(program) if op.kind is Kind.ALLOC]

    assert set(written) == {made[1]}


def test_views_of_interleaved_columns_do_not_collide() -> None:
    """Two streams that write disjoint columns of one matrix do not race; overlapping ones do."""

    def program(first: slice, second: slice) -> Callable[[], None]:
        def run() -> None:
            one, two, x = cpu.Stream(), cpu.Stream(), torch.zeros(4, 4)
            for stream, columns in ((one, first), (two, second)):
                stream.wait_stream(cpu.current_stream())
                with cpu.stream(stream):
                    x[:, columns].fill_(1)
            for stream in (one, two):
                cpu.current_stream().wait_stream(stream)
            keep(x)

        return run

    assert findings(program(slice(0, 2), slice(2, 4))) == ()
    assert "Race" in {f.kind for f in findings(program(slice(0, 3), slice(2, 4)))}


def keep(tensor: Tensor) -> None:
    """Use a tensor, so that it lives until here."""
    tensor.size()
