"""Who owns a tensor, and what each rank sends for it."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_core.errors import ConfigError, UnsupportedError
from fsdp_core.layout import GlobalLayout, Range
from fsdp_core.layout_builder import build_row_atomic_layout
from fsdp_core.owner_planning import (
    Holder,
    Parcel,
    Part,
    assign_owners,
    is_matrix,
    list_holders,
    orthogonalization_cost,
    plan_owner,
)

R, S = Replicate(), Shard(0)


def example_layout() -> GlobalLayout:
    """(6,4) and (4,4) on two ranks of 20: 5 rows and 1 of the first, all of the second."""
    return GlobalLayout(((6, 4), (4, 4)), (0, 24), 40, (0, 20))


def holders_of(layout: GlobalLayout) -> tuple[Holder, ...]:
    """Ranks 0 to W-1 on one sharded axis."""
    return list_holders(layout, (layout.dp_size,), (S,), (0,), lambda place: place[0])


@pytest.mark.parametrize(("shape", "cost"), [((8, 8), 2624), ((4, 4), 336), ((2, 3, 4), 24 * 11)])
def test_cost_of_a_tensor(shape: tuple[int, ...], cost: int) -> None:
    """Elements times (the shorter side times five, plus one)."""
    assert orthogonalization_cost(shape) == cost


def test_matrices_are_what_owners_compute() -> None:
    """A vector is left to the element-wise optimizer."""
    assert [is_matrix(shape) for shape in [(3,), (3, 1), (2, 2, 2)]] == [False, True, True]


def test_holders_come_in_buffer_order() -> None:
    """On (outer, inner), both sharded: by their ranges, not by their ranks."""
    layout = build_row_atomic_layout([(8,)], 4)

    holders = list_holders(layout, (2, 2), (S, S), (0, 0), lambda at: 2 * at[0] + at[1])

    assert [each.rank for each in holders] == [0, 2, 1, 3]
    assert [each.held for each in holders] == [Range(start, 2) for start in (0, 2, 4, 6)]


@pytest.mark.parametrize("outer", [R, Partial("avg")])
def test_a_replica_is_a_set_of_holders_of_its_own(outer: Placement) -> None:
    """Peers of (1, 0) under [replicate, shard] are those of outer rank 1."""
    layout = build_row_atomic_layout([(8,)], 4)

    holders = list_holders(layout, (2, 2), (outer, S), (1, 0), lambda at: 2 * at[0] + at[1])

    assert [each.rank for each in holders] == [2, 3]


def test_single_holders_first_then_falling_cost_to_the_least_loaded() -> None:
    """Rank 1 already has the second tensor, so the first goes to rank 0."""
    assignment = assign_owners(example_layout(), holders_of(example_layout()), [0, 1])

    assert assignment.owners == {0: 0, 1: 1}
    assert assignment.load == {0: 24 * 21, 1: 336}


def test_load_of_earlier_buffers_counts() -> None:
    """Otherwise the first rank would get the shared tensor of every layer."""
    layout = example_layout()

    assignment = assign_owners(layout, holders_of(layout), [0], load={0: 1})

    assert assignment.owners == {0: 1}
    assert assignment.load == {0: 1, 1: 24 * 21}


def test_ties_go_to_the_first_in_buffer_order() -> None:
    """Not to the lowest rank."""
    layout = build_row_atomic_layout([(2, 4)], 2)
    holders = list_holders(layout, (2,), (S,), (0,), lambda place: 1 - place[0])

    assert assign_owners(layout, holders, [0]).owners == {0: 1}


def test_the_cost_may_be_the_callers() -> None:
    """Here every tensor costs the same, so the order of indices decides."""
    layout = build_row_atomic_layout([(4, 1), (4, 1)], 1)

    assignment = assign_owners(layout, holders_of(layout), [0, 1], cost=lambda _shape: 7)

    assert assignment.load == {0: 14}


def test_a_tensor_without_elements_has_no_owner() -> None:
    """The message names it."""
    layout = build_row_atomic_layout([(0, 4)], 2)

    with pytest.raises(UnsupportedError) as caught:
        assign_owners(layout, holders_of(layout), [0])

    assert str(caught.value) == (
        "a tensor with an owner must have elements, got tensor 0 of shape (0, 4); "
        "leave it to the element-wise optimizer"
    )


def test_an_owner_that_holds_nothing_is_refused() -> None:
    """Rank 0 has nothing of the second tensor."""
    layout = example_layout()

    with pytest.raises(ConfigError) as caught:
        plan_owner(layout, holders_of(layout), {1: 0}, 0)

    assert str(caught.value) == (
        "the owner of tensor 1 must be one of the ranks that hold part of it, [1], got 0; name one of them"
    )


def test_plans_of_a_worked_example() -> None:
    """Rank 0 sends 20 elements; rank 1 adds its own 4, and has the second tensor already."""
    layout = example_layout()
    sender, owner = (plan_owner(layout, holders_of(layout), {0: 1, 1: 1}, rank) for rank in (0, 1))

    assert sender.to_owners == (Parcel(1, (Part(0, 0, 20),)),)
    assert sender.from_holders == ()
    assert sender.owned == ()
    assert owner.to_owners == ()
    assert owner.from_holders == (Parcel(0, (Part(0, 0, 20),)),)
    assert owner.held == {0: Part(0, 20, 4), 1: Part(1, 0, 16)}
    assert owner.owned == (0, 1)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=6),
    st.integers(1, 5),
)
def test_what_one_rank_sends_another_expects(
    shapes: Sequence[tuple[int, ...]], world_size: int
) -> None:
    """Every message has one receiver that waits for it, and owners get every element once."""
    layout = build_row_atomic_layout(shapes, world_size)
    holders = holders_of(layout)
    owners = assign_owners(layout, holders, range(len(shapes))).owners
    plans = [plan_owner(layout, holders, owners, rank) for rank in range(world_size)]

    sent = Counter(
        (rank, p.peer, p.parts) for rank, plan in enumerate(plans) for p in plan.to_owners
    )
    expected = Counter(
        (p.peer, rank, p.parts) for rank, plan in enumerate(plans) for p in plan.from_holders
    )
    assert sent == expected
    for index, owner in owners.items():
        parts = [plans[owner].held[index]]
        parts += [q for p in plans[owner].from_holders for q in p.parts if q.index == index]
        assert all(part.numel > 0 for part in parts)
        covered = sorted(e for part in parts for e in range(part.start, part.start + part.numel))
        assert covered == list(range(layout.get_tensor_range(index).numel))
