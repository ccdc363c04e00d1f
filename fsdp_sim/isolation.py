"""Isolation: per-process host state that is per rank here, swapped at each hand-over.

What is thread-local in PyTorch already (grad mode, autocast, default device, dispatch modes, the
autograd thread settings) needs no slot, since each rank is a thread.  What stays shared by all ranks is
listed on the limits page.
"""

import random
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from fsdp_sim import patches


class Slot(NamedTuple):
    """One piece of process-wide state: how to save it and how to put a saved value back."""

    name: str
    save: Callable[[], Any]
    restore: Callable[[Any], Any]


def _numpy_save() -> Any:
    numpy_random = sys.modules.get("numpy.random")
    return numpy_random.get_bit_generator() if numpy_random is not None else None


def _numpy_restore(value: Any) -> None:
    if value is not None:
        sys.modules["numpy.random"].set_bit_generator(value)


def _random_save() -> Any:
    return random.getstate()


def _warnings_restore(value: Any) -> None:
    warnings.filters[:] = value  # type: ignore[index]
    patches.warnings_filters_changed()


def _main_save() -> Any:
    return sys.modules["__main__"], sys.argv


def _main_restore(value: Any) -> None:
    sys.modules["__main__"], sys.argv = value


SLOTS: tuple[Slot, ...] = (
    Slot("torch random numbers", patches.get_rng_state, patches.set_rng_state),
    Slot("numpy random numbers", _numpy_save, _numpy_restore),
    Slot("Python random numbers", _random_save, random.setstate),
    Slot("main module and its arguments", _main_save, _main_restore),
    Slot("environment variables", patches.get_environ, patches.set_environ),
    Slot("process groups", patches.get_c10d_world, patches.set_c10d_world),
    Slot("default dtype", patches.get_default_dtype, patches.set_default_dtype),
    Slot("warning filters", lambda: list(warnings.filters), _warnings_restore),
    Slot("dispatch mode flags", patches.get_dispatch_flags, patches.set_dispatch_flags),
)


class HostState:
    """The per-rank values of all slots, while another rank runs."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: list[Any] = []

    def save(self) -> None:
        """Take the state of the process as this rank's."""
        self._values = [slot.save() for slot in SLOTS]

    def clear(self) -> None:
        """Let go of everything: the rank has ended."""
        self._values = []

    def restore(self) -> None:
        """Make this rank's state that of the process."""
        for slot, value in zip(SLOTS, self._values, strict=True):
            slot.restore(value)
