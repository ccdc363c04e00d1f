"""simulate: what a run returns, what it raises, and what it refuses before it starts."""

import io
import logging
import os
import random  # noqa: TID251  the subject of a test
import re
import signal
import threading  # noqa: TID251  a lock between ranks is the subject of a test
import time  # noqa: TID251  how long an interrupt takes
from functools import cached_property, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fsdp_sim
from fsdp_sim.errors import RunError
from tests.sim.programs import gathered_on_a_side_stream, sum_of_ranks


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_rank_returns_its_own_result(world_size: int) -> None:
    """The results are listed by rank, whatever the world size."""
    report = fsdp_sim.simulate(lambda rank: rank * 10, world_size)

    assert report.results == [rank * 10 for rank in range(world_size)]


def test_a_collective_moves_real_values() -> None:
    """Four ranks sum 1 + 2 + 3 + 4."""
    report = fsdp_sim.simulate(sum_of_ranks, 4)

    assert report.results == [10.0] * 4
    assert report.findings == ()


def test_a_gather_that_is_waited_for_is_clean() -> None:
    """Overlap with the right wait is no finding."""
    report = fsdp_sim.simulate(gathered_on_a_side_stream, 2)

    assert report.results == [[0.0, 0.0, 2.0, 2.0]] * 2


def test_a_gather_that_nobody_waits_for_is_a_race() -> None:
    """The missing wait is found on the default schedule, with both operations named."""

    def program(rank: int) -> None:
        gathered_on_a_side_stream(rank, waits=False)

    with pytest.raises(fsdp_sim.Race) as caught:
        fsdp_sim.simulate(program, 2)

    finding = caught.value.finding
    assert finding is not None
    assert [site.name for site in finding.ops] == ["all_gather", "mul.Tensor"]
    assert finding.ranks == (0, 1)
    assert caught.value.schedule == "v1;w2"


def test_a_report_lists_what_strict_would_raise() -> None:
    """With strict off the run goes on and every error is in the report."""

    def program(rank: int) -> None:
        gathered_on_a_side_stream(rank, waits=False)

    report = fsdp_sim.simulate(program, 2, strict=False)

    assert [finding.kind for finding in report.findings] == ["Race"]


def test_a_method_replaced_on_a_stream_class_does_not_outlive_the_world() -> None:
    """A rank may disable a wait by replacing the method; the next world has it again."""

    def broken(rank: int) -> None:
        torch.cpu.Stream.wait_stream = lambda *_: None  # type: ignore[method-assign]
        gathered_on_a_side_stream(rank)

    assert fsdp_sim.simulate(broken, 2, strict=False).findings
    assert fsdp_sim.simulate(gathered_on_a_side_stream, 2).findings == ()


def test_a_rank_that_never_comes_is_a_deadlock_that_names_it() -> None:
    """The report says who is missing and what the others wait for; no time passes."""

    def program(rank: int) -> float:
        return 0.0 if rank == 1 else sum_of_ranks(rank)

    with pytest.raises(fsdp_sim.Deadlock, match=r"missing: rank 1\n"):
        fsdp_sim.simulate(program, 3)


def test_different_collectives_at_one_position_are_a_mismatch() -> None:
    """Both calls are in the report, and no rank sees a number."""

    def program(rank: int) -> None:
        value = torch.ones(4)
        if rank == 1:
            dist.broadcast(value, 0)
        else:
            dist.all_reduce(value)

    with pytest.raises(fsdp_sim.CollectiveMismatch, match="broadcast") as caught:
        fsdp_sim.simulate(program, 2)

    assert caught.value.report.results == [None, None]


def test_an_exception_of_a_rank_comes_out_as_itself() -> None:
    """Its note says which rank raised and where the others stood."""

    def program(rank: int) -> None:
        if rank == 1:
            raise KeyError("no such layer")
        dist.barrier()

    with pytest.raises(KeyError, match="no such layer") as caught:
        fsdp_sim.simulate(program, 3)

    notes = "\n".join(caught.value.__notes__)
    assert "raised on simulated rank 1; schedule 'v1;w3'" in notes
    assert "rank 0 waits (barrier)" in notes


