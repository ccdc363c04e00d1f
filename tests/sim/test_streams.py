"""Streams: each rule of CUDA's streams as a litmus test, named after the rule."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_sim
from fsdp_sim.engine import streams
from tests.sim.litmus import accelerator, cpu, findings, is_racy, on_one_rank


def test_the_names_and_signatures_of_torch_cuda_are_there() -> None:
    """Stream and Event offer what torch.cuda's do, under the same signatures."""
    for ours, theirs in ((streams.Stream, torch.cuda.Stream), (streams.Event, torch.cuda.Event)):  # noqa: TID251
        for name, member in vars(theirs).items():
            if name.startswith("__") or name == "_as_parameter_":
                continue
            expected = _parameters(getattr(theirs, name))

            assert _parameters(getattr(ours, name)) == expected, name
            assert member is not None


def test_constructors_take_what_those_of_torch_cuda_take() -> None:
    """A stream is made with a device and a priority, an event with its four flags."""
    assert _parameters(streams.Stream.__new__) == _parameters(torch.cuda.Stream.__new__)  # noqa: TID251
    assert _parameters(streams.Event.__new__) == _parameters(torch.cuda.Event.__new__)  # noqa: TID251


@pytest.mark.parametrize(
    "name",
    [
        "current_stream",
        "default_stream",
        "set_stream",
        "stream",
        "synchronize",
        "get_stream_from_external",
        "is_current_stream_capturing",
    ],
)
def test_the_functions_of_torch_cuda_are_there(name: str) -> None:
    """Inside a world torch.cpu has each stream function of torch.cuda; outside it is as it was."""
    had = hasattr(cpu, name)

    ours = on_one_rank(lambda: _parameters(getattr(cpu, name)))

    assert ours == _parameters(getattr(torch.cuda, name))
    assert hasattr(cpu, name) == had


def _parameters(function: Any) -> list[tuple[str, Any]]:
    if isinstance(function, property):
        return []
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


# ---------------------------------------------------------------------- order


def _write_and_read(order: Callable[[Any, Any], None]) -> Callable[[], None]:
    """Return a program that writes on one side stream and reads on another, ordered by ``order``."""

    def program() -> None:
        one, two = cpu.Stream(), cpu.Stream()
        x = torch.zeros(4)
        one.wait_stream(cpu.current_stream())
        with cpu.stream(one):
            x.fill_(1)
        order(one, two)
        with cpu.stream(two):
            x.add(1)

    return program


def test_side_streams_are_not_ordered() -> None:
    """Work on two streams with nothing between them races."""
    assert is_racy(_write_and_read(lambda _one, _two: None))


def test_wait_stream_orders_what_comes_later() -> None:
    """A stream that waits for another runs its later work behind the other's."""
    assert not is_racy(_write_and_read(lambda one, two: two.wait_stream(one)))


def test_wait_stream_has_a_direction() -> None:
    """The awaited stream does not wait for the waiter."""
    assert is_racy(_write_and_read(lambda one, two: one.wait_stream(two)))


def test_an_event_orders_what_waits_for_it() -> None:
    """A recorded event carries the order from the stream of its record to that of its wait."""
    assert not is_racy(_write_and_read(lambda one, two: two.wait_event(one.record_event())))


def test_waiting_for_an_event_that_was_never_recorded_does_nothing() -> None:
    """Such a wait returns and orders nothing."""
    assert is_racy(_write_and_read(lambda _one, two: two.wait_event(cpu.Event())))


def test_an_event_recorded_again_is_a_new_snapshot() -> None:
    """A wait takes the last snapshot, not an earlier one."""

    def order(one: Any, two: Any) -> None:
        event = cpu.Event()
        event.record(cpu.default_stream())
        event.record(one)
        two.wait_event(event)

    assert not is_racy(_write_and_read(order))


def test_a_wait_before_the_record_does_not_count() -> None:
    """An event orders those waits that come after its record."""

    def order(one: Any, two: Any) -> None:
        event = cpu.Event()
        two.wait_event(event)
        event.record(one)

    assert is_racy(_write_and_read(order))


def test_an_event_is_a_snapshot() -> None:
    """Work that comes after the record is not covered."""

    def program() -> None:
        side = cpu.Stream()
        x = torch.zeros(4)
        side.wait_stream(cpu.current_stream())
        event = side.record_event()
        with cpu.stream(side):
            x.fill_(1)
        cpu.current_stream().wait_event(event)
        x.add(1)

    assert is_racy(program)


def test_order_is_transitive_over_a_third_stream() -> None:
    """One waits for two, two has waited for three: one is behind three."""

    def order(one: Any, two: Any) -> None:
        between = cpu.Stream()
        between.wait_stream(one)
        two.wait_stream(between)

    assert not is_racy(_write_and_read(order))


