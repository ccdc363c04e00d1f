"""The k-th collective of a group must agree on all its ranks, and is compared when it is issued."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsdp_sim
from fsdp_sim.analysis import analyse
from fsdp_sim.checkers import make

Calls = tuple[Callable[[], Any], Callable[[], Any]]


def mismatch(calls: Calls) -> str:
    """Run one call on each of two ranks; return what they differ in."""
    with pytest.raises(fsdp_sim.CollectiveMismatch) as caught:
        fsdp_sim.simulate(lambda rank: calls[rank](), 2)
    finding = caught.value.finding
    assert finding is not None
    assert [site.rank for site in finding.ops] == [0, 1]
    assert all(site.source is not None and site.source.file == __file__ for site in finding.ops)
    return finding.detail[0]


@pytest.mark.parametrize(
    ("calls", "difference"),
    [
        (
            (lambda: dist.all_reduce(torch.ones(2)), lambda: dist.broadcast(torch.ones(2), 0)),
            "differs in name: 'all_reduce' on one, 'broadcast' on the other",
        ),
        (
            (lambda: dist.all_reduce(torch.ones(2)), dist.barrier),
            "differs in name: 'all_reduce' on one, 'barrier' on the other",
        ),
        (
            (
                lambda: dist.all_reduce(torch.ones(2)),
                lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX),
            ),
            "differs in reduce_op: 'SUM' on one, 'MAX' on the other",
        ),
        (
            (
                lambda: dist.all_reduce(torch.ones(2)),
                lambda: dist.all_reduce(torch.ones(2, dtype=torch.bfloat16)),
            ),
            "differs in dtype: 'float32' on one, 'bfloat16' on the other",
        ),
        (
            (lambda: dist.all_reduce(torch.ones(2)), lambda: dist.all_reduce(torch.ones(3))),
            "differs in sizes: (2,) on one, (3,) on the other",
        ),
        (
            (lambda: dist.broadcast(torch.ones(2), 0), lambda: dist.broadcast(torch.ones(2), 1)),
            "differs in root: 0 on one, 1 on the other",
        ),
        (
            (
                lambda: dist.all_gather([torch.ones(1), torch.ones(2)], torch.ones(1)),
                lambda: dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2)),
            ),
            "differs in sizes: (1, 2) on one, (2,) on the other",
        ),
        (
            (
                lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), [1, 2], [1, 2]),
                lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), [1, 2], [2, 1]),
            ),
            "differs in split sizes: rank 0 sends 2 elements to rank 1, which receives 1 from it",
        ),
        (
            (
                lambda: dist.all_to_all([torch.ones(1)] * 2, [torch.ones(1)] * 2),
                lambda: dist.all_to_all([torch.ones(1)] * 2, [torch.ones(3), torch.ones(1)]),
            ),
            "differs in split sizes: rank 1 sends 3 elements to rank 0, which receives 1 from it",
        ),
    ],
)
def test_what_two_ranks_disagree_in_is_named(calls: Calls, difference: str) -> None:
    """With both calls, their ranks and source lines."""
    assert mismatch(calls) == difference


def test_shapes_may_differ_where_elements_agree() -> None:
    """Bytes move, not shapes."""

    def program(rank: int) -> float:
        tensor = torch.ones(2, 3) if rank else torch.ones(6)
        dist.all_reduce(tensor)
        return tensor.sum().item()

    assert fsdp_sim.simulate(program, 2).results == [12.0, 12.0]


def test_uneven_splits_that_fit_are_clean() -> None:
    """What each sends is what the other receives."""

    def program(rank: int) -> float:
        sends = [[1, 2], [3, 4]][rank]
        receives = [[1, 3], [2, 4]][rank]
        out = torch.empty(sum(receives))
        dist.all_to_all_single(out, torch.ones(sum(sends)), receives, sends)
        return out.sum().item()

    assert fsdp_sim.simulate(program, 2).results == [4.0, 6.0]


def test_a_third_rank_that_disagrees_is_compared_with_every_other() -> None:
    """Ranks 0 and 1 agree about each other; rank 2 expects too much of rank 1 alone."""

    def program(rank: int) -> None:
        receives = [1, 2, 1] if rank == 2 else [1, 1, 1]
        out = torch.empty(sum(receives))
        dist.all_to_all_single(out, torch.ones(3), receives, [1, 1, 1])

    with pytest.raises(fsdp_sim.CollectiveMismatch, match="rank 1 sends 1 elements to rank 2"):
        fsdp_sim.simulate(program, 3)


def test_an_annotation_of_a_runtime_takes_part() -> None:
    """Two equal-sized operations that are swapped are found by the unit that they serve."""

    def program(rank: int) -> None:
        for unit in ("a", "b") if rank == 0 else ("b", "a"):
            with torch.autograd.profiler.record_function(f"FSDP::all_gather ({unit})"):
                dist.all_reduce(torch.ones(2))

    message = r"annotation: 'FSDP::all_gather \(a\)' on one, 'FSDP::all_gather \(b\)' on the other"
    with pytest.raises(fsdp_sim.CollectiveMismatch, match=message):
        fsdp_sim.simulate(program, 2)


def test_ranges_of_the_user_never_take_part() -> None:
    """They may say what they like, by rank too."""

    def program(rank: int) -> float:
        tensor = torch.ones(2)
        with torch.autograd.profiler.record_function(f"step of rank {rank}"):
            dist.all_reduce(tensor)
        return tensor.sum().item()

    assert fsdp_sim.simulate(program, 2).results == [4.0, 4.0]


@pytest.mark.parametrize("width", [4, 6])
def test_units_that_run_in_another_order_on_one_rank_are_found(width: int) -> None:
    """B05: equal shapes, which real backends mix up without a word, and unequal ones."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.units = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, width)})

        def forward(self, rank: int) -> torch.Tensor:
            order = ("a", "b") if rank == 0 else ("b", "a")
            return torch.stack([self.units[name](torch.ones(1, 4)).sum() for name in order]).sum()

    def program(rank: int) -> float:
        model = Branches()
        for unit in model.units.values():
            fully_shard(unit)
        fully_shard(model)
        return model(rank).item()

    with pytest.raises(fsdp_sim.CollectiveMismatch) as caught:
        fsdp_sim.simulate(program, 2)
    assert caught.value.finding is not None
    assert "all_gather" in caught.value.finding.message