def test_a_finding_cannot_be_swallowed_inside_a_rank() -> None:
    """``except Exception`` in the program does not hide a mismatch."""

    def program(rank: int) -> None:
        try:
            dist.broadcast(torch.ones(4 + rank), 0)
        except Exception:
            return

    with pytest.raises(fsdp_sim.CollectiveMismatch):
        fsdp_sim.simulate(program, 2)


def test_ranks_have_their_own_environment_and_random_numbers() -> None:
    """RANK, WORLD_SIZE, the torch and the Python generator belong to each rank."""

    def program(rank: int) -> tuple[Any, ...]:
        os.environ["COLOUR"] = f"colour {rank}"
        first = (torch.rand(()).item(), random.random())
        dist.barrier()
        return (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["COLOUR"], first)

    one, two = fsdp_sim.simulate(program, 2).results, fsdp_sim.simulate(program, 2).results

    assert [result[:3] for result in one] == [("0", "2", "colour 0"), ("1", "2", "colour 1")]
    assert one == two
    assert one[0][3] != one[1][3]
    assert "COLOUR" not in os.environ


def test_the_default_group_is_there_and_is_gone_afterwards() -> None:
    """A rank starts with a group of backend sim; the process outside has none."""

    def program(rank: int) -> tuple[str, int, int]:
        return (dist.get_backend(), dist.get_rank(), dist.get_world_size())

    assert fsdp_sim.simulate(program, 2).results == [("sim", 0, 2), ("sim", 1, 2)]
    assert not dist.is_initialized()


def test_a_program_that_polls_for_ever_hits_the_step_limit() -> None:
    """The error names the limit."""

    def program(rank: int) -> None:
        while True:
            torch.cpu.Event().query()

    with pytest.raises(fsdp_sim.StepLimit, match="step_limit=50 "):
        fsdp_sim.simulate(program, 2, step_limit=50)


