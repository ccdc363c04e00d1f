"""Faults: each thing that can go wrong, where it was asked for and nowhere else."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import fsdp_sim
from fsdp_sim.engine import faults
from fsdp_sim.engine.faults import Rule
from fsdp_sim.errors import InjectedCrash, InjectedFault


def sums(rank: int) -> list[float]:
    """All-reduce three times and return the sums."""
    values = []
    for step in range(3):
        x = torch.full((2,), float(rank + step))
        dist.all_reduce(x)
        values.append(x[0].item())
    return values


def run(program: Any, world_size: int, *asked: str | Rule, **options: Any) -> Any:
    """Return the report of a run with faults, whatever is found."""
    return fsdp_sim.simulate(program, world_size, faults=asked, strict=False, **options)


# ---------------------------------------------------------------------- how they are written


@pytest.mark.parametrize(
    "text",
    ["crash:issue", "crash:issue@rank=1,at=3", "oom:alloc@above=4096", "drop:issue@at=1,name=send"],
)
def test_a_fault_is_written_as_it_is_read(text: str) -> None:
    """Rules and their text are one to one."""
    assert str(faults.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("crash", r"a fault must be written 'action:site@key=value', got 'crash'"),
        (
            "drop:store",
            r"a fault at site 'store' must be one of fail, crash, hang, delay, got 'drop'",
        ),
        (
            "crash:issue@when=3",
            r"a fault takes rank=, at=, name= and above=, got 'when=3' in 'crash:issue@when=3'",
        ),
        ("crash:issue@at=0", r"at= counts visits from 1, got 0"),
        ("crash:alloc@above=5", r"only 'oom' takes above=, got 'crash'"),
    ],
)
def test_what_is_no_fault_is_refused(text: str, message: str) -> None:
    """The error says what was wrong; nothing is run."""
    with pytest.raises(fsdp_sim.ConfigError) as caught:
        fsdp_sim.simulate(sums, 2, faults=(text,))

    assert str(caught.value) == message


def test_the_line_of_a_run_holds_its_faults() -> None:
    """The schedule line alone replays a run with faults."""
    report = run(sums, 2, "corrupt:issue@rank=1,at=2")

    again = fsdp_sim.replay(sums, report.schedule)

    assert report.schedule == "v1;w2;corrupt:issue@rank=1,at=2"
    assert again.results == report.results
    assert again.trace.digest == report.trace.digest


def test_the_report_counts_what_came_up() -> None:
    """A fault that was asked for and never came up shows as zero."""
    report = run(sums, 2, "delay:issue@rank=0,at=1", "delay:issue@rank=0,at=99")

    assert report.faults == {"delay:issue@rank=0,at=1": 1, "delay:issue@rank=0,at=99": 0}


def test_the_first_rule_with_a_verdict_wins() -> None:
    """Both concern the visit; the one that is named first has its way."""
    report = run(sums, 2, "delay:issue@rank=1,at=1", "crash:issue@rank=1,at=1")

    assert report.errors == {}
    assert list(report.faults.values()) == [1, 0]


# ---------------------------------------------------------------------- ranks


def test_a_crash_ends_a_rank_and_the_others_wait_for_it() -> None:
    """The deadlock names the crash; the crash itself is not raised as the program's error."""
    with pytest.raises(fsdp_sim.Deadlock, match=r"rank 1 ended with InjectedCrash") as caught:
        fsdp_sim.simulate(sums, 3, faults=("crash:issue@rank=1,at=2",))

    assert list(caught.value.report.errors) == [1]


def test_a_crash_cannot_be_handled_by_the_program() -> None:
    """``except Exception`` does not catch it."""

    def program(rank: int) -> str:
        try:
            dist.all_reduce(torch.ones(1))
        except Exception:
            return "handled"
        return "done"

    report = run(program, 1, "crash:issue@at=1")

    assert report.results == [None]
    assert isinstance(report.errors[0], InjectedCrash)


