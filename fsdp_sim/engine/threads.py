"""Threads: what the threads that a program starts must not do, since no rank's mode would see it."""

import functools
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from torch import Tensor

from fsdp_sim.engine import machine as machines
from fsdp_sim.engine import patches
from fsdp_sim.engine.machine import LOCAL, Machine
from fsdp_sim.engine.task import Thread
from fsdp_sim.engine.tensors import tensors_in
from fsdp_sim.errors import InjectedCrash, UnseenThread, Unwind


def install(undo: patches.Patches) -> None:
    """Watch every thread that a rank starts, and let those of ``async_save`` be the rank itself."""
    undo.wrap(Thread, "start", _watching)
    for module in patches.OWNERS_OF_EXECUTORS:
        undo.wrap(module, "ThreadPoolExecutor", _at_once_in_ranks)


def _at_once_in_ranks(original: Callable[..., Executor]) -> Callable[..., Executor]:
    @functools.wraps(original)
    def executor(*args: Any, **kwargs: Any) -> Executor:
        machine = machines.current()
        return original(*args, **kwargs) if machine is None else _AtOnce()

    return executor


class _AtOnce(Executor):
    """Does what it is given before it returns, as a thread may that is fast."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Call the function; return its Future, which is done."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except (Unwind, InjectedCrash):
            raise
        except BaseException as error:
            future.set_exception(error)
        return future


def _watching(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def start(self: Any) -> None:
        machine = machines.current() or LOCAL.started_by
        if machine is not None:
            self.run = _watched(self.run, machine)
        original(self)

    return start


def _watched(run: Callable[[], None], machine: Machine) -> Callable[[], None]:
    @functools.wraps(run)
    def watched() -> None:
        LOCAL.started_by = machine
        patches.push_mode(_Watch(machine))
        run()

    return watched


class _Watch(patches.CompilableMode):
    """Lets a thread compute with tensors of its own, and refuses those of the rank's device."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    @patches.never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer one call."""
        kwargs = kwargs or {}
        name = func.name()
        if name.startswith("c10d::") or any(
            _is_of(self._machine, tensor) for tensor in tensors_in((args, kwargs))
        ):
            refuse(self._machine, name)
        return func(*args, **kwargs)


def check_read(tensor: Any, name: str) -> None:
    """Refuse a read, past any operator, of a rank's tensor by a thread that the rank started."""
    machine = LOCAL.started_by
    if machine is not None and _is_of(machine, tensor):
        refuse(machine, name)


def refuse(machine: Machine, what: str) -> None:
    """End the run: what a thread does with a rank's tensors cannot be judged.

    Raises:
        UnseenThread: in the thread; the ranks are unwound.
    """
    rank = machine.rank
    error = UnseenThread(
        f"tensors, streams and collectives of a rank must be used on the rank's own thread, got {what} on "
        f"a thread that rank {rank.index} started, at {machines.caller()}; call it on the rank's thread"
    )
    if rank.world.stop_error is None:
        rank.world.stop_error = error
    raise error


def _is_of(machine: Machine, tensor: Tensor) -> bool:
    if not patches.has_storage(tensor):
        return False
    record = machine.memory.known(tensor.untyped_storage())
    return record is not None and not record.is_host
