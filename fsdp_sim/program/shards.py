"""Put the rows of all ranks together: full tensors from the placements alone, no collective."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp_sim.program.copies import copies, name_in_copy, unit_mesh
from fsdp_sim.program.placements import letters, shard_order
from fsdp_sim.program.results import FullRun, FullStep, RankRun, Tensors, floats
from fsdp_sim.program.spec import ProgramSpec, UnitSpec
from fsdp_sim.program.tree import at_step, unit_specs


class ReplicaError(AssertionError):
    """Ranks that should hold the same rows hold different ones."""


def assemble(program: ProgramSpec, ranks: Sequence[RankRun]) -> FullRun:
    """Return the full run from those of all ranks, in rank order.

    Raises:
        ReplicaError: replicas differ, or some ranks have a gradient and others have none.
    """
    assert [run.rank for run in ranks] == list(range(program.world_size)), "one run per rank"
    specs = [unit_specs(at_step(program, number)) for number in range(len(program.steps))]
    steps = zip(*(run.steps for run in ranks), strict=True)
    return FullRun(
        tuple(
            FullStep(
                tuple(floats(step.losses) for step in held),
                _join_all(
                    program, specs[n], [step.gradients for step in held], f"step {n} gradient"
                ),
                _join_all(
                    program, specs[n], [step.parameters for step in held], f"step {n} parameter"
                ),
                tuple(step.exported for step in held),
                tuple(dict.fromkeys(name for step in held for name in step.unsharded)),
            )
            for n, held in enumerate(steps)
        )
    )


def _join_all(
    program: ProgramSpec, specs: dict[str, UnitSpec], held: Sequence[Tensors], what: str
) -> Tensors:
    names = list(held[0])
    for rank, rows in enumerate(held):
        if list(rows) != names:
            raise ReplicaError(f"{what}: rank {rank} has {list(rows)}, rank 0 has {names}")
    joined: Tensors = {}
    for name in names:
        unit = specs[name.rpartition(".")[0]]
        mesh = unit_mesh(unit, program.mesh)
        order = shard_order(letters(unit.strategy, len(mesh))[2], mesh)
        for copy, ranks in copies(unit, program.mesh).items():
            full = name_in_copy(name, copy)
            of_copy = [held[rank][name] for rank in ranks]
            joined[full] = _join(of_copy, order, ranks, f"{what} {full!r}")
    return joined


def _join(
    rows: Sequence[Tensor | None], order: list[list[int]], ranks: list[int], what: str
) -> Tensor | None:
    """Return the tensor [N, ...] whose rows the ranks of one copy hold; every replica must agree.

    Args:
        rows: of each rank of the copy.
        order: numbers of these ranks, by replica, in the order of their shards.
        ranks: of the copy.
        what: for messages.
    """
    present = [tensor for tensor in rows if tensor is not None]
    if not present:
        return None
    if len(present) < len(rows):
        missing = [rank for rank, tensor in zip(ranks, rows, strict=True) if tensor is None]
        raise ReplicaError(f"{what} must be on all ranks or none; ranks {missing} have none")
    replicas = [torch.cat([present[number].cpu() for number in group]) for group in order]
    for number, replica in enumerate(replicas):
        if not torch.equal(replica, replicas[0]):
            held_by = [[ranks[at] for at in group] for group in order]
            raise ReplicaError(f"{what} differs between replicas 0 and {number}: ranks {held_by}")
    return replicas[0]
