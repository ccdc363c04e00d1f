"""What real processes say that simulated ranks do not: all in one set of them, which starts slowly."""

import pytest
import torch

from fsdp_core import PrefetchOrder, StateError
from tests.cases.programs import assert_equal, train_shards, train_unsharded
from tests.cases.test_b03_recompute_prefetch import checkpointed
from tests.cases.test_b05_order_differs import train
from tests.cases.test_b27_global_sizes import Weights, everywhere
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


def recomputation_has_parity(rank: int) -> None:
    """B03: with the threads of a real autograd engine."""
    training = checkpointed(2, {"L1": True, "L2": False})
    trained = train_shards(rank, training)

    for got, expected in zip(trained, train_unsharded(training), strict=True):
        mine = {
            name: None if each is None else each[rank : rank + 1]
            for name, each in expected.weights.items()
        }
        assert_equal(got.weights, mine)


def test_on_gloo_processes() -> None:
    """The same programs, two processes."""
    bodies = [
        orders_that_differ_are_refused,
        uneven_rows_come_back_whole,
        recomputation_has_parity,
    ]

    on_processes(bodies, 2, "gloo")
