"""Agreement of ranks, exchanged once and on the host: recorded passes, owner maps and errors."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import TypeVar

import torch.distributed as dist

from fsdp_core.collectives import MeshAxes
from fsdp_core.errors import ConfigError, StateError

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


@contextmanager
def raised_by_all() -> Iterator[None]:
    """Have an error that a block raises on some rank raised on every rank.

    Why: the others would wait for that rank in their next collective. The block itself must contain
    none.

    Ordering:
        Collective on the default process group at the end of the block; the host waits.

    Raises:
        Exception: what the block raised on this rank, or else on the first that raised.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    errors: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, mine and _sendable(mine))
    for each in (mine, *errors):
        if each is not None:
            raise each


def _sendable(error: Exception) -> Exception:
    """Return an error that can be pickled, which is not said of those of other libraries."""
    if isinstance(error, ConfigError | StateError | OSError):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def agree_on_owners(owners: Sequence[tuple[str, object]], axes: MeshAxes) -> None:
    """Check the owners of a unit's parameters on every rank of its mesh, and that they agree.

    Args:
        owners: of this rank, each as the parameter's name and what the map says.
        axes: the unit's mesh.

    Raises:
        ConfigError: the same on every rank: the first rank's first mistake, or difference.
    """
    dp_size = axes.mesh.size()
    mistakes = [text for fqn, owner in owners if (text := _owner_mistake(fqn, owner, dp_size))]
    record = mistakes[0] if mistakes else hashlib.sha256(repr(list(owners)).encode()).hexdigest()
    records = exchange((dist.get_rank(), bool(mistakes), record), axes)
    for rank, is_mistake, text in records:
        if is_mistake:
            msg = (
                f"parameter_to_owner must name an owner for each parameter, got on rank {rank}: "
                f"{text}; give each an int in [0, {dp_size})"
            )
            raise ConfigError(msg)
    if len({text for _, _, text in records}) == 1:
        return
    by_rank = dict(exchange((dist.get_rank(), dict(owners)), axes))
    for fqn, _ in owners:
        said = {rank: theirs.get(fqn) for rank, theirs in by_rank.items()}
        if len(set(said.values())) > 1:
            msg = (
                f"parameter_to_owner must be the same on all ranks, got for parameter {fqn!r} "
                f"{', '.join(f'rank {rank}: {owner}' for rank, owner in said.items())}; "
                f"compute it from names and shapes alone"
            )
            raise ConfigError(msg, fqn=fqn)


def _owner_mistake(fqn: str, owner: object, dp_size: int) -> str | None:
    if owner is None:
        return f"none for {fqn!r}"
    if isinstance(owner, bool) or not isinstance(owner, int):
        return f"{owner!r} for {fqn!r}, which is no int"
    if not 0 <= owner < dp_size:
        return f"{owner} for {fqn!r}, which is not in [0, {dp_size})"
    return None


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
