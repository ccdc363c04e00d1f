"""Deadlocks are found at once, by name; what only the simulator's need for values stops is none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsdp_sim
from fsdp_sim.analysis import analyse
from fsdp_sim.checkers import make
from fsdp_sim.errors import Finding
from fsdp_sim.trace import Trace

cpu: Any = torch.cpu


def deadlock(program: Callable[[int], Any], world_size: int = 2) -> Finding:
    """Run a program that must end in a deadlock; return the finding."""
    with pytest.raises(fsdp_sim.Deadlock) as caught:
        fsdp_sim.simulate(program, world_size)
    assert caught.value.finding is not None
    return caught.value.finding


def notices(program: Callable[[int], Any], world_size: int = 2) -> list[str]:
    """Run a clean program; return the kinds of its notices."""
    return [finding.kind for finding in fsdp_sim.simulate(program, world_size).notices]


def two_groups() -> tuple[Any, Any]:
    """Return two groups of ranks 0 and 1."""
    return dist.new_group([0, 1]), dist.new_group([0, 1])


# ---------------------------------------------------------------------- ranks that are missing


def test_a_rank_that_skips_a_collective_is_named_first() -> None:
    """The laggard, what each rank waits for, and where it was issued."""

    def program(rank: int) -> float:
        value = torch.ones(3)
        if rank != 1:
            dist.all_reduce(value)
        return value.sum().item()

    finding = deadlock(program, 3)

    assert finding.message == "no rank can go on; missing: rank 1"
    assert finding.ranks == (1, 0, 2)
    assert finding.detail[0] == "rank 1 has ended"
    assert "all_reduce (operation 0 of group '0', sizes [3]) issued at" in finding.detail[1]
    assert finding.detail[-1].endswith("not issued by [1]")
    assert [site.rank for site in finding.ops] == [0, 2]


def test_laggards_come_in_the_order_in_which_they_are_waited_for() -> None:
    """Rank 2 is missing from two operations, rank 3 from one."""

    def program(rank: int) -> None:
        pair = dist.new_group([0, 2])
        if rank == 0:
            dist.all_reduce(torch.ones(1), group=pair)
        if rank in (0, 1):
            dist.all_reduce(torch.ones(1))
            dist.barrier()

    finding = deadlock(program, 4)

    assert finding.message == "no rank can go on; missing: ranks 2, 3"


def test_the_exception_of_a_peer_comes_out_as_itself_with_the_waiters() -> None:
    """The deadlock that it leaves is in the report, and names the exception."""

    def program(rank: int) -> None:
        if rank == 1:
            raise ValueError("no more data")
        dist.barrier()

    with pytest.raises(ValueError, match="no more data") as caught:
        fsdp_sim.simulate(program, 3)

    report = caught.value.report  # type: ignore[attr-defined]
    (finding,) = report.findings
    assert finding.kind == "Deadlock"
    assert finding.detail[0] == "rank 1 ended with ValueError('no more data')"
    assert all("barrier (operation 0 of group '0'" in line for line in finding.detail[1:3])


def test_collectives_that_nobody_waits_for_must_complete_too() -> None:
    """Every program ends by itself, and yet one rank never joined."""

    def program(rank: int) -> None:
        if rank == 0:
            dist.all_reduce(torch.ones(1), async_op=True)

    finding = deadlock(program)

    assert finding.message == (
        "the program has ended with operations that never complete; missing: rank 1"
    )


def test_different_numbers_of_forwards_are_a_deadlock_that_names_the_unit() -> None:
    """B40 with a group of its own for the metric: rank 1 waits in its fourth gather."""

    def program(rank: int) -> None:
        everybody = dist.new_group([0, 1])
        unit = nn.Linear(4, 4)
        fully_shard(unit, reshard_after_forward=True)
        with torch.no_grad():
            for _ in range(3 + rank):
                unit(torch.ones(1, 4))
        metric = torch.ones(())
        dist.all_reduce(metric, group=everybody)
        metric.item()

    finding = deadlock(program)
    gather, metric = (line for line in finding.detail if line.startswith("rank "))
    if gather.startswith("rank 0"):
        gather, metric = metric, gather

    assert "all_gather [FSDP::all_gather] (operation 3 of group '0'" in gather
    assert "all_reduce (operation 0 of group '1'" in metric
    assert "test_liveness.py" in metric


def test_host_waits_that_wait_for_each_other_are_a_deadlock() -> None:
    """Each host waits for a collective that the other has not issued."""

    def program(rank: int) -> None:
        groups = two_groups()
        for group in groups if rank == 0 else reversed(groups):
            value = torch.ones(1)
            dist.all_reduce(value, group=group)
            value.item()

    finding = deadlock(program)

    assert finding.message == "no rank can go on; missing: ranks 0, 1"


def test_a_host_wait_lasts_until_the_device_is_done() -> None:
    """Rank 2's values are there, but on rank 0's stream an operation is ahead that never completes."""

    def program(rank: int) -> None:
        pairs = {peer: dist.new_group([0, peer]) for peer in (1, 2)}
        value = torch.ones(1)
        if rank == 0:
            dist.all_reduce(value, group=pairs[1])
            other = torch.ones(1)
            dist.all_reduce(other, group=pairs[2])
        elif rank == 2:
            dist.all_reduce(value, group=pairs[2])
            value.item()

    finding = deadlock(program, 3)

    assert finding.message == "no rank can go on; missing: rank 1"


# ---------------------------------------------------------------------- cycles on devices


def test_opposite_orders_on_ordered_streams_are_a_deadlock_at_issue() -> None:
    """Values would all be there: hardware would hang, and nobody waits on a host."""

    def program(rank: int) -> None:
        groups = two_groups()
        for group in groups if rank == 0 else reversed(groups):
            dist.all_reduce(torch.ones(1), group=group)

    finding = deadlock(program)

    assert finding.message == "operations wait for each other on their devices, in a cycle"
    assert len(finding.detail) == 2
    assert {site.rank for site in finding.ops} == {0, 1}
    assert len(finding.ops) == 4


def test_opposite_orders_on_unordered_streams_are_a_deadlock() -> None:
    """B41, first: NCCL demands one order of submission on all ranks."""

    def program(rank: int) -> None:
        first, second = two_groups()
        order = (first, second) if rank == 0 else (second, first)
        works = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for group in order]
        for work in works:
            work.wait()

    finding = deadlock(program)

    assert finding.message.startswith(
        "collectives of several communicators must be submitted in one"
    )


def test_one_order_on_unordered_streams_is_a_possible_deadlock() -> None:
    """B41, second: legal, so a notice, with a code of its own."""

    def program(rank: int) -> None:
        works = [
            dist.all_reduce(torch.ones(1), group=group, async_op=True) for group in two_groups()
        ]
        for work in works:
            work.wait()

    assert notices(program) == ["PossibleDeadlock"]


def test_an_event_between_two_communicators_takes_the_notice_away() -> None:
    """B41, last."""

    def program(rank: int) -> None:
        for group in two_groups():
            dist.all_reduce(torch.ones(1), group=group, async_op=True).wait()

    assert notices(program) == []


def reduce_in(rank: int, *members: list[int], is_ordered: bool = False) -> None:
    """Reduce in each of these groups that the rank is in, one behind the other or all at once."""
    groups = [dist.new_group(ranks) for ranks in members]
    works = []
    for group in groups:
        if dist.get_rank(group) >= 0:
            works.append(dist.all_reduce(torch.ones(1), group=group, async_op=True))
            if is_ordered:
                works[-1].wait()
    for work in works:
        work.wait()


GRID = ([0, 1], [2, 3], [0, 2], [1, 3])
"""The sharding and the replication groups of a 2-D mesh."""


def test_groups_that_share_single_ranks_around_a_ring_may_block_each_other() -> None:
    """0 waits for 1 in a row, 1 for 3 in a column, 3 for 2 in a row, 2 for 0 in a column."""
    report = fsdp_sim.simulate(lambda rank: reduce_in(rank, *GRID), 4)

    (notice,) = report.notices
    assert notice.kind == "PossibleDeadlock"
    assert "a ring of groups on ranks [0, 1, 2, 3]" in notice.message


def test_groups_of_a_mesh_in_order_are_clean() -> None:
    """A rank that finishes its row before its column waits for nobody in a ring."""
    assert notices(lambda rank: reduce_in(rank, *GRID, is_ordered=True), 4) == []


def test_groups_that_share_single_ranks_without_a_ring_cannot_block_each_other() -> None:
    """Some rank of a chain always has only one of them."""
    assert notices(lambda rank: reduce_in(rank, [0, 1], [1, 2], [2, 3]), 4) == []
    assert notices(lambda rank: reduce_in(rank, [0, 1], [0, 2], [0, 3]), 4) == []


def test_a_cycle_through_three_groups_is_found() -> None:
    """No two ranks share two groups, and each does its two in the wrong order for the others."""

    def program(rank: int) -> None:
        pairs = [[0, 1], [1, 2], [2, 0]]
        groups = [dist.new_group(sorted(pair)) for pair in pairs]
        for each in ((0, 2), (1, 0), (2, 1))[rank]:
            dist.all_reduce(torch.ones(1), group=groups[each])

    finding = deadlock(program, 3)

    assert len(finding.detail) == 3


def test_three_groups_in_one_order_are_clean() -> None:
    """The same ranks and groups, submitted in one order."""

    def program(rank: int) -> None:
        for pair in ([0, 1], [1, 2], [0, 2]):
            group = dist.new_group(pair)
            if rank in pair:
                dist.all_reduce(torch.ones(1), group=group)

    assert notices(program, 3) == []


def test_a_stored_trace_shows_the_same_cycle() -> None:
    """The checker needs ops alone."""

    def program(rank: int) -> None:
        groups = two_groups()
        for group in groups if rank == 0 else reversed(groups):
            dist.all_reduce(torch.ones(1), group=group)

    names = ("races",)
    ops = fsdp_sim.simulate(program, 2, trace=True, checkers=names, strict=False).trace.ops
    findings = analyse(ops, make(("liveness",)), 2).findings

    assert [finding.kind for finding in findings] == ["Deadlock"]


def in_opposite_orders(rank: int) -> None:
    """Each host waits for what the other has not issued."""
    groups = two_groups()
    for group in groups if rank == 0 else reversed(groups):
        value = torch.ones(1)
        dist.all_reduce(value, group=group)
        value.item()


def for_a_key(rank: int) -> None:
    """Rank 1 waits for a key that rank 0 would set behind a barrier."""
    key = "set behind the barrier"
    if rank == 1:
        c10d._get_default_store().wait([key])
    dist.barrier()
    if rank == 0:
        c10d._get_default_store().set(key, "")


def for_a_split(rank: int) -> None:
    """Rank 1 never splits the group."""
    if rank == 0:
        dist.split_group(split_ranks=[[0, 1]])


def for_one_that_has_ended(rank: int) -> None:
    """Rank 1 never comes."""
    if rank == 0:
        dist.barrier()


@pytest.mark.parametrize(
    "program", [in_opposite_orders, for_a_key, for_a_split, for_one_that_has_ended]
)
def test_hosts_that_wait_in_vain_are_found_again_in_a_stored_trace(
    program: Callable[[int], None], tmp_path: Path
) -> None:
    """The trace says where each host stood: the finding is the same, word by word."""
    report = fsdp_sim.simulate(program, 2, trace=True, strict=False)
    report.trace.save(tmp_path / "trace.jsonl")
    stored = Trace.load(tmp_path / "trace.jsonl")

    found_again = analyse(stored.ops, make(("liveness",)), 2, stands=stored.stands).findings

    assert [finding.kind for finding in report.findings] == ["Deadlock"]
    assert [each.describe() for each in found_again] == [
        each.describe() for each in report.findings
    ]


# ---------------------------------------------------------------------- running ahead


def ahead(rank: int, then: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Rank 0's host goes on while its first collective waits for rank 1, which waits for the second."""
    first, second = two_groups()
    one, two, stream = torch.ones(4), torch.ones(4), cpu.Stream()
    stream.wait_stream(cpu.current_stream())
    result = one
    if rank == 0:
        dist.all_reduce(one, group=first)
        result = then(one)
    with cpu.stream(stream):
        dist.all_reduce(two, group=second)
    if rank == 1:
        stream.synchronize()
        dist.all_reduce(one, group=first)
        result = then(one)
    cpu.current_stream().wait_stream(stream)
    return result.sum().item()


