"""B67: a collective reads and writes on a stream of its own, and the race detector sees it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fsdp_sim

cpu: Any = torch.cpu
UNITS = 3


def pipeline(rank: int, guards: tuple[str, ...]) -> float:
    """Gather unit k + 1 while unit k computes; `guards` says how each gather is waited for."""
    shards = [torch.full((2,), float(rank + unit)) for unit in range(UNITS)]
    total = torch.zeros(())

    def gather(unit: int) -> tuple[Tensor, Any]:
        parts = [torch.empty(2), torch.empty(2)]
        whole = torch.stack(parts)
        return whole, dist.all_gather(list(whole), shards[unit], async_op=True)

    whole, work = gather(0)
    for unit in range(UNITS):
        if guards[unit] == "wait":
            work.wait()
        elif guards[unit] == "host":
            cpu.synchronize()
        ahead = gather(unit + 1) if unit + 1 < UNITS else (whole, work)
        total = total + whole.sum()
        whole, work = ahead
    work.wait()
    return total.item()


def test_a_correct_pipeline_has_no_report() -> None:
    """pytorch#177905: the order is on the library's own stream; nothing is raised for want of it."""
    report = fsdp_sim.simulate(pipeline, 2, args=(("wait",) * UNITS,))

    # Unit k gathers k and k + 1, two elements each.
    assert report.results == [18.0, 18.0]


def test_a_dropped_wait_is_one_report() -> None:
    """The reader and the gather whose completion it did not wait for."""
    with pytest.raises(fsdp_sim.Race) as caught:
        fsdp_sim.simulate(pipeline, 2, args=(("wait", "none", "wait"),))

    assert len(caught.value.report.findings) == 1
    finding = caught.value.finding
    assert finding is not None
    assert [op.name for op in finding.ops] == ["all_gather", "sum"]
    assert finding.ranks == (0, 1)


def test_a_host_synchronisation_orders_everything() -> None:
    """Instead of the wait."""
    fsdp_sim.simulate(pipeline, 2, args=(("host",) * UNITS,))


@given(st.lists(st.sampled_from(["wait", "none", "host"]), min_size=3, max_size=3).map(tuple))
@settings(max_examples=8)
def test_a_missing_wait_is_found_unless_a_later_one_stands_in(guards: tuple[str, ...]) -> None:
    """Gathers are one behind the other on their stream, so a later wait comes too late only."""
    report = fsdp_sim.simulate(pipeline, 2, args=(guards,), strict=False)

    assert bool(report.findings) is ("none" in guards)


@pytest.mark.parametrize("waits_for", ["old", "new"])
def test_a_stream_that_reuses_an_id_is_not_taken_for_the_one_before(waits_for: str) -> None:
    """A wait for a new stream says nothing about the work of one that is gone."""

    def program(rank: int) -> None:
        value, compute = torch.zeros(2), cpu.current_stream()
        old = cpu.Stream()
        old.wait_stream(compute)
        with cpu.stream(old):
            value.add_(1)
        if waits_for == "old":
            compute.wait_stream(old)
        del old
        new = cpu.Stream()
        compute.wait_stream(new)
        value.add_(1)

    kinds = [f.kind for f in fsdp_sim.simulate(program, 1, strict=False).findings]
    assert kinds == ([] if waits_for == "old" else ["Race"])


@pytest.mark.parametrize("waits_for", ["late", "early"])
def test_an_event_that_reuses_an_id_is_not_taken_for_the_one_before(waits_for: str) -> None:
    """The same, for events."""

    def program(rank: int) -> None:
        value, compute, side = torch.zeros(2), cpu.current_stream(), cpu.Stream()
        early = side.record_event()
        if waits_for == "early":
            compute.wait_event(early)
        del early
        side.wait_stream(compute)
        with cpu.stream(side):
            value.add_(1)
        late = side.record_event()
        if waits_for == "late":
            compute.wait_event(late)
        value.add_(1)

    kinds = [f.kind for f in fsdp_sim.simulate(program, 1, strict=False).findings]
    assert kinds == ([] if waits_for == "late" else ["Race"])
