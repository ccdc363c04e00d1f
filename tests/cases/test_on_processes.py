"""What real processes say that simulated ranks do not: on both, the same bodies."""

import pytest
import torch

from fsdp_core import PrefetchOrder, StateError
from tests.cases.programs import check_values
from tests.cases.test_b03_recompute_prefetch import checkpointed
from tests.cases.test_b05_order_differs import WITHOUT_MATCHING, train
from tests.cases.test_b27_global_sizes import Weights, everywhere
from tests.cases.test_b39_order_of_a_set import by_value, expected_states, states
from tests.cases.test_b56_outputs import in_place, written_view
from tests.core.worlds import on_ranks

pytestmark = pytest.mark.everywhere


def test_orders_that_differ_are_refused() -> None:
    """B05: under RECORDED the runtime itself tells every rank, where nothing else would."""

    def body(rank: int) -> None:
        with pytest.raises(StateError, match="rank 0: A forward, rank 1: B forward"):
            train(rank, [("A", "B"), ("B", "A")], equal=True, prefetch_order=PrefetchOrder.RECORDED)

    on_ranks(body, 2, checkers=WITHOUT_MATCHING)


def test_uneven_rows_come_back_whole() -> None:
    """B27: gloo sums the bytes of rows, and keeps every bit of them."""
    weights = [weight.detach() for weight in Weights(10, 3, 1).weights]

    for seen in on_ranks(lambda rank: everywhere(rank, (10, 3, 1), (2,)), 2):
        for index, weight in enumerate(weights):
            assert torch.equal(seen["before"][index], weight)
            assert torch.equal(seen["gradients"][index], 2 * weight)


def test_states_have_one_order() -> None:
    """B39: a gather of another tensor by each rank would add up their bytes."""
    for seen in on_ranks(lambda rank: states(rank, by_value), 2):
        assert all(map(torch.equal, seen, expected_states()))


def test_recomputation_has_parity() -> None:
    """B03: recomputed forwards run inside the backward, in the threads of a real autograd engine."""
    check_values(checkpointed(2, {"L1": True, "L2": False}))


def test_writes_in_place_have_parity() -> None:
    """B56: of inputs by a unit, and of its outputs by others."""
    check_values(in_place("0", "1", "2", ""))
    check_values(written_view())
