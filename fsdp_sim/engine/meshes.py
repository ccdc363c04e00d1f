"""Meshes: device meshes of one rank, told apart from those of other ranks and other worlds.

PyTorch compares meshes by their ranks alone and keeps what it has worked out for one in caches, some of
a thread, some of the process.  Here one process has many ranks, and a thread serves many worlds.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fsdp_sim.engine import machine as machines
from fsdp_sim.engine import patches
from fsdp_sim.engine.dispatch import HostMode
from fsdp_sim.engine.machine import Machine


def install(undo: patches.Patches) -> None:
    """Mark each mesh that a rank makes, and keep what fills those caches out of the ranks' ops."""
    install_unmarked(undo)
    undo.wrap(patches.DeviceMesh, "__init__", _marking)


def install_unmarked(undo: patches.Patches) -> None:
    """Let what a mesh computes of its ranks be the host's, and keep what fills caches out of the ops."""
    undo.wrap(patches.DeviceMesh, "__init__", _on_host)
    undo.wrap(patches.ShardingPropagator, patches.SHAPE_PROPAGATION, _unseen)


def _marking(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        machine = machines.current()
        if machine is not None:
            patches.mark_mesh(self, _mark(machine, self))

    return make


def _on_host(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        machine = machines.current()
        if machine is None:
            original(self, *args, **kwargs)
            return
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                machine.memory.to_host(value)
        with HostMode(machine):
            original(self, *args, **kwargs)

    return make


def _unseen(original: Callable[..., Any]) -> Callable[..., Any]:
    """It runs for the first world that needs a shape, and is no work of the device."""

    @functools.wraps(original)
    def propagate(*args: Any, **kwargs: Any) -> Any:
        with patches.without_dispatch_modes():
            return original(*args, **kwargs)

    return propagate


def _mark(machine: Machine, mesh: Any) -> Any:
    """Return what tells a mesh apart: its rank, and the names of the first equal mesh's groups.

    Equal meshes of one rank stay equal; a mesh of another world is equal if its groups have the same
    names, so that what was cached for it leads to the right groups.
    """
    root = patches.root_of_mesh(mesh)
    if root is not None:
        return patches.mark_of_mesh(root)
    names = patches.group_names_of_mesh(mesh)
    return machine.rank.index, machine.meshes.setdefault(patches.key_of_mesh(mesh), names)
