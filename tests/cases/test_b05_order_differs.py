"""B05: ranks that run units in different orders are told, at once and by name."""

import re
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fsdp_sim
from fsdp_core import PrefetchOrder, SchedulePolicy, StateError
from tests.cases.programs import Row, batch, fill, linear, loss_of, shard

ORDERS = list(permutations(("A", "B", "C")))
WITHOUT_MATCHING = ["races", "lifetime", "rest", "capture"]


def independent(equal: bool = True) -> nn.Module:
    """Units that can be called in any order."""
    return fill(Row(A=linear(), B=linear(), C=linear()) if equal else Unequal())


class Unequal(nn.Module):
    """Independent units of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.A, self.B, self.C = linear(2, 2), linear(4, 2), linear(6, 2)

    def forward(self, x: Any, calls: tuple[str, ...]) -> Any:
        """Add up what the units make of `x`."""
        return sum(self.get_submodule(name)(x).sum() for name in calls)


def train(rank: int, orders: list[tuple[str, ...]], equal: bool, **options: Any) -> None:
    """One step in this rank's order."""
    model = independent(equal)
    shard(model, "A", "B", "C", "", mesh=(len(orders),), **options)
    loss_of(model(batch(rank), orders[rank]), rank).backward()


def train_on_demand(rank: int, orders: list[tuple[str, ...]], equal: bool) -> None:
    """The same, without prefetches."""
    policy = SchedulePolicy(forward_prefetch_size=0, backward_prefetch_size=0)
    train(rank, orders, equal, schedule_policy=policy)


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.filterwarnings("ignore:step")
def test_the_first_divergence_is_named_with_both_units(equal: bool) -> None:
    """pytorch#75373: no numbers come back and no timeout is waited for."""
    orders = [("A", "B"), ("B", "A")]

    with pytest.raises(fsdp_sim.CollectiveMismatch) as caught:
        fsdp_sim.simulate(train_on_demand, 2, args=(orders, equal))

    finding = caught.value.finding
    assert finding is not None
    assert {site.rank: site.annotation for site in finding.ops} == {
        0: "fsdp_core::unshard A",
        1: "fsdp_core::unshard B",
    }
    size_of_b = 2 if equal else 4
    assert re.search(
        r"operation \d+ of group '[^']+' \(ranks \[0, 1\]\) must agree on all ranks: rank 0 issued "
        rf"all_gather \[fsdp_core::unshard A\] of \[2\] float32, rank 1 all_gather "
        rf"\[fsdp_core::unshard B\] of \[{size_of_b}\] float32",
        finding.message,
    )
    assert all(site.source is not None for site in finding.ops)
    assert caught.value.report.results == [None, None]


@pytest.mark.filterwarnings("ignore:step")
def test_under_registration_the_runtime_itself_does_not_compare() -> None:
    """Equal sizes and no prefetch: only the simulator's matching tells that the order differs."""
    orders = [("A", "B"), ("B", "A")]

    report = fsdp_sim.simulate(train_on_demand, 2, args=(orders, True), checkers=WITHOUT_MATCHING)

    assert report.findings == ()


@pytest.mark.filterwarnings("ignore:step")
def test_parts_that_do_not_fit_together_are_told_as_their_rank_called_them() -> None:
    """Without matching a gather meets a reduction; the run ends with rank 0's call, unit and line."""
    orders = [("A", "B"), ("B", "A")]

    with pytest.raises(fsdp_sim.RunError) as caught:
        fsdp_sim.simulate(train, 2, args=(orders, True), checkers=WITHOUT_MATCHING)

    assert re.fullmatch(
        r"the parts of reduce_scatter \[fsdp_core::reduce_gradients A\] \(operation \d+ of group "
        r"'[^']+', sizes \[2\]\) issued at \S+/fsdp_core/collectives\.py:\d+ do not fit together "
        r"\(.+\); run with the checker 'collective_match' to see where they differ",
        str(caught.value),
    )


@given(st.lists(st.sampled_from(ORDERS), min_size=2, max_size=3))
@settings(max_examples=8)
@pytest.mark.filterwarnings("ignore:step")
def test_any_difference_of_order_is_found_and_no_agreement_is(orders: Any) -> None:
    """Ranks with one order run clean, others do not."""
    if len(set(orders)) == 1:
        fsdp_sim.simulate(train, len(orders), args=(orders, True))
        return
    with pytest.raises(fsdp_sim.CollectiveMismatch):
        fsdp_sim.simulate(train, len(orders), args=(orders, True))


def test_a_recorded_pass_is_refused_on_every_rank_when_it_freezes() -> None:
    """Under RECORDED the runtime itself compares, once; here the simulator does not."""

    def program(rank: int) -> str:
        orders: list[tuple[str, ...]] = [("A", "B"), ("B", "A")]
        with pytest.raises(StateError) as caught:
            train(rank, orders, equal=True, prefetch_order=PrefetchOrder.RECORDED)
        return str(caught.value)

    report = fsdp_sim.simulate(program, 2, checkers=WITHOUT_MATCHING)

    message = (
        "all ranks must run the same pass under RECORDED, got a difference at position 1: "
        "rank 0: A forward, rank 1: B forward; make the order of calls the same on all ranks"
    )
    assert report.results == [message, message]


def test_units_of_several_roots_are_told_apart() -> None:
    """A context may have several roots, all of equal names: the report numbers them."""

    def program(rank: int) -> None:
        layers = nn.ModuleList([linear(), linear()])
        fill(layers)
        shard(layers, "0", "1")
        first, second = (layers[rank], layers[1 - rank])
        loss_of(second(first(batch(rank))), rank).backward()

    with pytest.raises(fsdp_sim.CollectiveMismatch) as caught:
        fsdp_sim.simulate(program, 2)

    assert caught.value.finding is not None
    assert {site.rank: site.annotation for site in caught.value.finding.ops} == {
        0: "fsdp_core::unshard <root> (root 0)",
        1: "fsdp_core::unshard <root> (root 1)",
    }