def test_a_hang_is_reported_at_once() -> None:
    """Nobody waits for a timeout: the others' deadlock says who hangs where."""
    with pytest.raises(fsdp_sim.Deadlock, match=r"rank 2 hangs at issue all_reduce"):
        fsdp_sim.simulate(sums, 3, faults=("hang:issue@rank=2,at=3",))


def test_a_hang_of_all_ranks_ends_the_run() -> None:
    """Also where nobody is left to wait."""
    with pytest.raises(fsdp_sim.SimulationError, match=r"rank 0 hangs at issue all_reduce"):
        fsdp_sim.simulate(sums, 1, faults=("hang:issue@at=1",))


def test_a_delayed_rank_comes_last() -> None:
    """It goes on when nobody else can, and nothing else changes."""
    order: list[int] = []

    def program(rank: int) -> None:
        dist.all_reduce(torch.ones(1))
        order.append(rank)

    run(program, 3, "delay:issue@rank=0,at=1")

    assert order == [1, 2, 0]


# ---------------------------------------------------------------------- messages


def test_a_dropped_collective_is_missed_by_the_others() -> None:
    """The rank goes on as if it had taken part; its peers are one operation ahead."""
    report = run(sums, 2, "drop:issue@rank=1,at=3")

    assert [finding.kind for finding in report.findings] == ["Deadlock"]


def test_a_duplicated_collective_meets_the_next_one() -> None:
    """One rank issues twice what the others issue once."""

    def program(rank: int) -> None:
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(3))

    report = run(program, 2, "duplicate:issue@rank=0,at=1")

    assert [finding.kind for finding in report.findings] == ["CollectiveMismatch"]


def test_a_corrupted_payload_changes_values_and_nothing_else() -> None:
    """The result is wrong on every rank, and no ordering is."""
    clean = fsdp_sim.simulate(sums, 2)
    report = run(sums, 2, "corrupt:issue@rank=1,at=2")

    assert report.findings == ()
    assert report.results[0] == report.results[1]
    assert [a == b for a, b in zip(report.results[0], clean.results[0], strict=True)] == [
        True,
        False,
        True,
    ]


def test_a_fault_may_name_the_operation() -> None:
    """Only sends are counted."""

    def program(rank: int) -> float:
        x = torch.full((1,), float(rank))
        dist.all_reduce(x)
        if rank == 0:
            dist.send(torch.full((1,), 5.0), 1)
        else:
            dist.recv(x, 0)
        return x.item()

    report = run(program, 2, "corrupt:issue@name=send,at=1")

    assert report.results[0] == 1.0
    assert report.results[1] != 5.0


# ---------------------------------------------------------------------- memory and store


def test_memory_runs_out_at_the_given_allocation() -> None:
    """As the allocator's own error, which the program may handle."""

    def program(rank: int) -> list[str]:
        seen = []
        for _ in range(3):
            try:
                torch.zeros(4)
                seen.append("got")
            except torch.OutOfMemoryError:
                seen.append("out")
        return seen

    assert run(program, 1, "oom:alloc@at=2").results == [["got", "out", "got"]]


def test_memory_runs_out_above_a_limit() -> None:
    """What was freed counts no more; the limit is each rank's own."""

    def program(rank: int) -> list[int]:
        kept, refused = [], 0
        for _ in range(4):
            try:
                torch.zeros(8)
                kept.append(torch.zeros(8))
            except torch.OutOfMemoryError:
                refused += 1
        return [len(kept), refused]

    assert run(program, 2, "oom:alloc@above=100").results == [[3, 1], [3, 1]]


def test_the_store_may_fail() -> None:
    """The operation raises what a program can handle."""

    def program(rank: int) -> str:
        store = dist.distributed_c10d._get_default_store()
        try:
            store.set("key", "value")
        except InjectedFault as error:
            return str(error)
        return "set"

    report = run(program, 1, Rule("fail", "store", at=1))

    assert report.results == ["store failed on rank 0"]


