"""What each named strategy keeps where: one letter per mesh axis, outermost first; pure.

``R`` replicated, ``P`` partial, ``S`` sharded by rows, ``T`` whole tensors on their owners.
"""

from itertools import product

from fsdp_sim.program.spec import Strategy

Letters = tuple[str, ...]

ONE_AXIS: tuple[Strategy, ...] = ("no_shard", "zero1", "zero2", "zero3", "tensor_atomic")
TWO_AXES: tuple[Strategy, ...] = (
    "no_shard", "zero1", "zero2", "zero3", "hsdp", "hfsdp", "zero1_zero2",
)  # fmt: skip


def strategies(axis_count: int) -> tuple[Strategy, ...]:
    """Return the strategies that a mesh of so many axes allows."""
    return ONE_AXIS if axis_count == 1 else TWO_AXES


def letters(strategy: Strategy, axis_count: int) -> tuple[Letters, Letters, Letters]:
    """Return the placements of parameter, gradient and optimizer state."""
    return _uniform(strategy, axis_count) or _hybrid(strategy, axis_count)


def shard_order(placed: Letters, mesh: tuple[int, ...]) -> list[list[int]]:
    """Return ranks grouped by replica, each group in the order of the shards it holds.

    Shards are numbered with the innermost sharded axis as the most significant digit, so that an inner
    shard is the concatenation of the outer shards inside it.
    """
    sharded = [axis for axis, letter in enumerate(placed) if letter in "ST"]
    replicas: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
    for rank, place in enumerate(product(*(range(size) for size in mesh))):
        replica = tuple(place[axis] for axis in range(len(mesh)) if axis not in sharded)
        shard = tuple(place[axis] for axis in reversed(sharded))
        replicas.setdefault(replica, []).append((shard, rank))
    return [[rank for _, rank in sorted(group)] for group in replicas.values()]


def _uniform(strategy: Strategy, count: int) -> tuple[Letters, Letters, Letters] | None:
    """Return the placements of a strategy that treats all axes alike, else None."""
    rows = {
        "no_shard": ("R", "P", "R"),
        "zero1": ("R", "P", "S"),
        "zero2": ("R", "S", "S"),
        "zero3": ("S", "S", "S"),
        "tensor_atomic": ("T", "T", "T"),
    }
    if strategy not in rows:
        return None
    parameter, gradient, optimizer = rows[strategy]
    return (parameter,) * count, (gradient,) * count, (optimizer,) * count


def _hybrid(strategy: Strategy, count: int) -> tuple[Letters, Letters, Letters]:
    """Return the placements of a strategy whose outermost axis differs from the others."""
    outer, inner = {
        "hsdp": ("RPR", "SSS"),
        "hfsdp": ("RPS", "SSS"),
        "zero1_zero2": ("RPS", "RSS"),
    }[strategy]
    rest = count - 1
    parameter, gradient, optimizer = (
        (first, *((other,) * rest)) for first, other in zip(outer, inner, strict=True)
    )
    return parameter, gradient, optimizer
