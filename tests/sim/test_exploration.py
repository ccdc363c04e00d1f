"""Exploration: what is tried, what is counted, and what was never exercised."""

import pytest
import torch
import torch.distributed as dist

import fsdp_sim
from fsdp_sim.statistics import Statistics


def asks_twice(rank: int) -> None:
    """Ask twice whether an event is done, on rank 0: four ways through the program."""
    work = torch.ones(1)  # which the device may not have done when it is asked
    event = torch.cpu.Event()
    event.record()
    if rank == 0:
        answers = [event.query(), event.query()]
        fsdp_sim.sometimes("asked in vain", not any(answers))
        fsdp_sim.sometimes("done at the second time", answers == [False, True])
        fsdp_sim.sometimes("undone again", answers == [True, False])
    dist.all_reduce(work)


def asks_once(_: int) -> bool:
    """Ask once, on the only rank: two ways."""
    work = torch.ones(1)
    event = torch.cpu.Event()
    event.record()
    return event.query() and work.is_contiguous()


def test_a_search_names_what_it_never_exercised() -> None:
    """An event that is done stays done, so one probe can never hold."""
    search = fsdp_sim.explore(asks_twice, 2, schedules=40, scheduler="uniform")

    assert search.probes == {
        "asked in vain": True,
        "done at the second time": True,
        "undone again": False,
    }
    assert search.statistics.never == ("undone again",)
    assert search.summary().endswith(", 2 of 3 probes held\nnever exercised: undone again")


def test_one_run_reports_the_probes_that_it_met() -> None:
    """In program order the event is never done."""
    report = fsdp_sim.simulate(asks_twice, 2)

    assert report.probes == {
        "asked in vain": True,
        "done at the second time": False,
        "undone again": False,
    }


def test_a_probe_is_no_op() -> None:
    """The trace of a program is the same with it and without it."""

    def program(probes: int) -> None:
        tensor = torch.ones(2)
        for number in range(probes):
            fsdp_sim.sometimes(f"probe {number}", condition=True)
        dist.all_reduce(tensor)

    with_it, without = (fsdp_sim.simulate(lambda _, n=n: program(n), 2) for n in (3, 0))

    assert with_it.trace.digest == without.trace.digest


def test_a_probe_outside_a_world_does_nothing() -> None:
    """It does not even look at its condition."""
    fsdp_sim.sometimes("never looked at", torch.ones(2))  # type: ignore[arg-type]


def test_a_probe_takes_a_bool_alone() -> None:
    """To read a tensor would be a wait of the host's."""
    message = r"sometimes\('all zero'\): condition must be a bool, got Tensor"
    with pytest.raises(fsdp_sim.ConfigError, match=message):
        fsdp_sim.simulate(lambda _: fsdp_sim.sometimes("all zero", torch.zeros(1) == 0), 1)  # type: ignore[arg-type]


def test_an_exhaustive_search_runs_each_schedule_once() -> None:
    """One question has two answers, and then nothing is left to try."""
    search = fsdp_sim.explore(asks_once, 1, scheduler="exhaustive")

    assert (search.schedules, search.orderings, search.is_exhausted) == (2, 2, True)


def test_a_search_that_is_cut_short_is_not_exhausted() -> None:
    """What was not tried may fail."""
    search = fsdp_sim.explore(asks_once, 1, schedules=1, scheduler="exhaustive")

    assert not search.is_exhausted


def test_a_portfolio_draws_in_several_ways() -> None:
    """Its runs are those of pct and of uniform, in turn, from the same seeds."""
    drawn = {
        name: fsdp_sim.explore(asks_twice, 2, schedules=5, scheduler=name).decisions
        for name in ("pct", "uniform", "portfolio")
    }

    assert drawn["portfolio"][1::2] == drawn["pct"][1::2]
    assert drawn["portfolio"][2::2] == drawn["uniform"][2::2]


def test_statistics_of_workers_add_up() -> None:
    """A probe has held if it has held anywhere; nothing run changes nothing."""
    one = Statistics(2, 2, 3, 5, 8, 0, {"a": True, "b": False})
    other = Statistics(4, 1, 2, 4, 12, 1, {"b": False, "c": True})

    assert one + other == Statistics(6, 3, 2, 5, 20, 1, {"a": True, "b": False, "c": True})
    assert Statistics() + one == one + Statistics() == one


def test_statistics_read_as_two_lines() -> None:
    """Counts, then what never happened."""
    statistics = Statistics(4, 3, 2, 8, 18, 1, {"b": False, "a": False, "c": True})

    assert str(statistics) == (
        "4 schedules, 3 distinct orderings, decisions min 2 mean 4.5 max 8, 25% at the step limit, "
        "1 of 3 probes held\nnever exercised: a, b"
    )


def test_an_option_that_nobody_knows_is_refused_before_anything_runs() -> None:
    """What tests call ``runs`` is ``schedules`` here, and the error lists what there is."""
    ran: list[int] = []

    with pytest.raises(
        fsdp_sim.ConfigError,
        match=r"^explore takes schedules, scheduler, .*step_limit.*, got runs$",
    ):
        fsdp_sim.explore(ran.append, 2, runs=3)

    assert ran == []
