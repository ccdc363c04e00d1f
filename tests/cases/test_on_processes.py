"""What real processes say that simulated ranks do not: all in one set of them, which starts slowly."""

import pytest
import torch

from fsdp_core import PrefetchOrder, StateError
from tests.cases.programs import Training, assert_equal, train_shards, train_unsharded
from tests.cases.test_b03_recompute_prefetch import checkpointed
from tests.cases.test_b05_order_differs import train
from tests.cases.test_b27_global_sizes import Weights, everywhere
from tests.cases.test_b39_order_of_a_set import by_value, expected_states, states
from tests.cases.test_b56_outputs import in_place, written_view
from tests.core.worlds import on_processes


def orders_that_differ_are_refused(rank: int) -> None:
    """B05: under RECORDED the runtime itself tells every rank, where nothing else would."""
    with pytest.raises(StateError, match="rank 0: A forward, rank 1: B forward"):
        train(rank, [("A", "B"), ("B", "A")], equal=True, prefetch_order=PrefetchOrder.RECORDED)


def uneven_rows_come_back_whole(rank: int) -> None:
    """B27: gloo sums the bytes of rows, and keeps every bit of them."""
    seen = everywhere(rank, (10, 3, 1), (2,))

    for index, weight in enumerate(Weights(10, 3, 1).weights):
        assert torch.equal(seen["before"][index], weight.detach())
        assert torch.equal(seen["gradients"][index], 2 * weight.detach())


def states_have_one_order(rank: int) -> None:
    """B39: a gather of another tensor by each rank would add up their bytes."""
    assert all(map(torch.equal, states(rank, by_value), expected_states()))


def has_parity(rank: int, training: Training) -> None:
    """With the threads of a real autograd engine."""
    trained = train_shards(rank, training)

    for got, expected in zip(trained, train_unsharded(training), strict=True):
        mine = {
            name: None if each is None else each.chunk(2)[rank]
            for name, each in expected.weights.items()
        }
        assert_equal(got.weights, mine)


def recomputation_has_parity(rank: int) -> None:
    """B03: recomputed forwards run inside the backward."""
    has_parity(rank, checkpointed(2, {"L1": True, "L2": False}))


def writes_in_place_have_parity(rank: int) -> None:
    """B56: of inputs by a unit, and of its outputs by others."""
    has_parity(rank, in_place("0", "1", "2", ""))
    has_parity(rank, written_view())


def test_on_gloo_processes() -> None:
    """The same programs, two processes."""
    bodies = [
        orders_that_differ_are_refused,
        uneven_rows_come_back_whole,
        states_have_one_order,
        recomputation_has_parity,
        writes_in_place_have_parity,
    ]

    on_processes(bodies, 2, "gloo")