def test_the_host_orders_what_it_launches_after_it_waited() -> None:
    """After synchronize of a stream, an event or the device, later launches are behind it."""
    waits: list[Callable[[Any, Any], Any]] = [
        lambda one, _two: one.synchronize(),
        lambda one, _two: one.record_event().synchronize(),
        lambda _one, _two: cpu.synchronize(),
        lambda _one, _two: accelerator.synchronize(),
    ]

    assert [is_racy(_write_and_read(wait)) for wait in waits] == [False] * 4


def test_the_host_orders_nothing_by_waiting_for_another_stream() -> None:
    """Synchronising a stream without the write leaves the race."""
    assert is_racy(_write_and_read(lambda _one, two: two.synchronize()))


def test_the_default_stream_synchronises_with_no_side_stream() -> None:
    """PyTorch's streams are non-blocking: the default stream waits for none."""

    def program() -> None:
        side = cpu.Stream()
        x = torch.zeros(4)
        side.wait_stream(cpu.current_stream())
        with cpu.stream(side):
            x.fill_(1)
        x.add(1)

    assert is_racy(program)


def test_priorities_order_nothing() -> None:
    """A stream of high priority is as unordered as any other, and priorities are clamped."""

    def program() -> None:
        urgent = cpu.Stream(priority=-100)
        assert urgent.priority == -3
        x = torch.zeros(4)
        with cpu.stream(urgent):
            x.add(1)

    assert is_racy(program)


# ---------------------------------------------------------------------- queries


def _poll_then_read(asked: Callable[[Any], Callable[[], bool]]) -> Callable[[], int]:
    def program() -> int:
        side = cpu.Stream()
        x = torch.zeros(4)
        side.wait_stream(cpu.current_stream())
        with cpu.stream(side):
            x.fill_(1)
        query, count = asked(side), 0
        while not query():
            count += 1
        x.add(1)
        return count

    return program


def test_a_query_that_says_done_orders_the_host() -> None:
    """After a poll has said that the work is done, later launches are behind it."""
    assert not is_racy(_poll_then_read(lambda side: side.query))
    assert not is_racy(_poll_then_read(lambda side: side.record_event().query))


def test_the_schedule_answers_a_query() -> None:
    """Not done is the default, for a bounded number of times; a deviation says done at once."""
    program = _poll_then_read(lambda side: side.query)

    by_default = fsdp_sim.simulate(lambda _rank: program(), 1).results
    at_once = fsdp_sim.simulate(lambda _rank: program(), 1, schedule="v1;w1;0>1").results

    assert by_default == [streams.QUERIES_UNTIL_DONE]
    assert at_once == [0]


def test_a_query_of_what_the_host_has_waited_for_is_certain() -> None:
    """Nothing to decide: it is done, and so is an event that was never recorded."""

    def program(rank: int) -> list[bool]:
        side = cpu.Stream()
        with cpu.stream(side):
            torch.zeros(4)
        event = side.record_event()
        event.synchronize()
        return [event.query(), cpu.Event().query()]

    report = fsdp_sim.simulate(program, 1)

    assert report.results == [[True, True]]
    assert report.decisions == 0


# ---------------------------------------------------------------------- contexts


def test_contexts_nest() -> None:
    """Leaving a context brings back the stream that was current when it was entered."""

    def program() -> list[bool]:
        one, two = cpu.Stream(), cpu.Stream()
        default, seen = cpu.current_stream(), []
        with cpu.stream(one):
            with two:
                seen.append(cpu.current_stream() == two)
                with cpu.stream(None):
                    seen.append(cpu.current_stream() == two)
            seen.append(cpu.current_stream() == one)
        seen.append(cpu.current_stream() == default)
        return seen

    assert on_one_rank(program) == [True] * 4


def test_an_exception_leaves_a_context() -> None:
    """The outer stream is current again behind an exception."""

    def program() -> bool:
        side, default = cpu.Stream(), cpu.current_stream()
        with pytest.raises(ValueError, match=r"^out$"), cpu.stream(side):
            raise ValueError("out")
        return cpu.current_stream() == default

    assert on_one_rank(program)


def test_set_stream_lasts() -> None:
    """``set_stream`` of torch.cpu or torch.accelerator selects until something else does."""

    def program() -> list[bool]:
        side, seen = cpu.Stream(), []
        cpu.set_stream(side)
        seen.append(accelerator.current_stream() == side)
        accelerator.set_stream(cpu.default_stream())
        seen.append(cpu.current_stream() == cpu.default_stream())
        return seen

    assert on_one_rank(program) == [True, True]


def test_each_rank_has_a_current_stream_of_its_own() -> None:
    """A context open on one rank does not show on another."""

    def program(rank: int) -> bool:
        default = cpu.current_stream()
        if rank == 0:
            cpu.set_stream(cpu.Stream())
        torch.distributed.barrier()
        return cpu.current_stream() == default

    assert fsdp_sim.simulate(program, 2).results == [False, True]


# ---------------------------------------------------------------------- objects