@pytest.mark.parametrize(
    ("then", "expected"),
    [
        (lambda value: value * 2, 16.0),
        (lambda value: value.add_(1), 12.0),
        (lambda value: torch.relu(value) + torch.cat([value, value])[:4], 16.0),
        (lambda value: value.to(torch.bfloat16).float(), 8.0),
        (lambda value: torch.zeros(4).copy_(value), 8.0),
        (lambda value: torch._foreach_mul([value], 3.0)[0], 24.0),
        (lambda value: torch.stack(value.split(2)).max(dim=0).values, 4.0),
        (lambda value: nn.functional.softmax(value, 0) * 4, 4.0),
    ],
)
def test_a_host_that_needs_no_values_goes_on(
    then: Callable[[torch.Tensor], torch.Tensor], expected: float
) -> None:
    """The operators are run when the values have come, and are right then."""
    assert fsdp_sim.simulate(lambda rank: ahead(rank, then), 2).results == [expected] * 2


def test_a_deferred_operator_feeds_a_collective() -> None:
    """A reduction whose input is computed from values that are still to come."""

    def then(value: torch.Tensor) -> torch.Tensor:
        doubled = value * 2
        dist.all_reduce(doubled)
        return doubled

    report = fsdp_sim.simulate(lambda rank: ahead(rank, then), 2)

    assert report.results == [32.0, 32.0]


