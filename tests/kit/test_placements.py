"""Named strategies: their placements, and which rank holds which shard."""

import pytest

from fsdp_sim.program.placements import letters, shard_order, strategies
from fsdp_sim.program.spec import Strategy


@pytest.mark.parametrize(
    ("strategy", "axes", "expected"),
    [
        ("no_shard", 1, (("R",), ("P",), ("R",))),
        ("zero1", 1, (("R",), ("P",), ("S",))),
        ("zero2", 1, (("R",), ("S",), ("S",))),
        ("zero3", 1, (("S",), ("S",), ("S",))),
        ("hsdp", 2, (("R", "S"), ("P", "S"), ("R", "S"))),
        ("hfsdp", 2, (("R", "S"), ("P", "S"), ("S", "S"))),
        ("zero1_zero2", 2, (("R", "R"), ("P", "S"), ("S", "S"))),
        ("zero3", 2, (("S", "S"), ("S", "S"), ("S", "S"))),
    ],
)
def test_a_strategy_has_the_placements_of_its_name(
    strategy: Strategy, axes: int, expected: tuple[tuple[str, ...], ...]
) -> None:
    """Parameter, gradient and optimizer state, outermost axis first."""
    assert letters(strategy, axes) == expected


def test_the_innermost_axis_is_the_most_significant_digit_of_a_shard() -> None:
    """On a 2 x 2 mesh with both axes sharded, rank 2 (outer 1, inner 0) holds the second quarter."""
    assert shard_order(("S", "S"), (2, 2)) == [[0, 2, 1, 3]]


def test_replicas_are_listed_one_by_one() -> None:
    """With a replicated outer axis each outer rank holds a full set of shards."""
    assert shard_order(("R", "S"), (2, 2)) == [[0, 1], [2, 3]]
    assert shard_order(("R",), (3,)) == [[0], [1], [2]]


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_every_strategy_has_one_letter_per_axis(axes: int) -> None:
    """Whatever a mesh allows can be placed on it."""
    for strategy in strategies(axes):
        assert all(len(role) == axes for role in letters(strategy, axes))