def test_an_order_that_comes_from_a_set_is_found_at_the_first_difference() -> None:
    """B39: each rank's objects have hashes of their own, so do real processes."""

    def program(rank: int) -> None:
        sizes = (2, 3, 5) if rank == 0 else (5, 2, 3)  # as a set of tensors may be iterated
        for size in sizes:
            dist.all_reduce(torch.ones(size))

    with pytest.raises(fsdp_sim.CollectiveMismatch, match="operation 0 of group '0'"):
        fsdp_sim.simulate(program, 2)


def test_one_more_validation_step_on_one_rank_is_never_paired() -> None:
    """B40: on one group the gather of rank 1's fourth forward meets rank 0's all-reduce: a mismatch."""

    def program(rank: int) -> None:
        unit = nn.Linear(4, 4)
        fully_shard(unit, reshard_after_forward=True)
        with torch.no_grad():
            for _ in range(3 + rank):
                unit(torch.ones(1, 4))
        dist.all_reduce(torch.ones(()))

    with pytest.raises(fsdp_sim.CollectiveMismatch, match="all_gather") as caught:
        fsdp_sim.simulate(program, 2)
    assert "all_reduce" in str(caught.value)


def test_matching_works_on_traces_that_are_cut() -> None:
    """B68: other first records on each rank; numbers count in the group, not in the trace."""

    def program(rank: int) -> None:
        group = dist.new_group([0, 1, 2])
        for step in range(10):
            dist.all_reduce(torch.ones(step + 1))
            dist.all_reduce(torch.ones(2), group=group)

    ops = fsdp_sim.simulate(program, 3, trace=True).trace.ops
    cut = [op for op in ops if op.call is not None and op.call.sequence >= 3 + op.rank]
    names = ("collective_match", "liveness")
    clean = analyse(cut, make(names), 3).findings
    last = max((op for op in cut if op.rank == 2), key=lambda op: op.index)
    assert last.call is not None
    last.call = last.call._replace(dtype="float64")
    wrong = analyse(cut, make(names), 3).findings

    assert [finding.kind for finding in clean if not finding.is_notice] == []
    assert [finding.kind for finding in wrong if not finding.is_notice] == ["CollectiveMismatch"]


def test_without_the_checker_parts_that_do_not_fit_end_the_run_by_name() -> None:
    """Nothing is made up: the run cannot go on, and the error says which checker tells more."""

    def program(rank: int) -> None:
        tensor = torch.ones(2 + rank)
        dist.all_reduce(tensor)

    with pytest.raises(fsdp_sim.RunError, match="do not fit together"):
        fsdp_sim.simulate(program, 2, checkers=("races",))