def test_a_checkpoint_write_may_be_torn(tmp_path: Path) -> None:
    """The file is half there and the rank is gone; loading it does not succeed."""

    def save(rank: int) -> None:
        dcp.save({"x": torch.arange(64.0)}, checkpoint_id=tmp_path)

    def load(rank: int) -> None:
        dcp.load({"x": torch.zeros(64)}, checkpoint_id=tmp_path)

    report = run(save, 1, "torn:write@at=1")

    assert str(report.errors[0]) == "rank 0 crashed while it wrote __0_0.distcp"
    with pytest.raises(CheckpointException):
        fsdp_sim.simulate(load, 1)


# ---------------------------------------------------------------------- sites and schedules

SITE = faults.site("tests.recovery")


def recover(rank: int) -> str:
    """Work with a site of its own."""
    try:
        if SITE.is_armed:
            SITE.visit()
    except InjectedFault:
        return "recovered"
    return "fine"


def test_a_runtime_may_have_sites_of_its_own() -> None:
    """Armed in a run that names it, on the rank that is meant; free in all others."""
    report = run(recover, 2, "fail:tests.recovery@rank=1,at=1")

    assert report.results == ["fine", "recovered"]
    assert not SITE.is_armed
    assert recover(0) == "fine"


def test_a_site_that_is_made_during_a_run_is_armed_in_it() -> None:
    """A script makes its sites when it is run; they are disarmed with the others."""
    made: list[faults.Site] = []

    def program(rank: int) -> None:
        made.append(faults.site("tests.late"))
        if made[-1].is_armed:
            made[-1].visit()

    with pytest.raises(InjectedFault, match=r"^tests\.late failed on rank 0"):
        fsdp_sim.simulate(program, 1, faults=["fail:tests.late@at=1"])
    assert not made[0].is_armed


def test_a_fault_at_a_site_that_nobody_has_made_is_refused() -> None:
    """A misspelled name must not look like a fault that was survived."""
    message = (
        r"a fault's site must be one of issue, alloc, store, write, or made by faults\.site in the "
        r"program, got 'tests\.recovry' in 'fail:tests\.recovry@at=1'"
    )
    with pytest.raises(fsdp_sim.ConfigError, match=f"^{message}$"):
        fsdp_sim.simulate(recover, 2, faults=["fail:tests.recovry@at=1"])


def test_a_fault_on_a_rank_that_is_not_there_is_refused() -> None:
    """It would never come up."""
    message = r"a fault's rank must be below the world size 2, got 'crash:issue@rank=2,at=1'"
    with pytest.raises(fsdp_sim.ConfigError, match=f"^{message}$"):
        fsdp_sim.simulate(recover, 2, faults=["crash:issue@rank=2,at=1"])


def test_a_fault_that_never_came_up_was_never_exercised() -> None:
    """A search says so, as of a probe."""
    rules = ("delay:tests.recovery@at=1", "delay:tests.recovery@at=2")
    search = fsdp_sim.explore(recover, 2, schedules=3, faults=rules)

    assert search.statistics.never == (f"fault {rules[1]}",)


def test_a_site_may_not_be_called_as_one_of_the_simulators() -> None:
    """Its own sites have their own meaning."""
    with pytest.raises(fsdp_sim.ConfigError, match=r"^a site must not be called as one of issue"):
        faults.site("issue")


def test_a_fault_without_a_place_is_the_schedules_choice() -> None:
    """It does not happen by default; a deviation makes it happen, once; exploration finds it."""
    rule = "fail:tests.recovery"

    by_default = run(recover, 2, rule)
    chosen = fsdp_sim.simulate(recover, 2, schedule=f"v1;w2;{rule};2>1", strict=False)

    assert by_default.results == ["fine", "fine"]
    assert sorted(chosen.results) == ["fine", "recovered"]
    assert chosen.schedule.startswith(f"v1;w2;{rule};")
