"""Which ranks hold the same weights of a unit: all, or those of one copy on some axes of the mesh; pure.

A unit on some axes only has a copy for each coordinate on the axes that it leaves out: what experts are to
a runtime. Copies start from weights of their own and are trained by the batches of their ranks alone.
"""

from itertools import product

from fsdp_sim.program.spec import UnitSpec

Copy = tuple[int, ...]
"""Coordinates on the axes that a unit leaves out; () where it leaves none out."""


def unit_axes(unit: UnitSpec, mesh: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes of the mesh that a unit is sharded over."""
    return tuple(range(len(mesh))) if unit.axes is None else unit.axes


def unit_mesh(unit: UnitSpec, mesh: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes of the axes that a unit is sharded over."""
    return tuple(mesh[axis] for axis in unit_axes(unit, mesh))


def copies(unit: UnitSpec, mesh: tuple[int, ...]) -> dict[Copy, list[int]]:
    """Return the ranks of each copy of a unit, in the order of the unit's own mesh."""
    axes = unit_axes(unit, mesh)
    ranks: dict[Copy, list[int]] = {}
    for rank, place in enumerate(product(*(range(size) for size in mesh))):
        left_out = tuple(at for axis, at in enumerate(place) if axis not in axes)
        ranks.setdefault(left_out, []).append(rank)
    return ranks


def copy_of(unit: UnitSpec, mesh: tuple[int, ...], rank: int) -> Copy:
    """Return the copy of a unit that a rank has a part in."""
    return next(copy for copy, ranks in copies(unit, mesh).items() if rank in ranks)


def name_in_copy(name: str, copy: Copy) -> str:
    """Return how the parameter of one copy is called in results: ``0.weight``, or ``0.weight@1``."""
    return f"{name}@{','.join(map(str, copy))}" if copy else name
