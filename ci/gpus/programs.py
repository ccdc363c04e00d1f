"""Programs as data for any number of ranks: every strategy, prefetch order and owner map."""

from dataclasses import replace

from ci.gpu.programs import drawn
from fsdp_sim.mutation.core_programs import programs
from fsdp_sim.program import ProgramSpec

DRAWN = 40


def on_ranks(program: ProgramSpec, mesh: tuple[int, ...]) -> ProgramSpec:
    """Return a program on another mesh of as many axes; owners are dealt out again."""
    ranks = 1
    for size in mesh:
        ranks *= size
    owners = tuple(
        replace(owner, owner=number % ranks, ranks=None)
        for number, owner in enumerate(program.owners)
    )
    return replace(program, mesh=mesh, owners=owners)


def meshes_of(axes: int, world_size: int) -> list[tuple[int, ...]]:
    """Return the meshes of one or two axes that a world has."""
    if axes == 1:
        return [(world_size,)]
    outer = [size for size in range(2, world_size) if world_size % size == 0]
    return [(size, world_size // size) for size in outer] or [(1, world_size)]


def programs_of(world_size: int) -> dict[str, ProgramSpec]:
    """Return the kept programs on every mesh of the world, and drawn ones of as many ranks."""
    found = {}
    for name, program in programs().items():
        if len(program.mesh) <= 2:
            for mesh in meshes_of(len(program.mesh), world_size):
                shape = "x".join(map(str, mesh))
                found[f"{name} on {shape}"] = on_ranks(program, mesh)
    return found | drawn(DRAWN, world_size)
