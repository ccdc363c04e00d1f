"""Overlap: which of two streams waited for the other, by timing events, and by the clocks of the trace.

In each run one labelled range is delayed on its stream.  Every range that comes later either waits for it
or does not: the GPU says so by the times of events, the recording by its vector clocks.
"""

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_sim
from ci.gpu.delays import sleep
from ci.gpu.findings import on_device_once
from ci.gpu.process import device, has_gpu, one_process_group
from ci.gpu.programs import kept, without_collector
from fsdp_sim.engine import machine as machines
from fsdp_sim.engine import patches
from fsdp_sim.program import run_program

PROGRAMS = ("zero3", "zero1", "microbatches", "hsdp_outer", "hfsdp_outer", "one_stream")
DELAYED_RANGES = 24
DELAY_MS = 80.0

VERDICTS = {
    (True, True): "ordered, and waited for",
    (True, False): "ORDERED, AND NOT WAITED FOR",
    (False, False): "not ordered, and ran beside",
    (False, True): "not ordered, and yet waited for",
}


@dataclass
class Start:
    """Where a range begins on a stream.

    Attributes:
        event: recorded there.
        is_ordered: the clocks say that it is behind what was delayed.
    """

    what: str
    event: Any
    is_ordered: bool


class Watch(TorchDispatchMode):
    """Delays the n-th range of a run, and looks at all that begin while it sleeps."""

    def __init__(self, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._number = number
        self._last: tuple[str | None, str] | None = None
        self.count = 0
        self.delayed = ""
        self.end: Any = None
        self._stream, self._tick = -1, 0
        self.starts: list[Start] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look where the program stands, and make the call."""
        if types and patches.is_python_subclass(types):
            return NotImplemented
        machine = machines.current()
        if machine is not None and func.namespace != "profiler" and machine.annotation is not None:
            here = machine.annotation, machine.stream.role
            if here != self._last:
                self._last = here
                self._begin(machine, f"{here[0]} on {here[1]}")
        return func(*args, **(kwargs or {}))

    def _begin(self, machine: Any, what: str) -> None:
        stream = machine.current_stream_id()
        clock = machine.clocks.of(stream)
        if self.count == self._number:
            self.delayed, self._stream, self._tick = what, stream, clock[stream] + 1
            sleep(DELAY_MS)
            self.end = _timed()
        elif self.end is not None and stream != self._stream and not self.end.query():
            is_ordered = clock.get(self._stream, 0) >= self._tick
            self.starts.append(Start(what, _timed(), is_ordered))
        self.count += 1


def _timed() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def run() -> dict[str, object]:
    """Return how often the GPU waited where the clocks say so, by program."""
    with one_process_group():
        on_device_once()
        rows = {name: _program(name) for name in PROGRAMS}
    print(json.dumps(rows, indent=1))
    return dict(rows)


def _program(name: str) -> dict[str, object]:
    count = _watched(name, -1)[0].count
    if not has_gpu():
        return {"ranges": count}
    verdicts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    step = max(count // DELAYED_RANGES, 1)
    for number in range(0, count, step):
        watch, base = _watched(name, number)
        if watch.end is None:
            continue
        end = base.elapsed_time(watch.end)
        for start in watch.starts:
            has_waited = base.elapsed_time(start.event) >= end
            verdict = VERDICTS[start.is_ordered, has_waited]
            verdicts[verdict] += 1
            examples.setdefault(verdict, f"{start.what}, after {watch.delayed}")
    return {"ranges": count, "pairs": dict(verdicts), "first of each": examples}


def _watched(name: str, number: int) -> tuple[Watch, Any]:
    """Run a program once with one range delayed; return what was seen, and an event before it."""
    base = None
    if has_gpu():
        torch.cuda.synchronize()
        base = _timed()
    with without_collector(), fsdp_sim.record(device=device().type), Watch(number) as watch:
        run_program(kept()[name], device())
    if has_gpu():
        torch.cuda.synchronize()
    return watch, base
