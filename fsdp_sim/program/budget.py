"""What a run's ops say of prefetches: whether a unit gathered more early than its budget allows; pure."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fsdp_sim.op import Kind, Op
from fsdp_sim.program.spec import ProgramSpec
from fsdp_sim.program.tree import Unit, parameter_shapes, roots, units, walk

_PREFIX = "fsdp_core::"
_ENTRIES = ("forward", "backward", "recompute")
"""What a unit does from when it is entered; what it recomputes gathers nothing early."""


@dataclass
class _Entry:
    """A unit that was entered, and has not computed since.

    Attributes:
        gathered: the other units that it has gathered.
    """

    unit: str
    phase: str
    gathered: list[str] = field(default_factory=list)


def shows_budgets(program: ProgramSpec) -> bool:
    """Return whether the ops of a program say which unit asked for each early gather.

    A unit that is driven by hand enters nothing, one of several modules enters its backward once for all of
    them, and names tell units apart below one root.
    """
    has_ranges = all(unit.spec.hooks and len(unit.paths) == 1 for unit in units(program))
    return has_ranges and len(roots(program)) == 1


def gathered_beyond_budgets(program: ProgramSpec, ops: Iterable[Op]) -> list[str]:
    """Return where a unit gathered more elements early than its budget, the last unit not counted, once each.

    Args:
        program: one that ``shows_budgets``.
        ops: of a whole run, in order of issue.
    """
    by_name = dict(_named(program))
    numel = {name: _numel(program, unit) for name, unit in by_name.items()}
    entries: dict[int, _Entry] = {}
    places: dict[str, None] = {}
    for op in ops:
        verb, _, name = op.name.removeprefix(_PREFIX).partition(" ")
        entry = entries.get(op.rank)
        if op.kind is Kind.RANGE_PUSH and verb in _ENTRIES:
            entries[op.rank] = _Entry(name, verb)
        elif entry is None:
            continue
        elif op.kind is Kind.RANGE_PUSH and verb == "unshard" and name != entry.unit:
            entry.gathered.append(name)
            budget = _budget(by_name[entry.unit], entry.phase)
            before = [numel[each] for each in entry.gathered[:-1]]
            if bool(before) if budget is None else sum(before) >= budget:
                places[f"rank {op.rank}, {entry.phase} of {entry.unit!r}"] = None
        elif _computes(op) or (op.kind is Kind.RANGE_POP and verb in _ENTRIES):
            del entries[op.rank]
    return list(places)


def _budget(unit: Unit, phase: str) -> int | None:
    """Return how many elements a unit may gather early; None is one unit."""
    said = {"forward": unit.spec.forward_prefetch, "backward": unit.spec.backward_prefetch}
    return said.get(phase, 0)


def _computes(op: Op) -> bool:
    return op.kind is Kind.ATEN and not (op.annotation or "").startswith(f"{_PREFIX}unshard")


def _named(program: ProgramSpec) -> Iterator[tuple[str, Unit]]:
    """Yield each unit with its name in ranges: its path below the one root."""
    (root,) = roots(program)
    for unit in units(program):
        path = unit.paths[0]
        yield path.removeprefix(root).removeprefix(".") or "<root>", unit


def _numel(program: ProgramSpec, unit: Unit) -> int:
    """Return the number of elements of a unit's whole parameters, tied ones once."""
    nodes, tied = dict(walk(program.model)), {tie.module for tie in program.ties}
    layers = [nodes[path].layer for path in unit.members if path not in tied]
    shapes = [parameter_shapes(layer, program.width).values() for layer in layers if layer]
    return sum(math.prod(shape) for each in shapes for shape in each)