@pytest.mark.parametrize("knobs", [(), ("cuda",)])
def test_a_stream_equals_itself_alone(knobs: tuple[str, ...]) -> None:
    """However it was come by; ``!=`` says the opposite of ``==``."""

    def program() -> list[bool]:
        module: Any = torch.cuda if knobs else cpu
        main, side, other = module.current_stream(), module.Stream(), module.Stream()
        same = [(main, module.default_stream()), (side, side)]
        different = [(main, side), (side, other), (side, None), (side, "side")]
        return [
            *(one == two and not one != two for one, two in same),  # noqa: SIM202  both are tested
            *(one != two and not one == two for one, two in different),  # noqa: SIM201
        ]

    assert on_one_rank(program, knobs=knobs) == [True] * 6


def test_streams_and_events_are_pytorchs() -> None:
    """They are instances of torch.Stream and torch.Event, and a stream is found by its id."""

    def program() -> list[bool]:
        side = cpu.Stream()
        again = cpu.Stream(stream_id=side.stream_id, device_index=0, device_type=0)
        return [
            isinstance(side, torch.Stream),
            isinstance(cpu.Event(), torch.Event),
            again is side,
            torch.Stream("cpu") == side,
            len({side, again}) == 1,
        ]

    assert on_one_rank(program) == [True, True, True, False, True]


def test_time_between_events_counts_ops() -> None:
    """Elapsed time is a number of ops, and needs timing, two records and a wait for the end."""

    def program() -> float:
        start, end = cpu.Event(enable_timing=True), cpu.Event(enable_timing=True)
        with pytest.raises(RuntimeError, match=r"^both events must be recorded"):
            start.elapsed_time(end)
        start.record()
        torch.zeros(4).add_(1)
        end.record()
        with pytest.raises(RuntimeError, match=r"^the host must wait for the end event first"):
            start.elapsed_time(end)
        with pytest.raises(RuntimeError, match=r"^both events must be made with enable_timing"):
            start.elapsed_time(cpu.Event())
        end.synchronize()
        return start.elapsed_time(end)

    assert on_one_rank(program) == 2


def test_handles_for_other_processes_and_foreign_streams_are_refused() -> None:
    """What cannot be simulated says so."""

    def program() -> None:
        with pytest.raises(NotImplementedError, match="no events between processes"):
            cpu.Event().ipc_handle()
        with pytest.raises(NotImplementedError, match="streams of other libraries"):
            cpu.get_stream_from_external(1)

    on_one_rank(program)


def test_a_stream_belongs_to_its_rank() -> None:
    """A rank that uses another's stream or event is told so."""
    kept: list[Any] = []

    def program(rank: int) -> None:
        if rank == 0:
            kept.extend([cpu.Stream(), cpu.Event()])
        torch.distributed.barrier()
        if rank == 1:
            for use in (kept[0].synchronize, kept[0].__enter__, kept[1].record, kept[1].query):
                with pytest.raises(
                    RuntimeError, match=r"rank 0, got rank 1; make one on each rank$"
                ):
                    use()

    fsdp_sim.simulate(program, 2)


def test_what_a_program_replaces_on_stream_dies_with_the_world() -> None:
    """A method replaced inside a rank covers the default stream too, and the next world is whole."""

    def broken() -> None:
        cpu.Stream.wait_stream = lambda *_: None
        _write_and_read(lambda one, two: two.wait_stream(one))()

    assert is_racy(broken)
    assert not is_racy(_write_and_read(lambda one, two: two.wait_stream(one)))


def test_outside_a_world_everything_is_as_before() -> None:
    """Names of torch.cpu, torch.accelerator and torch are put back."""
    before = (cpu.Stream, cpu.stream, torch.Stream, accelerator.current_stream)

    on_one_rank(lambda: cpu.Stream())

    assert before == (
        cpu.Stream,
        cpu.stream,
        torch.Stream,
        accelerator.current_stream,
    )
    assert not hasattr(torch.cpu, "default_stream")


def test_record_stream_names_the_stream() -> None:
    """``record_stream`` of a tensor protects its memory until the stream's work is done."""

    def program(record: bool) -> Callable[[], None]:
        def run() -> None:
            side = cpu.Stream()
            x = torch.zeros(4)
            side.wait_stream(cpu.current_stream())
            with cpu.stream(side):
                x.add(1)
            if record:
                x.record_stream(side)
            del x
            torch.zeros(4)

        return run

    assert [finding.kind for finding in findings(program(record=False))] == ["UseAfterFree"]
    assert findings(program(record=True)) == ()


def test_asking_a_work_whether_it_is_completed_is_a_query() -> None:
    """The schedule answers; a yes orders the host, and a program that polls comes to its end."""

    def program(rank: int) -> int:
        x, count = torch.ones(4), 0
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        while not work.is_completed():
            count += 1
        x.add(1)
        return count

    by_default = fsdp_sim.simulate(program, 1).results
    at_once = fsdp_sim.simulate(program, 1, schedule="v1;w1;0>1").results

    assert by_default == [streams.QUERIES_UNTIL_DONE]
    assert at_once == [0]
