"""Rules: what CUDA and NCCL promise of order, each as a small program in which one op is late.

A body lets one op write or read late, and another come after it.  It returns 1 if the other one came after
indeed.  Where the rule orders both, it must be 1 on the GPU, and the simulator must find nothing; where it
does not, the delay makes it another number, and the simulator must find it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ci.gpu.delays import sleep

DELAY_MS = 20.0
NUMEL = 3 << 18
"""Elements of a buffer; its size is used by nothing else, so a freed one is the next of that size."""
NUMEL_OF_COLLECTIVE = 1 << 24

_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Its older name is on torch 2.11 alone."""


@dataclass
class Bench:
    """What a body has.

    Attributes:
        cuda: ``torch.cuda``, or what stands for it.
        x: zeros, written before anything else happens.
    """

    cuda: Any
    where: torch.device

    def __post_init__(self) -> None:
        self.side, self.main = self.cuda.Stream(), self.cuda.current_stream()
        self.x, self.y = self.zeros(), self.zeros()
        self.cuda.synchronize()

    def zeros(self, numel: int = NUMEL) -> Tensor:
        """Return a buffer on the device; a small one where nothing takes time."""
        return torch.zeros(numel if self.where.type == "cuda" else 16, device=self.where)

    def slow(self) -> None:
        """Let the current stream take long."""
        if self.where.type == "cuda":
            sleep(DELAY_MS)

    def write_late(self) -> None:
        """Write ones on the side stream, late."""
        with self.cuda.stream(self.side):
            self.slow()
            self.x.fill_(1)

    def read(self, tensor: Tensor | None = None) -> float:
        """Read the last element on the current stream, and return it once all is done."""
        seen = (self.x if tensor is None else tensor)[-1:].clone()
        self.cuda.synchronize()
        return seen.item()


Body = Callable[[Bench], float]
RULES: dict[str, tuple[bool, Body]] = {}


def rule(name: str, *, is_ordered: bool) -> Callable[[Body], Body]:
    """Add a rule."""

    def add(body: Body) -> Body:
        RULES[name] = (is_ordered, body)
        return body

    return add


# ---------------------------------------------------------------------- streams and events


@rule("a stream runs its work in order", is_ordered=True)
def _(bench: Bench) -> float:
    bench.slow()
    bench.x.fill_(1)
    return bench.read()


@rule("two streams are not ordered", is_ordered=False)
def _(bench: Bench) -> float:
    bench.write_late()
    return bench.read()


@rule("a side stream does not wait for the default stream", is_ordered=False)
def _(bench: Bench) -> float:
    bench.slow()
    bench.x.fill_(1)
    with bench.cuda.stream(bench.side):
        return bench.read()


@rule("wait_stream orders what is there", is_ordered=True)
def _(bench: Bench) -> float:
    bench.write_late()
    bench.main.wait_stream(bench.side)
    return bench.read()


@rule("wait_stream orders nothing that comes later", is_ordered=False)
def _(bench: Bench) -> float:
    bench.main.wait_stream(bench.side)
    bench.write_late()
    return bench.read()


@rule("wait_event orders what was recorded", is_ordered=True)
def _(bench: Bench) -> float:
    bench.write_late()
    bench.main.wait_event(bench.side.record_event())
    return bench.read()


@rule("an event covers nothing behind it", is_ordered=False)
def _(bench: Bench) -> float:
    event = bench.side.record_event()
    bench.write_late()
    bench.main.wait_event(event)
    return bench.read()


@rule("waiting for an event that was never recorded does nothing", is_ordered=False)
def _(bench: Bench) -> float:
    bench.write_late()
    bench.main.wait_event(bench.cuda.Event())
    return bench.read()


@rule("a wait is for the last record before it", is_ordered=True)
def _(bench: Bench) -> float:
    event = bench.side.record_event()
    bench.write_late()
    event.record(bench.side)
    bench.main.wait_event(event)
    return bench.read()


