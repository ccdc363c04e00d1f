"""What real processes say that simulated ranks do not: on both, the same bodies."""

import pytest
import torch
from torch import nn

from fsdp_core import PrefetchOrder, StateError
from tests.cases import test_b10_tied_in_one_unit as tied
from tests.cases import test_b12_shared_norm as shared
from tests.cases.programs import Training, batch, check_values, fill, loss_of
from tests.cases.test_b03_recompute_prefetch import checkpointed
from tests.cases.test_b05_order_differs import WITHOUT_MATCHING, train
from tests.cases.test_b07_unused_unit import alternating
from tests.cases.test_b17_two_forwards_recomputed import several
from tests.cases.test_b18_reentrant_flush import Outside
from tests.cases.test_b20_gathers_with_nested_units import UNITS, Layers
from tests.cases.test_b21_frozen_units import frozen_row
from tests.cases.test_b24_two_dtypes import TWO
from tests.cases.test_b27_global_sizes import Weights, everywhere
from tests.cases.test_b39_order_of_a_set import by_value, expected_states, states
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


def step(model: nn.Module, rank: int, number: int) -> None:
    """One forward and backward, of an input that requires a gradient."""
    loss_of(model(batch(rank, number).requires_grad_()), rank).backward()


TRAININGS = {
    "B07 a unit that is not always used": alternating(),
    "B10 a parameter of two names": Training(tied.build, tied.step, ("",), steps=2),
    "B12 a unit that two losses share": Training(
        shared.build, shared.step, ("body", "extra", "norm", ""), steps=2
    ),
    "B17 two forwards, recomputed": several(2),
    "B17 two forwards, recomputed, reentrant": several(2, reentrant=True),
    "B18 a weight used inside and outside of a checkpoint": Training(
        lambda: fill(Outside(before=True, behind=True)), step, ("",), steps=2
    ),
    "B20 nested units, recomputed": Training(
        lambda: fill(Layers("non_reentrant")), step, [*UNITS, ""], steps=2
    ),
    "B20 nested units, recomputed, reentrant": Training(
        lambda: fill(Layers("reentrant")), step, [*UNITS, ""], steps=2
    ),
    "B21 frozen units": frozen_row([False, True, True, False]),
    "B24 two dtypes and integers in one unit": TWO,
}
"""Trainings whose cases look at traces, which real ranks have not."""


@pytest.mark.filterwarnings("ignore:step")
@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_of_a_case_has_parity(name: str) -> None:
    """Each step's gradients and weights are those of the unsharded run, bit for bit."""
    check_values(TRAININGS[name])
