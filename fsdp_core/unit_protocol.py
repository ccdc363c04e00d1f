"""Unit, Call: what a context knows of units, and of their calls; units themselves lie above it."""

import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from fsdp_core.collectives import MeshAxes
from fsdp_core.identity import Identity


class UnitGradients(Protocol):
    """What a context needs of a unit's gradients."""

    @property
    def have_hooks(self) -> bool:
        """Whether users hooked the sharded gradients."""

    def run_hooks(self) -> None:
        """Call what users registered on the sharded parameters."""

    def release(self) -> None:
        """Give the memory of gradients back that were dropped."""

    def parameters_without_grad(self) -> list[str]:
        """Return the names of trainable parameters without a sharded gradient."""


class Unit(Protocol):
    """What a context needs of a unit.

    Attributes:
        ref: the unit, weakly.
        identity: how it is called.
        modules: its modules, weakly.
        enclosing: the units whose forward called this one, at its last use in backward.
        full_numel: elements of its whole parameters.
        axes: the mesh that its parameters lie on.
        notes_events: its hooks note when it enters a phase.
    """

    ref: "weakref.ref[Any]"
    identity: Identity
    modules: tuple["weakref.ref[nn.Module]", ...]
    enclosing: tuple["weakref.ref[Any]", ...]
    full_numel: int
    axes: MeshAxes

    @property
    def notes_events(self) -> bool:
        """Whether its hooks note when it enters a phase."""

    @property
    def gradients(self) -> UnitGradients:
        """Its gradients."""

    def prefetch(self) -> None:
        """Gather the weights early, if they are not there."""

    def leave_section(self) -> None:
        """Reshard: backward has moved on; complete the unit if no use of it is still to come."""

    def take_gradients(self) -> None:
        """Open, if full gradients are there that no backward pass of autograd brought."""

    def complete(self) -> None:
        """Complete whatever is open: the backward pass is over."""

    def finish_window(self) -> None:
        """Bring gradients into optimizer placements: the last microbatch is over."""

    def retry(self) -> None:
        """Complete if only an open unit inside this one was waited for."""

    def end_forward(self, *, sweep: bool) -> None:
        """Reshard what an outermost forward has left over."""

    def come_to_rest(self) -> None:
        """Reshard if nobody uses the weights."""

    def reset(self) -> None:
        """Drop every trace of a broken pass."""


@dataclass(slots=True)
class Call:
    """One forward in progress.

    Attributes:
        unit: the unit.
        module: which of its modules runs.
        recomputing: it runs inside a backward pass.
        scope: the open annotation.
        exception: what was being handled when it began.
        first_node: number that the first autograd node of the call gets.
        number: how many calls of units began before it, in the whole context.
    """

    unit: Unit
    module: nn.Module
    recomputing: bool
    scope: AbstractContextManager[Any]
    exception: BaseException | None
    first_node: int
    number: int
