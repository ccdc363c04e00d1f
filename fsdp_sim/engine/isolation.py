"""Isolation: per-process host state that is per rank here, swapped at each hand-over.

What is thread-local in PyTorch already (grad mode, autocast, default device, dispatch modes, the
autograd thread settings) needs no slot, since each rank is a thread; ``fresh_thread`` gives a thread
that has served before the state of a new one.  What stays shared by all ranks is listed on the limits
page.
"""

import copy
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import GEN_SUSPENDED, getgeneratorstate
from types import GeneratorType
from typing import Any, NamedTuple

import torch

from fsdp_sim.engine import patches


class Slot(NamedTuple):
    """One piece of state: how to save it and how to put a saved value back."""

    name: str
    save: Callable[[], Any]
    restore: Callable[[Any], Any]


def _numpy_save() -> Any:
    numpy_random = sys.modules.get("numpy.random")
    return numpy_random.get_bit_generator() if numpy_random is not None else None


def _numpy_restore(value: Any) -> None:
    """Put a generator back; a rank that has none when somebody imports numpy gets one of its seed."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None and value is not None:
        is_seed = isinstance(value, int)
        numpy_random.set_bit_generator(numpy_random.MT19937(value) if is_seed else value)


def _warnings_restore(value: Any) -> None:
    is_changed = value[0] != warnings.filters
    warnings.filters, warnings.showwarning, *_ = value
    patches.set_warning_printer(value[2])
    if is_changed:
        patches.warnings_filters_changed()


def _warnings_save() -> Any:
    return warnings.filters, warnings.showwarning, patches.get_warning_printer()


def _main_restore(value: Any) -> None:
    sys.modules["__main__"], sys.argv = value


def _streams_restore(value: Any) -> None:
    sys.stdout, sys.stderr = value


SLOTS: tuple[Slot, ...] = (
    Slot("torch random numbers", patches.get_rng_state, patches.set_rng_state),
    Slot("numpy random numbers", _numpy_save, _numpy_restore),
    Slot("Python random numbers", patches.get_random_state, patches.set_random_state),
    Slot(
        "main module and its arguments", lambda: (sys.modules["__main__"], sys.argv), _main_restore
    ),
    Slot("standard output and error", lambda: (sys.stdout, sys.stderr), _streams_restore),
    Slot("environment variables", patches.get_environ, patches.set_environ),
    Slot("process groups", patches.get_c10d_world, patches.set_c10d_world),
    Slot("PyTorch's globals", patches.get_process_globals, patches.set_process_globals),
    Slot("default dtype", patches.get_default_dtype, patches.set_default_dtype),
    Slot("numerical settings", patches.get_numerics, patches.set_numerics),
    Slot("warnings", _warnings_save, _warnings_restore),
    Slot("dispatch mode flags", patches.get_dispatch_flags, patches.set_dispatch_flags),
)


class HostState:
    """The per-rank values of all slots, while another rank runs."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: list[Any] = [None] * len(SLOTS)

    def save(self) -> None:
        """Take the state of the process as this rank's; where there is none, the last one stays."""
        for index, slot in enumerate(SLOTS):
            value = slot.save()
            if value is not None:
                self._values[index] = value

    def start(self, environ: Any, seed: int) -> None:
        """Take what the rank's process would start with: the caller's state, but its own identity.

        Args:
            environ: its environment variables.
            seed: of its random number generators.
        """
        outer = HostState()
        outer.save()
        patches.set_environ(environ)
        patches.set_c10d_world(patches.RankC10dWorld())
        patches.set_process_globals([copy.copy(each) for each in patches.get_process_globals()])
        patches.seed_everything(seed)
        warnings.filters = list(warnings.filters)
        self._values = [seed] * len(SLOTS)  # of numpy, if it is not imported yet
        self.save()
        outer.restore()

    def restore(self) -> None:
        """Make this rank's state that of the process."""
        for slot, value in zip(SLOTS, self._values, strict=True):
            slot.restore(value)

    def clear(self) -> None:
        """Let go of everything: the rank has ended."""
        self._values = []


THREAD_SLOTS: tuple[Slot, ...] = (
    Slot("grad mode", torch.is_grad_enabled, patches.set_grad_enabled),
    Slot("autocast", patches.get_autocast, patches.set_autocast),
    Slot("default device", lambda: None, lambda _: patches.forget_default_device()),
    Slot("modes", patches.mode_depths, patches.leave_modes),
    Slot("saved tensors", lambda: None, lambda _: patches.leave_saved_tensor_hooks()),
)


@contextmanager
def fresh_thread() -> Iterator[None]:
    """Let a program leave nothing on its thread, which others will use.

    Autocast's cache of weights is one for the process: it is switched off, since which rank fills it
    would depend on the schedule.
    """
    with ExitStack() as stack:
        for slot in THREAD_SLOTS:
            stack.callback(slot.restore, slot.save())
        patches.disable_autocast_cache()
        try:
            yield
        except BaseException as error:
            _close_generators(error)
            raise


def _close_generators(error: BaseException) -> None:
    """Close what the frames of an error hold half-run, here and not where the error is let go.

    Blocks that such a generator is in may have changed its thread: up to torch 2.12 a checkpoint whose
    function raises is in the hooks of saved tensors still.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for name in frame.f_code.co_varnames:
            held = frame.f_locals.get(name)
            if isinstance(held, GeneratorType) and getgeneratorstate(held) == GEN_SUSPENDED:
                held.close()
