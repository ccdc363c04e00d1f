"""After a failure of any kind, the next run in the same process is as in a fresh one."""

import contextlib
import os
import signal
import subprocess
import sys
import threading  # noqa: TID251  a thread that a program starts is one of the failures
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fsdp_sim
from fsdp_sim.errors import ProgramExit
from tests.sim.litmus import cpu


class Boom(Exception):
    """What a program raises."""


def boom(*_: Any) -> None:
    """Raise it."""
    raise Boom


class RaisesInBackward(torch.autograd.Function):
    """Lets values through and no gradient."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        """Return a copy."""
        return x.clone()

    @staticmethod
    def backward(*_: Any) -> Any:
        """Raise."""
        raise Boom


class Model(nn.Module):
    """Two layers under FSDP2, the second on a side stream; ``between`` sees what goes from one to the other."""

    def __init__(self, between: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(4, 4), nn.Linear(4, 4), between
        for unit in (self.first, self.second, self):
            fully_shard(unit)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        side = cpu.Stream()
        side.wait_stream(cpu.current_stream())
        with cpu.stream(side):
            changed = self.between(x)
            y: Tensor = self.second(x if changed is None else changed)
        cpu.current_stream().wait_stream(side)
        y.record_stream(cpu.current_stream())
        return y.clone()


def nothing(_: Tensor) -> None:
    """Do nothing."""


def train(_rank: int, between: Callable[[Tensor], Any] = nothing) -> None:
    """Train two steps."""
    model = Model(between)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def on_rank_1(act: Callable[..., Any]) -> Callable[[Tensor], Any]:
    """Return what acts on rank 1 alone."""
    return lambda *args: act(*args) if dist.get_rank() == 1 else None


def raises_in_hook(_rank: int, summed: Callable[[Any], Any] = boom) -> None:
    """Raise in a communication hook of DDP, once the backward has begun."""

    def hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = summed(bucket)
        return future

    model = DistributedDataParallel(nn.Linear(4, 4))
    model.register_comm_hook(None, hook)
    model(torch.ones(2, 4)).sum().backward()


def raises_in_callback(rank: int) -> None:
    """Raise in what is called when the bucket is summed."""

    def summed(bucket: dist.GradBucket) -> Any:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(boom)

    raises_in_hook(rank, summed)


def with_tensor_hook(x: Tensor) -> None:
    """Raise in backward, in the hook of a tensor."""
    x.register_hook(boom)


def bad_collective(x: Tensor) -> None:
    """Gather into what does not fit."""
    dist.all_gather([torch.empty(3), torch.empty(3)], x.detach().flatten())


def race(x: Tensor) -> None:
    """Write on one stream what the other reads."""
    with torch.no_grad(), cpu.stream(cpu.Stream()):
        x.detach().add_(0)


def touch_on_a_thread(x: Tensor) -> None:
    """Compute with a rank's tensor where nobody sees it."""

    def touch() -> None:
        with contextlib.suppress(fsdp_sim.UnseenThread):
            x.detach().add_(1)

    thread = threading.Thread(target=touch)
    thread.start()
    thread.join()


def interrupt(x: Tensor) -> None:
    """Press Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)
    poll_for_ever(x)


def poll_for_ever(_: Tensor) -> None:
    """Ask the store for what nobody sets."""
    store = dist.distributed_c10d._get_default_store()
    while not store.check(["never set"]):
        pass


def hold_a_lock() -> Callable[[Tensor], None]:
    """Wait for the other rank with a lock that it wants."""
    lock = threading.Lock()

    def hold(_: Tensor) -> None:
        with lock:
            dist.barrier()

    return hold


def simulate(between: Callable[[Tensor], Any], **options: Any) -> None:
    """Train two ranks."""
    fsdp_sim.simulate(train, 2, args=(between,), **options)


FAILURES: dict[str, tuple[type[BaseException], Callable[[], Any]]] = {
    "forward": (Boom, lambda: simulate(boom)),
    "forward of one rank": (Boom, lambda: simulate(on_rank_1(boom))),
    "backward": (Boom, lambda: simulate(RaisesInBackward.apply)),
    "backward of one rank": (Boom, lambda: simulate(on_rank_1(RaisesInBackward.apply))),
    "hook of a tensor": (Boom, lambda: simulate(with_tensor_hook)),
    "communication hook": (Boom, lambda: fsdp_sim.simulate(raises_in_hook, 2)),
    "callback of a future": (Boom, lambda: fsdp_sim.simulate(raises_in_callback, 2)),
    "collective": (ValueError, lambda: simulate(bad_collective)),
    "exit": (ProgramExit, lambda: simulate(lambda _: sys.exit(3))),
    "interrupt": (KeyboardInterrupt, lambda: simulate(on_rank_1(interrupt))),
    "mismatch": (
        fsdp_sim.CollectiveMismatch,
        lambda: simulate(on_rank_1(lambda _: dist.barrier())),
    ),
    "deadlock": (fsdp_sim.Deadlock, lambda: simulate(on_rank_1(lambda _: sys.exit()))),
    "race": (fsdp_sim.Race, lambda: simulate(race)),
    "crash": (fsdp_sim.Deadlock, lambda: simulate(nothing, faults=["crash:issue@rank=1,at=9"])),
    "memory": (torch.OutOfMemoryError, lambda: simulate(nothing, faults=["oom:alloc@at=9"])),
    "hang": (fsdp_sim.Deadlock, lambda: simulate(nothing, faults=["hang:issue@rank=1,at=9"])),
    "step limit": (fsdp_sim.StepLimit, lambda: simulate(poll_for_ever, step_limit=200)),
    "thread": (fsdp_sim.UnseenThread, lambda: simulate(touch_on_a_thread)),
    "lock": (fsdp_sim.HandoverTimeout, lambda: simulate(hold_a_lock(), handover_seconds=0.5)),
    "diverged": (fsdp_sim.Diverged, lambda: fsdp_sim.replay(train, "v1;w2;3>1;9999>0")),
}


def digests() -> list[str]:
    """Return what identifies a clean run, with one schedule of its own."""
    runs = [fsdp_sim.simulate(train, 2), fsdp_sim.simulate(train, 2, schedule="v1;w2;2>1")]
    return [digest for run in runs for digest in (run.trace.digest, run.trace.order_digest)]


@pytest.fixture(scope="module")
def in_a_fresh_process() -> list[str]:
    """What a process gives in which nothing has failed."""
    line = "from tests.sim.test_after_failures import digests; print(*digests())"
    return subprocess.check_output([sys.executable, "-c", line], text=True).split()


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_leaves_nothing_behind(kind: str, in_a_fresh_process: list[str]) -> None:
    """Streams, tensors and graphs that its error keeps alive included."""
    expected, fail = FAILURES[kind]
    with pytest.raises(expected) as kept:
        fail()

    assert digests() == in_a_fresh_process
    assert kept.value.__traceback__ is not None
