"""What a run's ops say of memory: whether a unit's gradients lay beside its full weights; pure."""

from collections.abc import Iterable

from fsdp_sim.op import Kind, Op
from fsdp_sim.program.spec import ProgramSpec
from fsdp_sim.program.tree import units, walk

WEIGHTS, GRADIENTS = "fsdp_core::unshard ", "fsdp_core::reduce_gradients "
"""Labels in which a unit takes memory, before its name."""


def frees_weights_first(program: ProgramSpec) -> bool:
    """Return whether every unit frees its full weights before it takes memory for its gradients.

    One that is driven by hand, waits for delayed gradients or has frozen weights may still need them.
    """
    layers = [module.layer for _, module in walk(program.model) if module.layer is not None]
    return (
        all(unit.spec.hooks for unit in units(program))
        and all(layer.frozen == "none" and not layer.delayed for layer in layers)
        and not any(step.freeze for step in program.steps)
    )


def taken_beside_weights(ops: Iterable[Op]) -> list[str]:
    """Return where memory for a unit's gradients was taken while its full weights had theirs, once each.

    Args:
        ops: of a whole run, in order of issue.
    """
    held: dict[tuple[int, int], str] = {}  # (rank, block) -> unit
    places: set[str] = set()
    for op in ops:
        label = op.annotation or ""
        if op.kind is Kind.FREE:
            held.pop((op.rank, op.other), None)
        elif op.kind is Kind.ALLOC and label.startswith(WEIGHTS):
            held[op.rank, op.other] = label.removeprefix(WEIGHTS)
        elif op.kind is Kind.ALLOC and label.startswith(GRADIENTS):
            unit = label.removeprefix(GRADIENTS)
            if any(rank == op.rank and other == unit for (rank, _), other in held.items()):
                places.add(f"rank {op.rank}, unit {unit!r}")
    return sorted(places)
