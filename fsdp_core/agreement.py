"""Agreement of ranks, exchanged once and on the host: recorded passes and owner maps."""

import hashlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import TypeVar

import torch.distributed as dist

from fsdp_core.collectives import MeshAxes
from fsdp_core.errors import StateError

T = TypeVar("T")

Event = tuple[int, str]


def exchange(value: T, axes: MeshAxes) -> list[T]:
    """Return the values of all ranks of a mesh, the same list on each.

    Ordering:
        Collective on each axis of the mesh, innermost first; the host waits.
    """
    values = [value]
    for process_group in reversed(axes.process_groups):
        gathered: list[list[T]] = [[]] * dist.get_world_size(process_group)
        dist.all_gather_object(gathered, values, group=process_group)
        values = [each for part in gathered for each in part]
    return values


def agree_on_events(events: Sequence[Event], axes: MeshAxes) -> None:
    """Check that all ranks of a mesh ran the same events on it.

    Args:
        events: of this rank, each as the index of its root, and unit and phase in words.
        axes: the mesh.

    Raises:
        StateError: the same on every rank: the first position that differs, and what each rank
            ran there.
    """
    digest = hashlib.sha256(repr(list(events)).encode()).hexdigest()
    if len(set(exchange(digest, axes))) == 1:
        return
    by_rank = dict(exchange((dist.get_rank(), list(events)), axes))
    for position, row in enumerate(zip_longest(*by_rank.values(), fillvalue=(-1, "the end"))):
        if len(set(row)) > 1:
            ran = ", ".join(f"rank {rank}: {row[i][1]}" for i, rank in enumerate(by_rank))
            msg = (
                f"all ranks must run the same pass under RECORDED, got a difference at position "
                f"{position}: {ran}; make the order of calls the same on all ranks"
            )
            raise StateError(msg)
