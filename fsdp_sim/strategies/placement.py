"""placements: named strategies that a mesh allows."""

from collections.abc import Sequence

from hypothesis import strategies as st

from fsdp_sim.program.placements import strategies
from fsdp_sim.program.spec import Strategy
from fsdp_sim.strategies.arguments import check_kinds, check_range

SIMPLEST_FIRST: tuple[Strategy, ...] = (
    "zero3", "zero2", "zero1", "no_shard", "hsdp", "hfsdp", "zero1_zero2",
)  # fmt: skip


def placements(
    mesh: tuple[int, ...], *, kinds: Sequence[Strategy] | None = None
) -> st.SearchStrategy[Strategy]:
    """Draw the name of a strategy (ZeRO-3, HSDP, ...) that ``mesh`` allows; shrinks to ZeRO-3.

    Args:
        mesh: sizes of its axes.
        kinds: the strategies to choose from; by default all but ``tensor_atomic``, which needs an owner
            map.

    Example:
        >>> placements((2, 2), kinds=("hsdp", "hfsdp"))

    Raises:
        ConfigError: an unknown strategy, or one that the mesh does not allow.
    """
    check_range("number of axes of mesh", len(mesh), 1, 3)
    known = strategies(len(mesh))
    chosen = kinds if kinds is not None else [kind for kind in known if kind != "tensor_atomic"]
    check_kinds("kinds", chosen, known)
    return st.sampled_from(sorted(chosen, key=lambda kind: (kind != "zero3", known.index(kind))))
