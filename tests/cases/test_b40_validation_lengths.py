"""B40: ranks that stop validating at different times are told at once who waits for whom."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fsdp_sim
from fsdp_sim.errors import FindingError
from tests.cases.programs import Row, batch, fill, shard


def validate(rank: int, forwards: list[int], own_group: bool) -> float:
    """Run this rank's number of forwards without gradients, then add up a scalar over ranks."""
    model: nn.Module = fill(Row("a", "b"))
    shard(model, "a", "b", "", mesh=(len(forwards),))
    group = dist.new_group(list(range(len(forwards)))) if own_group else None
    with torch.no_grad():
        for number in range(forwards[rank]):
            model(batch(rank, number))
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return total.item()


def test_a_gather_is_never_paired_with_a_reduction() -> None:
    """prime-rl#2515, torchtitan#1618: on one group the fourth forward's gather meets the sum."""
    with pytest.raises(fsdp_sim.CollectiveMismatch) as caught:
        fsdp_sim.simulate(validate, 2, args=([3, 4], False))

    finding = caught.value.finding
    assert finding is not None
    # Three forwards of two units are six gathers, numbers 0 to 5.
    assert "operation 6 of group" in finding.message
    assert "rank 1 issued all_gather [fsdp_core::unshard a] of [2] float32" in finding.message
    assert "rank 0 all_reduce SUM of [1] float32" in finding.message


def test_on_a_group_of_its_own_the_sum_waits_and_both_ranks_are_named() -> None:
    """pytorch-lightning#20561, litgpt#2319: a deadlock, found without waiting for a timeout."""
    with pytest.raises(fsdp_sim.Deadlock) as caught:
        fsdp_sim.simulate(validate, 2, args=([3, 4], True))

    finding = caught.value.finding
    assert finding is not None
    assert "missing: rank 0" in finding.message
    first, second = finding.detail[:2]
    assert first.startswith("rank 0 waits")
    assert f"all_reduce (operation 0 of group '1', sizes [1]) issued at {__file__}" in first
    assert second.startswith("rank 1 waits")
    assert "all_gather [fsdp_core::unshard a] (operation 6 of group '0', sizes [2])" in second


@given(st.lists(st.integers(0, 3), min_size=2, max_size=3), st.booleans())
@settings(max_examples=10)
def test_any_difference_of_lengths_is_found_and_no_agreement_is(
    forwards: list[int], own_group: bool
) -> None:
    """Ranks with equal numbers of batches run clean, others do not."""
    if len(set(forwards)) == 1:
        report = fsdp_sim.simulate(validate, len(forwards), args=(forwards, own_group))
        assert report.results == [float(len(forwards))] * len(forwards)
        return
    with pytest.raises(FindingError) as caught:
        fsdp_sim.simulate(validate, len(forwards), args=(forwards, own_group))
    assert caught.value.finding is not None
    assert caught.value.finding.kind in ("CollectiveMismatch", "Deadlock")