@rule("a wait is not for a record after it", is_ordered=False)
def _(bench: Bench) -> float:
    event = bench.side.record_event()
    bench.main.wait_event(event)
    bench.write_late()
    event.record(bench.side)
    return bench.read()


@rule("order goes on through a third stream", is_ordered=True)
def _(bench: Bench) -> float:
    third = bench.cuda.Stream()
    bench.write_late()
    third.wait_stream(bench.side)
    bench.main.wait_stream(third)
    return bench.read()


# ---------------------------------------------------------------------- the host


@rule("the host waits for a stream, and what it launches then is behind it", is_ordered=True)
def _(bench: Bench) -> float:
    bench.write_late()
    bench.side.synchronize()
    return bench.read()


@rule("the host waits for an event", is_ordered=True)
def _(bench: Bench) -> float:
    bench.write_late()
    bench.side.record_event().synchronize()
    return bench.read()


@rule("the host waits for the device", is_ordered=True)
def _(bench: Bench) -> float:
    bench.write_late()
    bench.cuda.synchronize()
    return bench.read()


@rule("a query that says yes is a wait", is_ordered=True)
def _(bench: Bench) -> float:
    bench.write_late()
    event = bench.side.record_event()
    while not event.query():
        pass
    return bench.read()


@rule("a value is waited for on its own stream", is_ordered=True)
def _(bench: Bench) -> float:
    bench.write_late()
    with bench.cuda.stream(bench.side):
        bench.x[0].item()
    return bench.read()


@rule("a value of one stream is no wait for another", is_ordered=False)
def _(bench: Bench) -> float:
    bench.write_late()
    bench.y[0].item()
    return bench.read()


# ---------------------------------------------------------------------- collectives


def _collective(bench: Bench, *, is_async: bool) -> tuple[Tensor, Any]:
    """Write ones late and reduce them into zeros; return these and the handle."""
    source, target = bench.zeros(NUMEL_OF_COLLECTIVE), bench.zeros(NUMEL_OF_COLLECTIVE)
    bench.cuda.synchronize()
    bench.slow()
    source.fill_(1)
    return target, _reduce_scatter(target, source, async_op=is_async)


@rule("a synchronous collective runs on the current stream", is_ordered=True)
def _(bench: Bench) -> float:
    target, _ = _collective(bench, is_async=False)
    return bench.read(target)


@rule("a synchronous collective on a side stream is ordered by waiting for that", is_ordered=True)
def _(bench: Bench) -> float:
    with bench.cuda.stream(bench.side):
        target, _ = _collective(bench, is_async=False)
    bench.main.wait_stream(bench.side)
    return bench.read(target)


@rule("a synchronous collective on a side stream is not waited for otherwise", is_ordered=False)
def _(bench: Bench) -> float:
    with bench.cuda.stream(bench.side):
        target, _ = _collective(bench, is_async=False)
    return bench.read(target)


@rule("an asynchronous collective is behind the current stream, and wait orders", is_ordered=True)
def _(bench: Bench) -> float:
    target, work = _collective(bench, is_async=True)
    work.wait()
    return bench.read(target)


@rule("an asynchronous collective without wait is not ordered", is_ordered=False)
def _(bench: Bench) -> float:
    target, work = _collective(bench, is_async=True)
    seen = bench.read(target)
    work.wait()
    return seen


@rule("a callback of a Future is behind the collective", is_ordered=True)
def _(bench: Bench) -> float:
    target, work = _collective(bench, is_async=True)
    seen = work.get_future().then(lambda _: target[-1:].clone())
    return seen.wait().item()


@rule("a callback of a Future is not behind what came after the collective", is_ordered=False)
def _(bench: Bench) -> float:
    future = dist.all_reduce(bench.y, async_op=True).get_future()
    bench.slow()
    bench.x.fill_(1)
    return future.then(lambda _: bench.x[-1:].clone()).wait().item()


@rule("a barrier is no wait for a side stream", is_ordered=False)
def _(bench: Bench) -> float:
    bench.write_late()
    dist.barrier()
    return bench.read()


