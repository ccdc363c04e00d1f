"""Which collectives a run overlapped with compute, as a fold over its ops."""

from collections.abc import Iterable, Iterator

from fsdp_sim.checkers.prefetch import GATHERS
from fsdp_sim.clock import Clocks
from fsdp_sim.op import Kind, Op

REDUCTIONS = ("fsdp_core::reduce_gradients",)


def overlapping(ops: Iterable[Op], labels: tuple[str, ...]) -> Iterator[str]:
    """Yield the annotation of each collective with one of the labels that may run beside an operator.

    That is an operator on another stream of the same rank, issued after it, that no wait puts behind
    the collective. Of collectives on one stream a later one is looked at until it overlaps, an earlier
    one until it is known not to.

    Args:
        ops: of a whole run, in order of issue.
        labels: beginnings of annotations.
    """
    clocks: dict[int, Clocks] = {}
    issued: dict[int, dict[int, list[Op]]] = {}  # rank -> stream -> such collectives
    for op in ops:
        of_rank = clocks.setdefault(op.rank, Clocks())
        of_rank.apply(op)
        by_stream = issued.setdefault(op.rank, {})
        if op.kind is Kind.ATEN and op.stream >= 0:
            for stream, collectives in by_stream.items():
                kept = len(collectives)
                while kept and not of_rank.is_ordered(
                    stream, collectives[kept - 1].tick, op.stream
                ):
                    kept -= 1
                yield from (each.annotation or "" for each in collectives[kept:])
                by_stream[stream] = collectives[:kept][-1:]
        elif op.kind is Kind.COLLECTIVE and (op.annotation or "").startswith(labels):
            by_stream.setdefault(op.stream, []).append(op)


def reductions_overlap(ops: Iterable[Op]) -> bool:
    """Return whether a reduction of gradients overlapped compute."""
    return any(True for _ in overlapping(ops, REDUCTIONS))


def gather_levels(ops: Iterable[Op]) -> int:
    """Return on how many levels of units a gather of weights overlapped compute.

    The level of a unit is the number of units around it that are gathered somewhere in the run.
    """
    run = tuple(ops)
    annotations = (op.annotation or "" for op in run)
    units = {_unit(each) for each in annotations if each.startswith(GATHERS)}
    return len({_level(_unit(each), units) for each in overlapping(run, GATHERS)})


Name = tuple[str, tuple[str, ...]]
"""A root, and the steps from it to the first module of a unit."""


def _unit(annotation: str) -> Name:
    _, _, name = annotation.partition(" ")
    path, _, root = name.partition(" (")
    first = path.partition("+")[0]
    return root, () if first == "<root>" else tuple(first.split("."))


def _level(unit: Name, units: Iterable[Name]) -> int:
    root, path = unit
    return sum(
        other == root and len(around) < len(path) and around == path[: len(around)]
        for other, around in units
    )