def test_a_trace_that_is_full_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by the last operators of a rank, which are judged together; the next run finds all in order."""
    monkeypatch.setattr("fsdp_sim.trace.TRACE_OPS_MAX", 30)

    def program(_: int) -> None:
        for _ in range(30):
            torch.ones(4)

    with pytest.raises(RunError) as caught:
        fsdp_sim.simulate(program, 3, trace=True, handover_seconds=20)

    assert str(caught.value).startswith(
        "a trace keeps 30 ops at most; trace fewer steps, or pass trace=False"
    )
    assert fsdp_sim.simulate(lambda rank: rank, 3, handover_seconds=20).results == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, "world_size must be between 1 and 4096, got 0"),
        ({"world_size": -2}, "world_size must be between 1 and 4096, got -2"),
        ({"world_size": 2.0}, "world_size must be an integer, got 2.0"),
        ({"world_size": True}, "world_size must be an integer, got True"),
        ({"fn": 3}, "fn must be callable as fn(rank, *args), got 3"),
        (
            {"fn": lambda: None},
            "got <lambda>(): too many positional arguments",
        ),
        ({"scheduler": "lifo"}, "scheduler must be one of program_order, uniform, pct"),
        (
            {"scheduler": "replay"},
            "scheduler 'replay' must be told what to replay, got no schedule",
        ),
        ({"checkers": "races"}, "checkers must be a list, got 'races'; pass ['races']"),
        ({"checkers": ("speed",)}, "checkers must be among races, lifetime"),
        ({"schedule": "17>2"}, "17>2"),
        ({"schedule": "v2;w4"}, "v2"),
        ({"schedule": "v1;w3"}, "the schedule's world size must be world_size=4, got 3"),
        ({"step_limit": 0}, "step_limit must be a positive integer, got 0"),
        ({"step_limit": True}, "step_limit must be a positive integer, got True"),
        ({"seed": "x"}, "seed must be an integer, got 'x'"),
        (
            {"handover_seconds": 0},
            "handover_seconds must be a finite number of seconds above 0, got 0",
        ),
        ({"steps": 0}, "steps must be a positive integer, got 0"),
        ({"args": 3}, "args must be a tuple, got 3; pass (3,)"),
        ({"knobs": "late"}, "knobs must be a list, got 'late'; pass ['late']"),
        ({"knobs": (7,)}, "knobs must be a list of str, got 7 in it"),
        ({"knobs": 7}, "knobs must be a list, got 7"),
        (
            {"faults": "crash:issue"},
            "faults must be a list, got 'crash:issue'; pass ['crash:issue']",
        ),
        ({"faults": (7,)}, "faults must be a list of str or Rule, got 7 in it"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_runs(
    options: dict[str, Any], message: str
) -> None:
    """The error says what must hold and what was got; no rank has started."""
    ran: list[int] = []
    arguments: dict[str, Any] = {"fn": ran.append, "world_size": 4} | options

    with pytest.raises(fsdp_sim.ConfigError, match=re.escape(message)):
        fsdp_sim.simulate(**arguments)

    assert ran == []


def test_a_world_inside_a_world_is_refused() -> None:
    """The inner call raises; the outer world is the only one."""

    def program(rank: int) -> None:
        fsdp_sim.simulate(sum_of_ranks, 2)

    with pytest.raises(fsdp_sim.ConfigError, match="a world must not be started inside a world"):
        fsdp_sim.simulate(program, 1)


def test_a_world_beside_a_real_process_group_is_refused() -> None:
    """The error says how to end the group; it is left as it was."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        with pytest.raises(fsdp_sim.ConfigError, match=r"destroy_process_group\(\) first"):
            fsdp_sim.simulate(sum_of_ranks, 2)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_a_rank_may_return_a_distributed_tensor() -> None:
    """What it wraps besides tensors is no memory."""

    def program(rank: int) -> Tensor:
        return distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])

    results = fsdp_sim.simulate(program, 2).results

    assert [result.to_local().shape for result in results] == [(2, 4), (2, 4)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_poll_for_each_other_come_to_their_end(world_size: int) -> None:
    """In program order too: a rank that only polls lets the next one go on."""

    def program(rank: int) -> float:
        value = torch.ones(1)
        work = dist.all_reduce(value, async_op=True)
        assert work is not None
        while not work.is_completed():
            pass
        work.wait()
        return float(value)

    report = fsdp_sim.simulate(program, world_size, step_limit=2000)

    assert report.results == [float(world_size)] * world_size


class OutOfTime(Exception):
    """What the handler of a signal raises."""


@pytest.mark.parametrize(
    ("number", "interrupt"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGUSR1, OutOfTime)]
)
def test_an_interrupt_of_the_caller_unwinds_every_rank(
    number: signal.Signals, interrupt: type[BaseException]
) -> None:
    """The ranks' cleanup runs, the interrupt comes out, and the next world is as any other."""
    cleaned: list[int] = []

    def raise_it(*_: object) -> None:
        raise interrupt

    def program(rank: int) -> None:
        try:
            dist.barrier()
            if rank == 0:
                os.kill(os.getpid(), number)
            while True:
                dist.barrier()
        finally:
            cleaned.append(rank)

    before = signal.signal(number, raise_it)
    try:
        with pytest.raises(interrupt):
            fsdp_sim.simulate(program, 2)
    finally:
        signal.signal(number, before)

    assert sorted(cleaned) == [0, 1]
    assert not dist.is_initialized()
    assert fsdp_sim.simulate(sum_of_ranks, 2).results == [3.0, 3.0]


