"""What runs of a program return: one rank's rows, and the full tensors put together from them."""

from dataclasses import dataclass

from torch import Tensor

Losses = tuple[Tensor, ...]
Tensors = dict[str, Tensor | None]


@dataclass(frozen=True)
class StepRun:
    """What one rank holds after a step.

    Attributes:
        losses: of each pass, of each of its forwards; a pass that raised has none.
        gradients: this rank's rows by parameter name, before ``zero_grad``; None where there is none.
        parameters: this rank's rows by parameter name, after the optimizer.
        exported: the whole state dict, where the step asks for it and this rank gets it.
        unsharded: names under which the model shows another parameter than the sharded one, where the
            step must leave all units at rest.
        stats: the context's counters so far.
    """

    losses: tuple[Losses, ...]
    gradients: Tensors
    parameters: Tensors
    exported: Tensors
    unsharded: tuple[str, ...]
    stats: dict[str, int]


@dataclass(frozen=True)
class RankRun:
    """A whole run on one rank.

    Attributes:
        alive: what was left of models that the program had dropped, before any collection of garbage.
    """

    rank: int
    steps: tuple[StepRun, ...]
    alive: tuple[str, ...] = ()


@dataclass(frozen=True)
class FullStep:
    """A step of a program as one process would see it.

    Attributes:
        losses: per rank, per pass, per forward.
        gradients: full gradients by parameter name; None where there is none.
        parameters: full parameters by name, after the optimizer.
        exported: per rank, the whole state dict that it got.
        unsharded: names that some rank shows unsharded where it must be at rest.
    """

    losses: tuple[tuple[tuple[float, ...], ...], ...]
    gradients: Tensors
    parameters: Tensors
    exported: tuple[Tensors, ...]
    unsharded: tuple[str, ...] = ()


@dataclass(frozen=True)
class FullRun:
    """A whole run of a program, unsharded or put together from all ranks."""

    steps: tuple[FullStep, ...]


def floats(losses: tuple[Losses, ...]) -> tuple[tuple[float, ...], ...]:
    """Return losses as numbers; the host waits for the device here."""
    return tuple(tuple(float(loss) for loss in one) for one in losses)
