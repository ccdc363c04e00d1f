"""B01: an unused prefetch is not left in flight when a branch is skipped."""

import re
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fsdp_sim
from fsdp_core import PrefetchOrder, StateError
from fsdp_core.unit import ShardedUnit
from tests.cases.programs import (
    Row,
    Training,
    batch,
    check_parity,
    fill,
    gathered,
    loss_of,
    ops_by_step,
    shard,
    train_shards,
)

NAMES = ("fc1", "fc2", "fc3")


def branching(flags: tuple[bool, ...], skipped: str, **options: object) -> Training:
    """Three units in a row under a root; one of them is called only where the flag is set."""

    def step(model: nn.Module, rank: int, number: int) -> list[str]:
        calls = [name for name in NAMES if flags[number] or name != skipped]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss_of(model(batch(rank, number), calls), rank).backward()
        return [str(each.message) for each in caught]

    return Training(
        lambda: fill(Row(*NAMES)), step, (*NAMES, ""), len(flags), options=dict(options)
    )


@pytest.mark.parametrize("skipped", ["fc2", "fc3"])
def test_a_skipped_unit_costs_one_gather_that_is_waited_for_and_freed(skipped: str) -> None:
    """deepspeedai/DeepSpeed#5828, #6557: also where the skipped unit is the last one."""
    training = branching((True, True, False, False, True), skipped)

    report = check_parity(training)

    steps = ops_by_step(report)
    assert [gathered(ops).count(skipped) for ops in steps] == [2, 2, 1, 1, 2]
    for rank in report.results:
        assert [step.gradients[f"{skipped}.weight"] is None for step in rank] == [
            *(False, False, True, True, False)
        ]
        assert rank[-1].stats["unused_prefetches"] == 2
        assert rank[-1].stats["prefetches"] == 2 + rank[-1].stats["used_prefetches"]
    (notice,) = report.notices
    assert notice.kind == "UnusedPrefetch"
    assert f"gathered for 'fsdp_core::unshard {skipped}' was never used" in notice.message
    assert notice.count == 4


def test_weights_may_be_written_behind_a_forward_that_skipped_a_gathered_unit() -> None:
    """Also without a backward, and by hand: the gather that nobody used has read them by then."""

    def program(rank: int) -> list[bool]:
        shard(model := fill(Row(*NAMES)), *NAMES, "")
        before = model(batch(rank), NAMES[:2])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        after = model(batch(rank), NAMES)
        after.sum().backward()
        return [bool(each.any()) for each in (before, after)]

    assert fsdp_sim.simulate(program, 2).results == [[True, False]] * 2


@pytest.mark.parametrize(
    ("skipped", "actual"), [("fc2", "forward of 'fc3'"), ("fc3", "backward of '<root>'")]
)
def test_a_change_of_order_gives_one_notice_with_both_names(skipped: str, actual: str) -> None:
    """transformers#23693: the notice names modules, not ids, and comes once for each change."""
    report = check_parity(branching((True, True, False, False, True), skipped))

    message = f"step 2: unit {skipped!r} was expected to enter its forward next, got the {actual};"
    for rank in report.results:
        assert [len(step.returned) for step in rank] == [0, 0, 1, 0, 0]
        assert rank[2].returned[0].startswith(message)


@given(
    flags=st.lists(st.booleans(), min_size=1, max_size=4).map(tuple),
    skipped=st.sampled_from(NAMES),
)
@settings(max_examples=6)
def test_any_branches_have_parity(flags: tuple[bool, ...], skipped: str) -> None:
    """Whatever is skipped, wherever it stands."""
    report = check_parity(branching(flags, skipped))

    for ops, flag in zip(ops_by_step(report), flags, strict=True):
        assert gathered(ops).count(skipped) <= (2 if flag else 1)


def test_a_recorded_pass_refuses_the_branch_on_all_ranks() -> None:
    """Under RECORDED a pass that differs is an error, on every rank, before anything is gathered."""

    def program(rank: int) -> str:
        training = branching((True, False), "fc2", prefetch_order=PrefetchOrder.RECORDED)
        with pytest.raises(StateError) as caught:
            train_shards(rank, training)
        return str(caught.value)

    report = fsdp_sim.simulate(program, 2)

    expected = "got fc3 forward at position 2 of 8, expected fc2 forward"
    assert all(re.search(re.escape(expected), message) for message in report.results)


@pytest.mark.filterwarnings("ignore:step")
@pytest.mark.parametrize("skipped", ["fc2", "fc3"])
def test_a_prefetch_that_stays_in_flight_is_found(
    skipped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect planted: only who uses a unit completes its gather."""
    monkeypatch.setattr(ShardedUnit, "come_to_rest", lambda _: None)
    monkeypatch.setattr(ShardedUnit, "end_forward", lambda _, **_options: None)
    training = replace(branching((True, False), skipped), rests=False)

    with pytest.raises(fsdp_sim.NotAtRest, match="left in flight") as caught:
        fsdp_sim.simulate(train_shards, 2, args=(training,))

    assert caught.value.finding is not None
    assert caught.value.finding.ranks == (0, 1)
    assert f"fsdp_core::unshard {skipped}" in str(caught.value)
