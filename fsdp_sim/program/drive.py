"""Units without hooks, driven by hand: gathered around each of their calls, and around each backward."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from fsdp_core import FsdpModule


class Driver:
    """Who gathers and frees the units that the runtime does not hook; their modules hold it, by its hooks.

    Args:
        units: the modules of each such unit, in order of sharding.

    Attributes:
        in_backward: a backward runs, and calls are recomputations.
    """

    def __init__(self, units: Sequence[Sequence[nn.Module]]) -> None:
        self.in_backward = False
        self._first = [weakref.ref(_sharded(modules[0])) for modules in units]
        for modules in units:
            for module in modules:
                module.register_forward_pre_hook(self._before_forward)
                module.register_forward_hook(self._after_forward, always_call=True)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Hold all units from the start of a backward until its gradients are there."""
        units = [unit for ref in self._first if (unit := ref()) is not None]
        for unit in reversed(units):
            unit.unshard("backward")
        self.in_backward = True
        try:
            yield
        finally:
            self.in_backward = False
            for unit in units:
                unit.reshard()

    def _before_forward(self, module: nn.Module, _args: Any) -> None:
        _sharded(module).unshard("none" if self.in_backward else "forward")

    def _after_forward(self, module: nn.Module, _args: Any, _output: Any) -> None:
        _sharded(module).reshard()


def _sharded(module: nn.Module) -> FsdpModule:
    assert isinstance(module, FsdpModule), "a unit's module is sharded"
    return module
