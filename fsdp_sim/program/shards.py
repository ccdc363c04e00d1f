"""Put the rows of all ranks together: full tensors from the placements alone, no collective."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp_sim.program.placements import Letters, letters, shard_order
from fsdp_sim.program.results import FullRun, FullStep, RankRun, Tensors, floats
from fsdp_sim.program.spec import ProgramSpec
from fsdp_sim.program.tree import units


class ReplicaError(AssertionError):
    """Ranks that should hold the same rows hold different ones."""


def assemble(program: ProgramSpec, ranks: Sequence[RankRun]) -> FullRun:
    """Return the full run from those of all ranks, in rank order.

    Raises:
        ReplicaError: replicas differ, or some ranks have a gradient and others have none.
    """
    assert [run.rank for run in ranks] == list(range(program.world_size)), "one run per rank"
    placed = _optimizer_letters(program)
    steps = zip(*(run.steps for run in ranks), strict=True)
    return FullRun(
        tuple(
            FullStep(
                tuple(floats(step.losses) for step in held),
                _join_all(program, placed, [step.gradients for step in held], f"step {n} gradient"),
                _join_all(
                    program, placed, [step.parameters for step in held], f"step {n} parameter"
                ),
                tuple(dict.fromkeys(name for step in held for name in step.unsharded)),
            )
            for n, held in enumerate(steps)
        )
    )


def _optimizer_letters(program: ProgramSpec) -> dict[str, Letters]:
    """Return where each module's own parameters lie at rest, by path of the module."""
    axis_count = len(program.mesh)
    return {
        path: letters(unit.spec.strategy, axis_count)[2]
        for unit in units(program)
        for path in unit.members
    }


def _join_all(
    program: ProgramSpec, placed: dict[str, Letters], held: Sequence[Tensors], what: str
) -> Tensors:
    names = list(held[0])
    for rank, rows in enumerate(held):
        if list(rows) != names:
            raise ReplicaError(f"{what}: rank {rank} has {list(rows)}, rank 0 has {names}")
    return {
        name: _join(
            [rows[name] for rows in held],
            shard_order(placed[name.rpartition(".")[0]], program.mesh),
            f"{what} {name!r}",
        )
        for name in names
    }


def _join(rows: Sequence[Tensor | None], order: list[list[int]], what: str) -> Tensor | None:
    """Return the tensor [N, ...] whose rows the ranks hold; every replica must agree."""
    present = [tensor for tensor in rows if tensor is not None]
    if not present:
        return None
    if len(present) < len(rows):
        missing = [rank for rank, tensor in enumerate(rows) if tensor is None]
        raise ReplicaError(f"{what} must be on all ranks or none; ranks {missing} have none")
    replicas = [torch.cat([present[rank].cpu() for rank in group]) for group in order]
    for number, replica in enumerate(replicas):
        if not torch.equal(replica, replicas[0]):
            raise ReplicaError(f"{what} differs between replicas 0 and {number}: ranks {order}")
    return replicas[0]
