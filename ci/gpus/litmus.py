"""Litmus of several ranks: order of communicators, matching, and messages; each in processes of its own.

What is expected is what the simulator assumes: collectives of one communicator run in their order,
those of two do not wait for each other, and a message needs both sides.
"""

import json
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import fsdp_sim
from ci.gpu.delays import sleep
from ci.gpu.process import device, has_gpu, one_process_group
from ci.gpus.launch import in_fresh_processes, synchronize

DELAY_MS = 200.0
SECONDS_MAX = 60.0
MESSAGE_NBYTES = (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28)

Body = Callable[[], object]
BODIES: dict[str, Body] = {}
SIMULATED: list[str] = []
"""Names of bodies that run on simulated ranks as they are."""


def body(name: str, *, simulated: bool = False) -> Callable[[Body], Body]:
    """Add a body."""

    def add(function: Body) -> Body:
        BODIES[name] = function
        if simulated:
            SIMULATED.append(name)
        return function

    return add


def run() -> dict[str, object]:
    """Return, for each body, what the ranks have seen, and what the simulator finds."""
    rows: dict[str, dict[str, object]] = {}
    for name in BODIES:
        seen = in_fresh_processes("ci.gpus.litmus", name, seconds=SECONDS_MAX)
        rows[name] = {"ranks": seen}
        if name in SIMULATED:
            size = str(dist.get_world_size())
            (rows[name]["simulator"],) = in_fresh_processes(
                "ci.gpus.litmus", name, size, ranks=1, seconds=SECONDS_MAX
            )
    if dist.get_rank() == 0:
        print(json.dumps(rows, indent=1))
    return dict(rows)


def _findings(name: str, world_size: int) -> list[str]:
    try:
        report = fsdp_sim.simulate(lambda _: BODIES[name](), world_size, strict=False)
    except Exception as error:
        return [type(error).__name__]
    return sorted({finding.kind for finding in report.findings})


# ---------------------------------------------------------------------- order of communicators


def _waits(first: dist.ProcessGroup | None, second: dist.ProcessGroup | None) -> bool | None:
    """Whether a reduction of the second group waits for a late one of the first."""
    values = [torch.ones(1 << 20, device=device()) for _ in range(2)]
    for value, group in zip(values, (first, second)):
        dist.all_reduce(value, group=group)  # communicators are made
    synchronize()
    if not has_gpu():
        return None
    streams = [torch.cuda.Stream() for _ in range(2)]
    begin, late, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    begin.record()
    with torch.cuda.stream(streams[0]):
        sleep(DELAY_MS)
        late.record()
        works = [dist.all_reduce(values[0], group=first, async_op=True)]
    with torch.cuda.stream(streams[1]):
        works.append(dist.all_reduce(values[1], group=second, async_op=True))
        works[1].wait()
        end.record()
    synchronize()
    return begin.elapsed_time(end) >= begin.elapsed_time(late)


@body("a collective waits for the earlier ones of its communicator: yes")
def _() -> object:
    return _waits(None, None)


@body("a collective waits for those of another communicator: no")
def _() -> object:
    return _waits(None, dist.new_group())


@body("an asynchronous collective runs on the current stream: no")
def _() -> object:
    return _runs_on_current(is_async=True)


@body("a synchronous collective runs on the current stream: yes")
def _() -> object:
    return _runs_on_current(is_async=False)


def _runs_on_current(*, is_async: bool) -> bool | None:
    """Whether a later op of the current stream comes after a collective nobody has waited for."""
    value = torch.ones(1 << 26 if has_gpu() else 1 << 10, device=device())
    dist.all_reduce(value)
    synchronize()
    work = dist.all_reduce(value, async_op=is_async)
    if not has_gpu():
        return None
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    is_done = work is None or work.is_completed()
    synchronize()
    return is_done


# ---------------------------------------------------------------------- matching


@body("ranks that reduce different sizes end", simulated=True)
def _() -> object:
    value = torch.ones(4 + dist.get_rank(), device=device())
    dist.all_reduce(value)
    return _sum(value)


@body("ranks that issue two collectives in different order end", simulated=True)
def _() -> object:
    value, parts = torch.ones(4, device=device()), torch.ones(4 * _ranks(), device=device())
    calls = [lambda: dist.all_reduce(value), lambda: dist.all_gather_into_tensor(parts, value)]
    for call in calls if dist.get_rank() else reversed(calls):
        call()
    return _sum(value)


# ---------------------------------------------------------------------- messages


def _peer() -> int | None:
    """Return the other rank of this rank's pair."""
    peer = dist.get_rank() ^ 1
    return peer if peer < _ranks() else None


def _messages(nbytes: int) -> tuple[Tensor, Tensor]:
    return torch.ones(nbytes, dtype=torch.uint8, device=device()), torch.zeros(
        nbytes, dtype=torch.uint8, device=device()
    )


def _add_message_bodies(nbytes: int) -> None:
    @body(f"both send first, {nbytes} bytes", simulated=nbytes == MESSAGE_NBYTES[0])
    def _() -> object:
        peer, (sent, received) = _peer(), _messages(nbytes)
        if peer is not None:
            dist.send(sent, peer)
            dist.recv(received, peer)
        return _sum(received)

    @body(f"both send first in a batch, {nbytes} bytes", simulated=nbytes == MESSAGE_NBYTES[0])
    def _() -> object:
        peer, (sent, received) = _peer(), _messages(nbytes)
        if peer is not None:
            calls = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
            for work in dist.batch_isend_irecv(calls):
                work.wait()
        return _sum(received)


for _nbytes in MESSAGE_NBYTES:
    _add_message_bodies(_nbytes)


def _ranks() -> int:
    return dist.get_world_size()


def _sum(value: Tensor) -> float:
    return value.sum(dtype=torch.float64).item()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(json.dumps(_findings(sys.argv[1], int(sys.argv[2]))))
    else:
        with one_process_group():
            print(json.dumps(BODIES[sys.argv[1]]()))
