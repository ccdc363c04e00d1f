"""Own process: what a rank's own process would have - its end, its signal handlers, its locks - and start."""

import functools
import logging
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from fsdp_sim.engine import machine as machines
from fsdp_sim.engine import patches
from fsdp_sim.engine.machine import Machine


def install(undo: patches.Patches) -> None:
    """Let ranks be as processes; ``undo`` puts all names back.

    A rank that is parked inside a logging handler, whose message prints a tensor, must not stop others
    that log; nor one inside a cached property, which Python 3.11 computes under a lock.
    """
    undo.wrap(os, "_exit", _ending_the_rank)
    undo.wrap(signal, "signal", _setting_handler)
    undo.wrap(signal, "getsignal", _getting_handler)
    for module in patches.STARTERS_OF_PROCESSES:
        undo.wrap(module, "start_processes", _refusing_in_ranks)
    _OnePerProcess("PyTorch's profiler", "profile one rank, such as the one with RANK=0").install(
        undo, patches.PROFILER, patches.PROFILER_STARTS, patches.PROFILER_END
    )
    _OnePerProcess("forward-mode differentiation", "call no collective inside its level").install(
        undo, patches.FORWARD_MODE, patches.FORWARD_MODE_STARTS, patches.FORWARD_MODE_END
    )
    for owner in (logging.Handler, functools.cached_property):
        undo.define(owner, "lock", property(_lock_of, _set_lock))


def _ending_the_rank(original: Callable[[int], None]) -> Callable[[int], None]:
    process = os.getpid()

    @functools.wraps(original)
    def leave(status: int) -> None:
        if machines.current() is None or os.getpid() != process:
            original(status)
        raise SystemExit(status)

    return leave


def _setting_handler(original: Callable[..., Any]) -> Callable[..., Any]:
    """A rank's handlers are never called: signals reach the process, and are its caller's business."""

    @functools.wraps(original)
    def set_handler(signalnum: Any, handler: Any) -> Any:
        machine = machines.current()
        if machine is None:
            return original(signalnum, handler)
        before = signal.getsignal(signalnum)
        machine.signal_handlers[int(signalnum)] = handler
        return before

    return set_handler


def _getting_handler(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def get_handler(signalnum: Any) -> Any:
        machine = machines.current()
        own = {} if machine is None else machine.signal_handlers
        return own[int(signalnum)] if int(signalnum) in own else original(signalnum)

    return get_handler


def _refusing_in_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def start_processes(*args: Any, **kwargs: Any) -> Any:
        if machines.current() is not None:
            _refuse_processes()
        return original(*args, **kwargs)

    return start_processes


def _refuse_processes() -> NoReturn:
    raise NotImplementedError(
        "a simulated rank must not start ranks, got torch.multiprocessing.spawn, whose processes would be "
        "real ones; call the function that it was given with the rank from os.environ['RANK'], as under "
        "torchrun"
    )


class _OnePerProcess:
    """What PyTorch has once for a process, and two threads must not use at once.

    Args:
        what: its name in the error.
        advice: what to do instead.
    """

    def __init__(self, what: str, advice: str) -> None:
        self._what, self._advice = what, advice
        self._user: Machine | None = None

    def install(self, undo: patches.Patches, owner: Any, starts: Sequence[str], end: str) -> None:
        """Watch the functions of ``owner`` that begin its use, and the one that ends it."""
        for name in starts:
            undo.wrap(owner, name, self._starting)
        undo.wrap(owner, end, self._ending)

    def _starting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def start(*args: Any, **kwargs: Any) -> Any:
            machine, user = machines.current(), self._user
            if machine is not None and user is not None and user is not machine:
                raise NotImplementedError(
                    f"{self._what} must be used by one simulated rank at a time, got rank "
                    f"{machine.rank.index} while rank {user.rank.index} uses it; {self._advice}"
                )
            self._user = machine
            return original(*args, **kwargs)

        return start

    def _ending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def end(*args: Any, **kwargs: Any) -> Any:
            self._user = None
            return original(*args, **kwargs)

        return end


class _RanksOwnLock:
    """A lock that only one rank has: nobody else wants it."""

    def acquire(self, *_: Any, **__: Any) -> bool:
        """Hold it."""
        return True

    def release(self) -> None:
        """Let go of it."""

    def _at_fork_reinit(self) -> None:
        """Be free in a process that was forked, such as a worker of a DataLoader."""

    def __enter__(self) -> None:
        """Hold it."""

    def __exit__(self, *_: object) -> None:
        """Let go of it."""


_RANKS_OWN_LOCK = _RanksOwnLock()


def _lock_of(owner: Any) -> Any:
    return owner.__dict__.get("lock") if machines.current() is None else _RANKS_OWN_LOCK


def _set_lock(owner: Any, lock: Any) -> None:
    owner.__dict__["lock"] = lock