def test_gradients_of_deferred_operators_are_right() -> None:
    """Running an operator later does not count as a change of what it saved."""

    def then(value: torch.Tensor) -> torch.Tensor:
        weight = torch.full((4,), 3.0, requires_grad=True)
        (torch.sigmoid(weight - value) * value).sum().backward()
        assert weight.grad is not None
        return weight.grad

    report = fsdp_sim.simulate(lambda rank: ahead(rank, then), 2)
    grad = torch.sigmoid(torch.tensor(1.0))

    assert report.results == [pytest.approx(float(4 * 2 * grad * (1 - grad)))] * 2


def test_what_cannot_be_run_later_ends_the_run_as_not_simulated() -> None:
    """Random numbers would be drawn in another order: neither clean nor a finding."""

    def then(value: torch.Tensor) -> torch.Tensor:
        return torch.bernoulli(value / 2)

    with pytest.raises(fsdp_sim.CannotRunAhead, match="bernoulli needs values"):
        fsdp_sim.simulate(lambda rank: ahead(rank, then), 2)


def test_memory_that_a_deferred_operator_reads_may_be_freed() -> None:
    """As FSDP frees full parameters: on a device the free is behind the operator."""

    def then(value: torch.Tensor) -> torch.Tensor:
        doubled = value * 2
        value.untyped_storage().resize_(0)
        return doubled + 1

    report = fsdp_sim.simulate(lambda rank: ahead(rank, then), 2)

    assert report.results == [20.0, 20.0]


def test_running_ahead_never_hides_a_real_deadlock() -> None:
    """The host wait of rank 1 is for a collective that rank 0 never issues."""

    def program(rank: int) -> None:
        first, second = two_groups()
        value = torch.ones(1)
        if rank == 0:
            dist.all_reduce(value, group=first)
            value.mul_(2)
        else:
            dist.all_reduce(value, group=second)
            value.item()
            dist.all_reduce(value, group=first)

    finding = deadlock(program)

    assert "missing: rank" in finding.message
