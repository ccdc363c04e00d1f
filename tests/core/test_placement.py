"""Kinds of placement, checks of lists of them, and the steps between two lists."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_core.errors import ConfigError, ConfigTypeError, UnsupportedError
from fsdp_core.placement import (
    BlockAtomic,
    Placements,
    RowAtomic,
    TensorAtomic,
    Transition,
    check_placements,
    plan_redistribution,
    specialize,
)

R, S, AVG, SUM = Replicate(), RowAtomic(), Partial("avg"), Partial("sum")


def test_kinds_of_shard_differ_from_each_other_and_from_a_plain_one() -> None:
    """Each promises other boundaries, so a buffer of one is no buffer of another."""
    kinds = [Shard(0), RowAtomic(), BlockAtomic(2), BlockAtomic(4), TensorAtomic()]

    for left in kinds:
        assert [left == right for right in kinds] == [left is right for right in kinds]
    assert RowAtomic() == RowAtomic()
    assert hash(BlockAtomic(2)) == hash(BlockAtomic(2))
    assert BlockAtomic(2) == BlockAtomic(2)


def test_kinds_of_shard_print_as_the_call_that_makes_them() -> None:
    """An error message shows which kind it is."""
    assert repr((RowAtomic(), BlockAtomic(2), TensorAtomic())) == (
        "(RowAtomic(), BlockAtomic(2), TensorAtomic())"
    )


@pytest.mark.parametrize("block_size", [0, -1, True, 1.5])
def test_a_block_size_that_is_no_positive_int_is_refused(block_size: int) -> None:
    """A block has whole rows."""
    with pytest.raises(ConfigError) as caught:
        BlockAtomic(block_size)

    assert str(caught.value) == (
        f"BlockAtomic needs a positive number of rows per block, got {block_size!r}; pass 1 or more"
    )


def test_only_a_plain_shard_is_specialised() -> None:
    """Explicit kinds pass through."""
    assert specialize([R, Shard(0)]) == (R, RowAtomic())
    assert specialize([BlockAtomic(2)]) == (BlockAtomic(2),)


@pytest.mark.parametrize(
    ("placements", "error", "message"),
    [
        (
            ["S(0)"],
            ConfigTypeError,
            "placements must be Replicate, Partial or Shard, got 'S(0)'; pass one of these",
        ),
        (
            [Shard(1)],
            UnsupportedError,
            f"placements must shard dim 0, got {Shard(1)!r}; use Shard(0)",
        ),
        (
            [Partial("max")],
            UnsupportedError,
            f"placements must reduce by sum or avg, got {Partial('max')!r}; use Partial('avg')",
        ),
        (
            [S, R],
            ConfigError,
            (
                "placements must shard the innermost axes only, so that each rank's piece is one "
                f"range, got {(S, R)}; put Replicate and Partial before it"
            ),
        ),
        (
            [R, TensorAtomic()],
            UnsupportedError,
            f"placements may hold TensorAtomic on a 1-D mesh only, got {(R, TensorAtomic())}; use RowAtomic",
        ),
    ],
)
def test_placements_that_make_no_buffer_are_refused(
    placements: list[Any], error: type[Exception], message: str
) -> None:
    """The message shows what came."""
    with pytest.raises(error) as caught:
        check_placements(placements)

    assert str(caught.value) == message


def test_the_three_lists_must_fit_the_axes() -> None:
    """A list that is too short is named."""
    with pytest.raises(ConfigError) as caught:
        Placements(dp_axes=(0, 1), parameter=[R, S], gradient=[S], optimizer=[R, S])

    assert str(caught.value) == (
        "Placements.gradient must have one placement for each of the 2 axes in dp_axes, got 1; pass as many"
    )


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (
            (AVG, S, S),
            (
                f"Placements.parameter must be Replicate or Shard, got {AVG!r}; use one of these, and "
                f"Partial for gradients alone"
            ),
        ),
        (
            (R, AVG, AVG),
            (
                f"Placements.optimizer must be Replicate or Shard, got {AVG!r}; use one of these, and "
                f"Partial for gradients alone"
            ),
        ),
        (
            (R, Partial(), S),
            (
                f"Placements.gradient must be a mean where it is partial, got {SUM!r}; use "
                f'Partial("avg")'
            ),
        ),
        (
            (Shard(0), AVG, R),
            (
                f"Placements.optimizer must shard an axis as Placements.parameter does, got {R!r} and "
                f"RowAtomic(); use RowAtomic() for both"
            ),
        ),
        (
            (R, TensorAtomic(), Shard(0)),
            (
                "Placements.optimizer must shard an axis as Placements.gradient does, got RowAtomic() "
                "and TensorAtomic(); use TensorAtomic() for both"
            ),
        ),
    ],
)
def test_roles_that_do_not_fit_each_other_are_refused(
    roles: tuple[Placement, ...], message: str
) -> None:
    """On any axis, here the outermost of two; the message says which two roles."""
    inner = [] if TensorAtomic() in roles else [S]
    with pytest.raises(ConfigError) as caught:
        Placements(range(1 + len(inner)), *([role, *inner] for role in roles))

    assert str(caught.value) == message


def test_placements_are_frozen_as_tuples() -> None:
    """Lists that the caller changes later change nothing."""
    parameter: list[Placement] = [R]
    placements = Placements([0], parameter, [AVG], [S])
    parameter[0] = S

    assert placements == Placements((0,), (R,), (AVG,), (S,))


@pytest.mark.parametrize("axes", [(0, 1), (-2, -1), ("outer", "inner"), (0, "inner")])
def test_axes_may_be_given_by_index_or_name(axes: tuple[Any, ...]) -> None:
    """Negative indices count from the end."""
    Placements(axes, [R, S], [R, S], [R, S]).check_mesh(2, ("outer", "inner"))


@pytest.mark.parametrize(
    ("axes", "error", "message"),
    [
        (
            (0, 2),
            ConfigError,
            "dp_axes must name axes of the mesh (2 axes, names ('outer', 'inner')), got 2; name these",
        ),
        (
            (0, True),
            ConfigError,
            "dp_axes must name axes of the mesh (2 axes, names ('outer', 'inner')), got True; name these",
        ),
        (
            ("outer", "model"),
            ConfigError,
            "dp_axes must name axes of the mesh (2 axes, names ('outer', 'inner')), got 'model'; name these",
        ),
        (
            (1, 1),
            ConfigError,
            "dp_axes must name each mesh axis once and in mesh order, got (1, 1); order them as the mesh does",
        ),
        (
            (1, 0),
            ConfigError,
            "dp_axes must name each mesh axis once and in mesh order, got (1, 0); order them as the mesh does",
        ),
        (
            (1,),
            UnsupportedError,
            (
                "dp_axes must name all 2 axes of the mesh, got (1,); "
                "pass the sub-mesh of the data-parallel axes"
            ),
        ),
    ],
)
def test_axes_that_are_not_the_mesh_are_refused(
    axes: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    """Unknown, repeated, unordered and missing axes each have their message."""
    placements = Placements(axes, [S] * len(axes), [S] * len(axes), [S] * len(axes))

    with pytest.raises(error) as caught:
        placements.check_mesh(2, ("outer", "inner"))

    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("source", "target", "transitions"),
    [
        ([S], [S], []),
        ([S], [R], [("ALL_GATHER", 0)]),
        ([AVG], [S], [("REDUCE_SCATTER", 0)]),
        ([SUM], [R], [("ALL_REDUCE", 0)]),
        ([R], [S], [("SLICE", 0)]),
        ([R], [AVG], [("RELABEL", 0)]),
        ([S, S], [R, R], [("ALL_GATHER", 0), ("ALL_GATHER", 1)]),
        ([AVG, AVG], [S, S], [("REDUCE_SCATTER", 1), ("REDUCE_SCATTER", 0)]),
        ([AVG, AVG], [R, S], [("REDUCE_SCATTER", 1), ("ALL_REDUCE", 0)]),
        ([AVG, S], [R, R], [("ALL_REDUCE", 0), ("ALL_GATHER", 1)]),
        ([AVG, R], [S, S], [("SLICE", 1), ("REDUCE_SCATTER", 0)]),
    ],
)
def test_reductions_go_inside_out_and_gathers_outside_in(
    source: Any, target: Any, transitions: list[tuple[str, int]]
) -> None:
    """Each step is one axis, in the order that keeps every piece one range."""
    steps = plan_redistribution(source, target)

    assert [(step.transition.name, step.axis) for step in steps] == transitions


@st.composite
def placement_lists(draw: st.DrawFn, ndim: int) -> list[Placement]:
    """Placements of which the innermost are sharded."""
    outer = draw(st.lists(st.sampled_from([R, AVG]), max_size=ndim))
    return [*outer, *[S] * (ndim - len(outer))]


@given(st.data(), st.integers(1, 4))
def test_sharded_axes_stay_innermost_after_every_step(data: st.DataObject, ndim: int) -> None:
    """Whatever the two lists, and the last step ends at the target."""
    source, target = data.draw(placement_lists(ndim)), data.draw(placement_lists(ndim))
    try:
        steps = plan_redistribution(source, target)
    except UnsupportedError:
        assert any(before == S and after == AVG for before, after in zip(source, target))
        return

    for step in steps:
        check_placements(step.placements)
    assert list(steps[-1].placements if steps else source) == target


@pytest.mark.parametrize(
    ("source", "target"),
    [(S, AVG), (S, SUM), (R, SUM), (SUM, AVG), (AVG, SUM), (S, BlockAtomic(2))],
)
def test_a_change_without_meaning_is_refused(source: Any, target: Any) -> None:
    """No collective makes it."""
    with pytest.raises(
        UnsupportedError, match=r"^a buffer must go to placements .+, got .+ to .+; "
    ):
        plan_redistribution([source], [target])


def test_an_average_is_marked_on_its_reduction() -> None:
    """A sum is not."""
    averaged, summed = plan_redistribution([AVG, SUM], [R, S])[::-1]

    assert (averaged.transition, averaged.average) == (Transition.ALL_REDUCE, True)
    assert (summed.transition, summed.average) == (Transition.REDUCE_SCATTER, False)
