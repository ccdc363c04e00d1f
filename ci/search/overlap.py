"""Whether a run overlapped collectives with compute, as a fold over its ops."""

from collections.abc import Iterable

from fsdp_sim.checkers.prefetch import GATHERS
from fsdp_sim.clock import Clocks
from fsdp_sim.op import Kind, Op

REDUCTIONS = ("fsdp_core::reduce_gradients",)


def overlaps(ops: Iterable[Op], labels: tuple[str, ...]) -> bool:
    """Return whether some collective with one of the labels may run beside an operator issued after it.

    That is an operator on another stream of the same rank that no wait puts behind the collective.

    Args:
        ops: of a whole run, in order of issue.
        labels: beginnings of annotations.
    """
    clocks: dict[int, Clocks] = {}
    issued: dict[int, dict[int, int]] = {}  # rank -> stream -> tick of its last such collective
    for op in ops:
        of_rank = clocks.setdefault(op.rank, Clocks())
        of_rank.apply(op)
        last = issued.setdefault(op.rank, {})
        if op.kind is Kind.ATEN and op.stream >= 0:
            if any(not of_rank.is_ordered(s, tick, op.stream) for s, tick in last.items()):
                return True
        elif op.kind is Kind.COLLECTIVE and (op.annotation or "").startswith(labels):
            last[op.stream] = op.tick
    return False


def gathers_overlap(ops: Iterable[Op]) -> bool:
    """Return whether a gather of weights overlapped compute."""
    return overlaps(ops, GATHERS)


def reductions_overlap(ops: Iterable[Op]) -> bool:
    """Return whether a reduction of gradients overlapped compute."""
    return overlaps(ops, REDUCTIONS)
