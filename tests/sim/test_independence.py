"""Exhaustive search, reduced: fewer runs, and everything that can happen happens in them all the same."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import fsdp_sim
from fsdp_sim.program import LayerSpec, ModuleSpec, ProgramSpec, UnitSpec
from fsdp_sim.program.parity import run_rank
from fsdp_sim.scheduler import Decision, Exhaustive, Point
from fsdp_sim.scheduler.independence import Independence

Act = Literal["ask", "set", "add", "check"]
Outcomes = dict[tuple[str, str], None]
PROGRAM = ProgramSpec(ModuleSpec(LayerSpec(), UnitSpec()), width=1)


def outcomes(program: Callable[..., Any], *args: Any, reduced: bool) -> tuple[Outcomes, int]:
    """Return what two ranks can end with, results or a finding and the order digest, and the runs it took."""
    exhaustive, seen = Exhaustive(reduced=reduced), Outcomes()
    runs, more = 0, True
    while more:
        report = fsdp_sim.simulate(program, 2, args=args, scheduler=exhaustive, strict=False)
        ended = [finding.kind for finding in report.findings] or report.results
        seen[str(ended), report.trace.order_digest] = None
        runs += 1
        more = exhaustive.next()
    return seen, runs


def sums(rank: int) -> list[float]:
    """Meet in two collectives."""
    tensor = torch.ones(2)
    for _ in range(2):
        dist.all_reduce(tensor)
    return tensor.tolist()


def asks(rank: int) -> bool | None:
    """Ask on one rank whether a reduction is done, and do something else if it is."""
    work = dist.all_reduce(torch.ones(2), async_op=True)
    assert work is not None
    done = work.is_completed() if rank == 0 else None
    if done:
        torch.ones(2).add_(1)
    work.wait()
    return done


def stores(rank: int) -> bytes:
    """Write one key on both ranks, and read it."""
    store = dist.distributed_c10d._get_default_store()
    store.set("key", str(rank))
    return store.get("key")


def meets_apart(rank: int) -> None:
    """Call other collectives on the two ranks."""
    tensor = torch.ones(2)
    if rank == 0:
        dist.all_reduce(tensor)
    else:
        dist.broadcast(tensor, 0)


def acts(rank: int, plan: Sequence[Sequence[Act]]) -> list[Any]:
    """Do what the plan says for this rank while a reduction of both is under way."""
    store = dist.distributed_c10d._get_default_store()
    work = dist.all_reduce(torch.ones(2), async_op=True)
    assert work is not None
    does: dict[Act, Callable[[], Any]] = {
        "ask": work.is_completed,
        "set": lambda: store.set("key", str(rank)),
        "add": lambda: store.add("counter", 1 + rank),
        "check": lambda: store.check(["key"]),
    }
    done = [does[act]() for act in plan[rank]]
    work.wait()
    return done


@pytest.mark.parametrize("program", [sums, meets_apart])
def test_collectives_alone_are_run_once(program: Callable[..., Any]) -> None:
    """They meet in any order, or in none."""
    every, runs = outcomes(program, reduced=False)

    assert outcomes(program, reduced=True) == (every, 1)
    assert runs > 1


def test_a_sharded_program_that_polls_nothing_is_run_once() -> None:
    """The order of its hosts cannot matter."""
    every, runs = outcomes(run_rank, PROGRAM, reduced=False)

    assert outcomes(run_rank, PROGRAM, reduced=True)[1] == 1
    assert {digest for _, digest in every} == {
        digest for _, digest in outcomes(run_rank, PROGRAM, reduced=True)[0]
    }
    assert runs > 1


@pytest.mark.parametrize("program", [asks, stores])
def test_what_another_rank_notices_is_tried_in_every_order(program: Callable[..., Any]) -> None:
    """All outcomes in fewer runs."""
    every, runs = outcomes(program, reduced=False)
    found, fewer = outcomes(program, reduced=True)

    assert len(every) > 1
    assert found == every
    assert fewer < runs


@settings(max_examples=12)
@given(st.lists(st.lists(st.sampled_from(get_args(Act)), max_size=2), min_size=2, max_size=2))
def test_a_reduced_search_loses_no_outcome(plan: list[list[Act]]) -> None:
    """Of generated programs that ask, write and read."""
    every, runs = outcomes(acts, plan, reduced=False)
    found, fewer = outcomes(acts, plan, reduced=True)

    assert set(found) == set(every)
    assert fewer <= runs


def test_a_point_is_noticed_once_somebody_is_seen_who_could_notice_it() -> None:
    """Others' polls notice a collective, and others' use of a key an operation on it."""
    issue, known = Point(0, "issue"), Independence()
    known.learn(Point(0, "poll"))
    known.learn(Point(0, "store", "a"))
    before = known.is_noticed(issue), known.is_noticed(Point(0, "store", "a"))
    known.learn(Point(1, "poll"))
    known.learn(Point(1, "store", "a"))

    assert before == (False, False)
    assert known.is_noticed(issue)
    assert known.is_noticed(Point(0, "store", "a"))
    assert not known.is_noticed(Point(0, "store", "b"))
    assert known.is_noticed(Point(1, "store"))


def test_what_was_left_out_is_made_up_for_when_a_later_run_polls() -> None:
    """That rank 1 polls is seen behind the first decision's other option, when the second's was left out."""
    exhaustive = Exhaustive(reduced=True)

    def run() -> tuple[int, int]:
        for rank in (0, 1):
            exhaustive.reached(Point(rank, "store", "key"))
        stored = exhaustive.choose(Decision(0, "store", 0, (0, 1), 0))
        if stored == 1:
            exhaustive.reached(Point(1, "poll"))
        exhaustive.reached(Point(0, "issue"))
        return stored, exhaustive.choose(Decision(1, "issue", 0, (0, 1), 0))

    runs = [run()]
    while exhaustive.next():
        runs.append(run())

    assert runs == [(0, 0), (1, 0), (1, 1), (0, 0), (0, 1), (1, 0), (1, 1)]