def test_an_interrupt_that_a_rank_s_thread_takes_reaches_the_caller_soon() -> None:
    """The kernel may choose that thread, which does not wake the caller."""
    unheard: list[int] = []

    def raise_it(*_: object) -> None:
        raise KeyboardInterrupt

    def program(rank: int) -> None:
        dist.barrier()
        if rank == 0:
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        end = time.monotonic() + 10
        while time.monotonic() < end:
            dist.barrier()
        unheard.append(rank)

    before = signal.signal(signal.SIGINT, raise_it)
    try:
        with pytest.raises(KeyboardInterrupt):
            fsdp_sim.simulate(program, 2, handover_seconds=15)
    finally:
        signal.signal(signal.SIGINT, before)

    assert unheard == []


def test_an_exception_that_forbids_attributes_comes_out_as_itself() -> None:
    """What is attached to errors is left out of this one."""

    class Frozen(Exception):
        def __setattr__(self, name: str, value: object) -> None:
            if not name.startswith("__"):
                raise TypeError("frozen")
            super().__setattr__(name, value)

    def program(rank: int) -> None:
        raise Frozen

    with pytest.raises(Frozen):
        fsdp_sim.simulate(program, 1)


# ---------------------------------------------------------------------- what would not run


async def coroutine(rank: int) -> None:
    """Never awaited by anybody."""


def generator(rank: int) -> Any:
    """Never iterated by anybody."""
    yield rank


class Coroutine:
    """An object whose call makes a coroutine."""

    async def __call__(self, rank: int) -> None:
        """Never awaited by anybody."""


@pytest.mark.parametrize("fn", [coroutine, generator, Coroutine(), partial(coroutine)])
def test_a_function_that_only_makes_a_coroutine_is_refused(fn: Any) -> None:
    """Its program would not run, and nothing would be found in it."""
    with pytest.raises(fsdp_sim.ConfigError, match=r"^fn must run the rank's program when it is"):
        fsdp_sim.simulate(fn, 1)


def test_a_program_that_returns_a_generator_has_not_run() -> None:
    """What cannot be seen from the function is seen from its result."""
    with pytest.raises(TypeError, match=r"^fn must run the rank's program, got a generator that"):
        fsdp_sim.simulate(lambda rank: generator(rank), 1)


# ---------------------------------------------------------------------- what blocks outside the world


def test_a_lock_held_across_a_collective_is_named_with_rank_and_line() -> None:
    """Another rank blocks on it, where the simulator cannot see: it gives up after a time."""
    lock = threading.Lock()

    def program(rank: int) -> None:
        with lock:
            dist.barrier()

    with pytest.raises(fsdp_sim.HandoverTimeout) as caught:
        fsdp_sim.simulate(program, 2, handover_seconds=0.1)

    assert re.fullmatch(
        r"a rank must hand over within handover_seconds=0\.1, got none from rank 1, which stands at "
        r".*test_simulate\.py:\d+ while ranks \[0\] are parked; it blocks outside the simulated world: "
        r"on a lock that another rank holds across a collective, a socket, an endless loop",
        str(caught.value),
    )


def test_a_message_that_prints_a_tensor_does_not_stop_other_ranks_that_log() -> None:
    """Each process has a logging handler of its own: nobody waits for another's lock."""
    logger, out = logging.getLogger("test"), io.StringIO()
    handler = logging.StreamHandler(out)
    logger.addHandler(handler)

    def program(rank: int) -> None:
        x = torch.ones(1)
        dist.all_reduce(x)
        logger.warning("%s", x)

    try:
        fsdp_sim.simulate(program, 2, handover_seconds=10.0)
    finally:
        logger.removeHandler(handler)

    assert out.getvalue() == "tensor([2.])\n" * 2


def test_a_cached_property_that_is_a_collective_is_each_ranks_own() -> None:
    """Python 3.11 computes it under a lock of the class."""

    class Model:
        @cached_property
        def total(self) -> float:
            x = torch.ones(1)
            dist.all_reduce(x)
            return x.item()

    results = fsdp_sim.simulate(lambda _: Model().total, 2, handover_seconds=10.0).results

    assert results == [2.0, 2.0]
