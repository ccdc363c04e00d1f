"""replay and explore: the smallest failing schedule, followed again or refused."""

from typing import Any

import pytest

import fsdp_sim
from tests.sim.programs import order_by_query, sum_of_ranks


def test_an_order_that_depends_on_a_query_is_clean_in_program_order() -> None:
    """On the default schedule the query says "not done" and both ranks agree."""
    assert fsdp_sim.simulate(order_by_query, 2).findings == ()


def test_exploring_finds_an_order_that_depends_on_a_query() -> None:
    """The failure carries a schedule with at least one deviation and the statistics of the search."""
    with pytest.raises(fsdp_sim.CollectiveMismatch) as caught:
        fsdp_sim.explore(order_by_query, 2)

    search = caught.value.exploration
    assert ">" in search.schedule
    assert search.schedules <= 200
    assert len(search.decisions) == search.schedules


@pytest.mark.parametrize("seed", [0, 5, 9, 11])
@pytest.mark.parametrize("scheduler", ["pct", "uniform"])
def test_a_failure_that_needs_one_deviation_is_shown_with_one(scheduler: str, seed: int) -> None:
    """Even where what was found needs several, none of which can be left out."""
    search = fsdp_sim.explore(order_by_query, 3, scheduler=scheduler, seed=seed, strict=False)

    assert search.schedule is not None
    assert search.schedule.count(">") == 1


def test_a_replayed_schedule_gives_the_same_failure_and_digest() -> None:
    """Following the line of a failure leads to the same finding, op for op."""
    with pytest.raises(fsdp_sim.CollectiveMismatch) as first:
        fsdp_sim.explore(order_by_query, 2)
    line = first.value.schedule
    assert line is not None

    with pytest.raises(fsdp_sim.CollectiveMismatch) as second:
        fsdp_sim.replay(order_by_query, line)

    assert second.value.schedule == line
    assert second.value.trace.digest == first.value.trace.digest


def test_a_clean_program_is_explored_to_the_end() -> None:
    """All schedules are run and counted."""
    search = fsdp_sim.explore(sum_of_ranks, 3, schedules=12)

    assert search.failure is None
    assert search.schedules == 12
    assert 1 < search.orderings <= 12


def test_a_schedule_that_no_longer_fits_diverges_and_never_passes() -> None:
    """The error names the step, what was wanted, and that clean afterwards proves nothing."""
    with pytest.raises(fsdp_sim.Diverged) as caught:
        fsdp_sim.replay(sum_of_ranks, "v1;w2;5000>1")

    assert str(caught.value) == (
        "step 5000 wants 1, but the run ended before it; "
        "in program order from there the run was clean, which proves nothing"
    )


def test_simulate_skips_a_deviation_that_does_not_fit() -> None:
    """The effective schedule is the one that is reported."""
    report = fsdp_sim.simulate(sum_of_ranks, 2, schedule="v1;w2;5000>1")

    assert report.schedule == "v1;w2"


@pytest.mark.parametrize("scheduler", ["program_order", "uniform", "pct"])
def test_one_seed_gives_one_run(scheduler: str) -> None:
    """The same program under the same seed has the same schedule and the same digest."""
    runs = [fsdp_sim.simulate(sum_of_ranks, 3, scheduler=scheduler, seed=7) for _ in range(2)]

    assert runs[0].schedule == runs[1].schedule
    assert runs[0].trace.digest == runs[1].trace.digest


@pytest.mark.parametrize("line", [5, None, "", "v1", "v1;w0", "v9;w2", "v1;w2;3>1;3>1", "v1;w2;x"])
def test_a_malformed_line_is_refused(line: Any) -> None:
    """Nothing is run."""
    with pytest.raises(fsdp_sim.ConfigError):
        fsdp_sim.replay(sum_of_ranks, line)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedules": 0}, "schedules must be a positive integer, got 0"),
        (
            {"scheduler": "program_order"},
            "explore's scheduler must be one of pct, uniform, portfolio, exhaustive",
        ),
    ],
)
def test_a_search_with_wrong_arguments_is_refused(options: dict[str, object], message: str) -> None:
    """The error says what must hold."""
    with pytest.raises(fsdp_sim.ConfigError, match=message):
        fsdp_sim.explore(sum_of_ranks, 2, **options)  # type: ignore[arg-type]