# ---------------------------------------------------------------------- memory


def _read_late(bench: Bench, block: Tensor) -> None:
    """Copy a block to y on the side stream, late."""
    bench.side.wait_stream(bench.main)
    with bench.cuda.stream(bench.side):
        bench.slow()
        bench.y.copy_(block)


def _reuse(bench: Bench) -> float:
    """Write twos into the next block; return what was read late."""
    block = bench.zeros()
    block.fill_(2)
    bench.cuda.synchronize()
    return bench.y[-1].item()


@rule("a freed block is used again at once by its own stream", is_ordered=False)
def _(bench: Bench) -> float:
    block = bench.zeros().fill_(1)
    _read_late(bench, block)
    del block
    return _reuse(bench)


@rule("a storage resized to nothing is freed", is_ordered=False)
def _(bench: Bench) -> float:
    block = bench.zeros().fill_(1)
    _read_late(bench, block)
    block.untyped_storage().resize_(0)
    return _reuse(bench)


@rule("record_stream keeps a block until the other stream is done", is_ordered=True)
def _(bench: Bench) -> float:
    block = bench.zeros().fill_(1)
    _read_late(bench, block)
    block.record_stream(bench.side)
    del block
    return _reuse(bench)


@rule("a wait before the block is freed protects it", is_ordered=True)
def _(bench: Bench) -> float:
    block = bench.zeros().fill_(1)
    _read_late(bench, block)
    bench.main.wait_stream(bench.side)
    del block
    return _reuse(bench)


@rule("a wait between free and allocation protects it too", is_ordered=True)
def _(bench: Bench) -> float:
    block = bench.zeros().fill_(1)
    _read_late(bench, block)
    del block
    bench.main.wait_stream(bench.side)
    return _reuse(bench)


@rule("a block goes back to the stream that it came from", is_ordered=True)
def _(bench: Bench) -> float:
    bench.side.wait_stream(bench.main)
    with bench.cuda.stream(bench.side):
        block = bench.zeros().fill_(1)
        bench.slow()
        bench.y.copy_(block)
    del block
    return _reuse(bench)


# ---------------------------------------------------------------------- autograd


class _SlowDouble(torch.autograd.Function):
    """Doubles, and takes long in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bench: Bench) -> Tensor:
        ctx.bench = bench
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.bench.slow()
        return gradient / 2, None


@rule("the stream that calls backward waits for what ran on others", is_ordered=True)
def _(bench: Bench) -> float:
    leaf = bench.zeros().requires_grad_()
    bench.side.wait_stream(bench.main)
    with bench.cuda.stream(bench.side):
        doubled: Tensor = _SlowDouble.apply(leaf, bench)  # type: ignore[no-untyped-call]
        total = (doubled * 2).sum()
    bench.main.wait_stream(bench.side)
    total.backward()
    assert leaf.grad is not None
    return bench.read(leaf.grad)


@rule("backward runs on the streams of forward, and adds no order before it ends", is_ordered=False)
def _(bench: Bench) -> float:
    leaf, seen = bench.zeros().requires_grad_(), []
    bench.side.wait_stream(bench.main)
    with bench.cuda.stream(bench.side):
        total = _WritesLate.apply(leaf, bench).sum()  # type: ignore[no-untyped-call]
    bench.main.wait_stream(bench.side)
    leaf.register_hook(lambda _: seen.append(_on(bench, bench.main)))
    total.backward()
    bench.cuda.synchronize()
    return seen[0].item()


class _WritesLate(torch.autograd.Function):
    """Writes ones into x in backward, late."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bench: Bench) -> Tensor:
        ctx.bench = bench
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.bench.slow()
        ctx.bench.x.fill_(1)
        return gradient * 2, None


def _on(bench: Bench, stream: Any) -> Tensor:
    """Read the last element of x on a stream."""
    with bench.cuda.stream(stream):
        return bench.x[-1:].clone()
