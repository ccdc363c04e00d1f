"""Streams, events and memory: each verb orders what it says, and no more."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.profiler import profile

import fsdp_sim
from fsdp_core import device as accelerator

CPU = torch.device("cpu")


def kinds_found(program: Callable[[int], Any]) -> list[str]:
    """Kinds of the findings of one simulated rank."""
    report = fsdp_sim.simulate(program, 1, strict=False)
    return [finding.kind for finding in report.findings]


def write_on_a_side_stream() -> tuple[Any, Tensor]:
    """A tensor that a side stream writes, and that stream."""
    tensor = torch.zeros(4)
    side = accelerator.new_stream(CPU)
    accelerator.wait_stream(side, accelerator.current_stream(CPU))
    with accelerator.on_stream(side):
        tensor.add_(1)
    return side, tensor


def test_reading_what_a_side_stream_writes_needs_an_order() -> None:
    """The control of the three tests below: without a wait it is a race."""

    def program(rank: int) -> None:
        _, tensor = write_on_a_side_stream()
        tensor.mul_(2)

    assert kinds_found(program) == ["Race"]


def test_waiting_for_the_stream_orders() -> None:
    """Everything so far on it comes first."""

    def program(rank: int) -> None:
        side, tensor = write_on_a_side_stream()
        accelerator.wait_stream(accelerator.current_stream(CPU), side)
        tensor.mul_(2)

    assert kinds_found(program) == []


@pytest.mark.parametrize(("reads_late", "found"), [(False, []), (True, ["Race"])])
def test_waiting_for_an_event_orders_what_came_before_it(
    reads_late: bool, found: list[str]
) -> None:
    """What was queued on the stream after the event is not waited for."""

    def program(rank: int) -> None:
        side, early = write_on_a_side_stream()
        late = torch.zeros(4)
        accelerator.wait_stream(side, accelerator.current_stream(CPU))
        event = accelerator.record_event(side)
        with accelerator.on_stream(side):
            late.add_(1)
        accelerator.wait_event(accelerator.current_stream(CPU), event)
        early.mul_(2)
        if reads_late:
            late.mul_(2)

    assert kinds_found(program) == found


@pytest.mark.parametrize(("waits_anew", "found"), [(True, []), (False, ["Race"])])
def test_what_waited_for_an_event_does_not_wait_for_its_next_record(
    waits_anew: bool, found: list[str]
) -> None:
    """Recorded anew, an event stands for the new place alone."""

    def program(rank: int) -> None:
        side, early = write_on_a_side_stream()
        late, current = torch.zeros(4), accelerator.current_stream(CPU)
        event = accelerator.record_event(side)
        accelerator.wait_event(current, event)
        early.mul_(2)
        accelerator.wait_stream(side, current)
        with accelerator.on_stream(side):
            late.add_(1)
        assert accelerator.record_event(side, event) is event
        if waits_anew:
            accelerator.wait_event(current, event)
        late.mul_(2)

    assert kinds_found(program) == found


def test_a_ready_tensor_travels_with_its_event() -> None:
    """Waiting for it gives the tensor, ordered."""

    def program(rank: int) -> None:
        side, tensor = write_on_a_side_stream()
        ready = accelerator.Ready(tensor, accelerator.record_event(side))
        accelerator.wait_ready(accelerator.current_stream(CPU), ready).mul_(2)

    assert kinds_found(program) == []


def outer_reductions(*, keep: bool) -> Callable[[int], None]:
    """Buffers born on one stream are read on another, one after the other."""

    def program(rank: int) -> None:
        inner, outer = accelerator.new_stream(CPU), accelerator.new_stream(CPU)
        kept = accelerator.Kept(inner)
        total = torch.zeros(4)
        accelerator.wait_stream(outer, accelerator.current_stream(CPU))
        for _ in range(4):
            with accelerator.on_stream(inner):
                buffer = torch.ones(4)
            accelerator.wait_stream(outer, inner)
            with accelerator.on_stream(outer):
                total.add_(buffer)
            event = accelerator.record_event(outer)
            if keep:
                accelerator.keep_alive(buffer, until=event, kept=kept)
            assert len(kept.held) <= accelerator.KEPT_MAX
            del buffer
        accelerator.let_go(kept)
        assert not kept.held

    return program


def test_memory_may_not_go_back_while_another_stream_reads_it() -> None:
    """The control of the test below: dropped at once, it is reused too early."""
    assert "UseAfterFree" in kinds_found(outer_reductions(keep=False))


def test_what_is_kept_alive_goes_back_behind_its_last_reader() -> None:
    """At most a fixed number is held, and each is let go in order."""
    assert kinds_found(outer_reductions(keep=True)) == []


def test_the_stubs_events_order_nothing_and_break_nothing() -> None:
    """On plain CPU processes an event is None and everything has happened already."""
    stream = accelerator.new_stream(CPU)
    event = accelerator.record_event(stream)
    accelerator.wait_event(stream, event)
    kept = accelerator.Kept(stream)
    accelerator.keep_alive(torch.ones(1), until=event, kept=kept)
    accelerator.let_go(kept)

    assert event is None
    assert accelerator.wait_ready(stream, accelerator.Ready(torch.ones(1), event)).item() == 1


def test_a_released_tensor_has_no_memory_and_gets_it_back() -> None:
    """Views see the new memory, and the version counters do not move."""
    tensor = accelerator.allocate(4, torch.float32, CPU)
    view = tensor[1:3]

    accelerator.release(tensor)
    assert accelerator.is_released(tensor)
    accelerator.reallocate(tensor)
    tensor.copy_(torch.arange(4.0))

    assert view.tolist() == [1, 2]
    assert tensor._version == 1
    assert not accelerator.is_released(tensor)


def test_an_empty_tensor_is_never_released() -> None:
    """It has no memory to give back, so none is missing."""
    tensor = accelerator.allocate(0, torch.float32, CPU)

    accelerator.release(tensor)

    assert not accelerator.is_released(tensor)


def test_an_annotation_is_seen_by_a_profiler_only() -> None:
    """Nobody listening, the same empty scope comes back each time."""
    assert accelerator.annotate("unshard") is accelerator.annotate("reshard")

    with profile(use_cpu=True) as profiler, accelerator.annotate("unshard", "{} layers.0".format):
        torch.ones(1)

    names = [event.name for event in profiler.function_events or []]
    assert "fsdp_core::unshard layers.0" in names


def test_an_annotation_costs_one_question_when_nobody_listens() -> None:
    """Of a flag, in C; the scope that comes back does nothing, and no name is built."""
    called: list[str] = []

    def note(frame: FrameType, event: str, _arg: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    def name_of(operation: str) -> str:
        return f"{operation} layers.0"

    sys.setprofile(note)
    with accelerator.annotate("unshard", name_of):
        pass
    sys.setprofile(None)

    assert called == ["annotate", "__enter__", "__exit__"]


def test_an_annotation_reaches_nvtx_where_its_library_was_injected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its name as it is: braces of a module's name are no places for arguments."""
    seen: list[str] = []
    monkeypatch.setattr(accelerator, "_NVTX_LISTENS", True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("pop"))

    with pytest.raises(KeyError), accelerator.annotate("unshard experts.{0}"):
        raise KeyError

    assert seen == ["fsdp_core::unshard experts.{0}", "pop"]


def test_names_of_the_accelerator_are_looked_up_when_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever replaces them at run time is served."""

    class Replacement(torch.cpu.Stream):
        pass

    monkeypatch.setattr(torch.cpu, "Stream", Replacement)

    assert isinstance(accelerator.new_stream(CPU), Replacement)
