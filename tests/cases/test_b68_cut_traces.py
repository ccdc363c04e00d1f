"""B68: what the records of collectives say is enough to match them from any point of a cut trace."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.profiler import record_function

import fsdp_sim
from fsdp_sim.analysis import analyse
from fsdp_sim.checkers import make
from fsdp_sim.op import Call, Kind, Op
from fsdp_sim.trace import Trace
from tests.sim.frtrace import analysed

RANKS = 3
COUNT = 20
KEPT = 10
PAIR = 6


def issue(rank: int, odd_one_out: int | None = None) -> None:
    """20 collectives on two groups, two of them as one; a rank may take another unit at last."""
    groups = [dist.group.WORLD, dist.new_group([2, 1, 0])]
    number = 0
    while number < COUNT:
        group = groups[number % 2]
        is_odd = number == COUNT - 1 and rank == odd_one_out
        with record_function(f"fsdp_core::unshard u{number + is_odd}"):
            if number == PAIR:
                with _coalescing_manager(group=group):
                    for _ in range(2):
                        dist.all_reduce(torch.ones(number + 1), group=group)
                        number += 1
                continue
            dist.all_reduce(torch.ones(number + 1), group=group)
        number += 1


def records(**options: Any) -> list[list[Op]]:
    """Each rank's records of collectives."""
    args = tuple(options.values())
    report = fsdp_sim.simulate(issue, RANKS, args=args, checkers=["races"], trace=True)
    ops = [op for op in report.trace.all_ops() if op.kind is Kind.COLLECTIVE]
    return [[op for op in ops if op.rank == rank] for rank in range(RANKS)]


def call_of(op: Op) -> Call:
    """What a record says of the collective."""
    assert op.call is not None
    return op.call


def tail(ranks: Sequence[list[Op]], cuts: Sequence[int]) -> list[Op]:
    """The last records of each rank, without a rank's last `cuts`: rank r ends earlier."""
    kept = [ops[: len(ops) - cut][-KEPT:] for ops, cut in zip(ranks, cuts, strict=True)]
    return [op for ops in kept for op in ops]


def matched(ops: Sequence[Op]) -> Counter[tuple[str, int]]:
    """How many ranks have a record of each collective, by group and number."""
    return Counter((call_of(op).group_name, call_of(op).sequence) for op in ops)


def test_a_record_says_everything_that_matching_needs() -> None:
    """pytorch#125173: group, number in it, kind, sizes, type, unit and source line."""
    for ops in records():
        assert len(ops) == COUNT
        issued: Counter[str] = Counter()
        for number, op in enumerate(ops):
            call = call_of(op)
            assert call.sequence == issued[call.group_name]
            issued[call.group_name] += 1
            assert set(call.group) == {0, 1, 2}
            assert call.name == "all_reduce"
            assert call.sizes == (number + 1,)
            assert call.dtype == "float32"
            assert op.annotation == f"fsdp_core::unshard u{number - (number == PAIR + 1)}"
            assert op.source is not None
            assert op.source.file == __file__


def test_coalesced_operations_are_entries_of_their_own_under_one_parent() -> None:
    """Both carry the number of their batch, and nobody else does."""
    for ops in records():
        batches = [call_of(op).batch for op in ops]
        assert batches[PAIR] is not None
        assert [n for n, batch in enumerate(batches) if batch is not None] == [PAIR, PAIR + 1]
        assert batches[PAIR] == batches[PAIR + 1]


CUTS = st.lists(st.integers(0, 5), min_size=RANKS, max_size=RANKS)


@given(CUTS)
@settings(max_examples=5)
def test_any_cut_matches_and_shows_no_mismatch(cuts: list[int]) -> None:
    """Each rank's last 10 records, each cut elsewhere."""
    ops = tail(records(), cuts)

    assert max(matched(ops).values()) == RANKS
    assert analyse(ops, make(["collective_match"]), RANKS).findings == ()


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_mismatch_in_what_is_left_is_found(rank: int) -> None:
    """By the rank that issued something else."""
    ops = tail(records(odd_one_out=rank), [0, 0, 0])

    (finding,) = analyse(ops, make(["collective_match"]), RANKS).findings
    assert finding.kind == "CollectiveMismatch"
    assert rank in finding.ranks
    assert "[fsdp_core::unshard u19]" in finding.message
    assert "[fsdp_core::unshard u20]" in finding.message


def test_pytorchs_own_analysis_matches_a_dump_that_begins_late(tmp_path: Path) -> None:
    """Dumps are numbered as the run was, not from where they begin."""
    ranks = records()
    ops = [op for rank, each in enumerate(ranks) for op in each[COUNT - KEPT - 2 * rank :]]

    collectives = analysed(Trace.of(ops, RANKS), tmp_path).collectives

    whole = [collective for collective in collectives if not collective.missing_ranks]
    assert len(whole) == KEPT
    assert all(collective.pass_check for collective in collectives)
