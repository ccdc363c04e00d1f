"""Schedulers: one policy each, all on decisions made by hand."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_sim.errors import ConfigError, Nondeterminism
from fsdp_sim.schedule import Deviation, Schedule
from fsdp_sim.scheduler import (
    SCHEDULERS,
    Decision,
    Exhaustive,
    Misfit,
    Pct,
    ProgramOrder,
    Recheck,
    Recorder,
    Replay,
    Scheduler,
    Uniform,
    default_rank,
    make,
)


def run(scheduler: Scheduler, ranks: int, length: int) -> list[int]:
    """Run ``ranks`` tasks of ``length`` turns each; return who took each turn."""
    left = [length] * ranks
    turns: list[int] = []
    running: int | None = None
    step = 0
    while any(left):
        options = [rank for rank in range(ranks) if left[rank]]
        chosen = options[0]
        if len(options) > 1:
            default = default_rank(running, options)
            chosen = scheduler.choose(Decision(step, "issue", running, options, default))
            step += 1
        left[chosen] -= 1
        turns.append(chosen)
        running = chosen
    return turns


def test_default_rank_is_the_running_one_else_the_next_cyclically() -> None:
    """Program order keeps a rank running for as long as it can."""
    assert default_rank(None, (2, 5)) == 2
    assert default_rank(5, (2, 5)) == 5
    assert default_rank(3, (2, 5)) == 5
    assert default_rank(6, (2, 5)) == 2


def test_program_order_runs_one_rank_to_its_end() -> None:
    """All defaults: no preemption."""
    assert run(ProgramOrder(), 3, 2) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("name", ["uniform", "pct"])
def test_a_seed_gives_one_run(name: str) -> None:
    """Chance comes from the seed and nothing else."""
    schedule = Schedule(3)

    runs = [run(make(name, seed=7, schedule=schedule), 3, 5) for _ in range(2)]

    assert runs[0] == runs[1]


def test_uniform_takes_every_order() -> None:
    """Two ranks of two turns have six orders and a few seeds meet them all."""
    orders = {tuple(run(Uniform(seed=seed), 2, 2)) for seed in range(60)}

    assert len(orders) == 6


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 8))
def test_the_recorded_schedule_replays_the_run(seed: int, ranks: int, length: int) -> None:
    """Whatever policy chose, its deviations alone lead to the same run."""
    recorder = Recorder(Uniform(seed=seed), lambda: None)
    turns = run(recorder, ranks, length)
    replay = Replay(recorder.schedule(ranks), strict=True)

    assert run(replay, ranks, length) == turns
    replay.end()
    assert replay.misfit is None


@pytest.mark.parametrize(
    ("decision", "choice", "words"),
    [
        (
            Decision(17, "issue", 0, (0, 2), 0),
            2,
            "step 17: rank 2 goes on while rank 0 stands at t.py:5 (program order: rank 0)",
        ),
        (
            Decision(0, "start", None, (0, 1), 0),
            1,
            "step 0: rank 1 goes on (program order: rank 0)",
        ),
        (
            Decision(2, "query", 1, (0, 1), 0),
            1,
            "step 2: query() on rank 1 at t.py:5 says that the work is done (in program order it does not)",
        ),
        (
            Decision(3, "query", 1, (0, 1), 0),
            0,
            None,
        ),
    ],
)
def test_a_deviation_is_kept_in_words(decision: Decision, choice: int, words: str | None) -> None:
    """What ran, where the running rank stood, what program order does; the default has no words."""

    class Chosen:
        def choose(self, _: Decision) -> int:
            return choice

    recorder = Recorder(Chosen(), lambda: "t.py:5")
    recorder.choose(decision)

    assert recorder.described == ([] if words is None else [words])


def test_the_recorder_refuses_what_is_no_option() -> None:
    """A scheduler of the caller's own making cannot lead the engine astray."""

    class Wrong:
        def choose(self, decision: Decision) -> int:
            return 6 + decision.step

    with pytest.raises(ValueError, match=r"one of \[0, 1\] at step 3, got 9 from Wrong$"):
        Recorder(Wrong(), lambda: None).choose(Decision(3, "issue", 0, (0, 1), 0))


def test_pct_makes_one_preemption_per_change_point() -> None:
    """Depth 1 has no change point, so ranks run to their ends in order of priority."""
    turns = run(Pct(seed=3, ranks=3, steps=6, depth=1), 3, 3)

    assert sorted(turns[::3]) == [0, 1, 2]
    assert all(turns[i] == turns[i + 1] for i in (0, 1, 3, 4, 6, 7))


def test_pct_finds_an_order_that_needs_one_preemption() -> None:
    """Rank 0's turns apart by one of rank 1's: depth 2 finds it within few seeds."""
    found = [run(Pct(seed=seed, ranks=2, steps=3, depth=2), 2, 2) for seed in range(40)]

    assert [0, 1, 1, 0] in found


def test_pct_puts_a_polling_rank_behind_the_others() -> None:
    """Else the rank it waits for would never run."""
    pct = Pct(seed=0, ranks=2, steps=10, depth=1)
    first = pct.choose(Decision(0, "issue", None, (0, 1), 0))

    assert pct.choose(Decision(1, "poll", first, (0, 1), first)) == 1 - first


def test_replay_skips_a_deviation_that_does_not_fit() -> None:
    """Shrinking deletes steps: what no longer fits is dropped, the rest is applied."""
    replay = Replay(Schedule(3, (), (Deviation(0, 2), Deviation(1, 1))), strict=False)

    assert replay.choose(Decision(0, "issue", 0, (0, 1), 0)) == 0
    assert replay.choose(Decision(1, "issue", 0, (0, 1), 0)) == 1
    assert replay.misfit == Misfit(0, 2, (0, 1))


def test_strict_replay_goes_on_in_program_order_at_the_first_misfit() -> None:
    """Behind a misfit the other deviations mean nothing."""
    replay = Replay(Schedule(3, (), (Deviation(0, 2), Deviation(1, 1))), strict=True)

    assert replay.choose(Decision(0, "issue", 0, (0, 1), 0)) == 0
    assert replay.choose(Decision(1, "issue", 0, (0, 1), 0)) == 0
    replay.end()
    assert str(replay.misfit) == "step 0 wants 2, but the program offers [0, 1]"


def test_a_deviation_beyond_the_end_is_a_misfit() -> None:
    """A program that became shorter no longer fits its schedule."""
    replay = Replay(Schedule(2, (), (Deviation(5, 1),)), strict=True)

    replay.end()

    assert str(replay.misfit) == "step 5 wants 1, but the run ended before it"


@pytest.mark.parametrize(("bound", "count"), [(0, 1), (1, 3), (2, 5), (9, 6)])
def test_exhaustive_meets_every_schedule_within_its_bound_once(bound: int, count: int) -> None:
    """Two ranks of two turns: of six orders, one has no deviation, two one, two two, one three."""
    exhaustive = Exhaustive(bound=bound)
    orders = [tuple(run(exhaustive, 2, 2))]
    while exhaustive.next():
        orders.append(tuple(run(exhaustive, 2, 2)))

    assert orders[0] == (0, 0, 1, 1)
    assert len(orders) == len(set(orders)) == count


def test_exhaustive_notices_a_program_that_is_not_deterministic() -> None:
    """Repeated choices must lead to the same options."""
    exhaustive = Exhaustive()
    exhaustive.choose(Decision(0, "issue", 0, (0, 1), 0))
    exhaustive.next()

    with pytest.raises(Nondeterminism, match=r"got \[0, 2\] at step 0 and \[0, 1\] there"):
        exhaustive.choose(Decision(0, "issue", 0, (0, 2), 0))


@pytest.mark.parametrize(
    ("second", "named"),
    [
        ([(0, 1), (0, 1)], None),
        ([(0, 1), (0, 2)], "step 1: the first run met 'issue' with options [0, 1]"),
        ([(0, 1)], "the second the end of the run"),
        ([(0, 1), (0, 1), (0, 1)], "step 2: the first run met the end of the run"),
    ],
)
def test_recheck_names_the_first_step_that_differs(
    second: list[tuple[int, int]], named: str | None
) -> None:
    """A program whose second run is offered something else is not deterministic."""
    recheck = Recheck(Uniform(seed=1))
    for step in range(2):
        recheck.choose(Decision(step, "issue", 0, (0, 1), 0))
    recheck.again()
    for step, options in enumerate(second):
        recheck.choose(Decision(step, "issue", 0, options, 0))
    recheck.end()

    assert recheck.difference is None if named is None else named in str(recheck.difference)


def test_an_unknown_scheduler_is_refused_with_the_known_ones() -> None:
    """The error lists what there is."""
    known = "program_order, uniform, pct, exhaustive, replay"
    with pytest.raises(ConfigError, match=f"^scheduler must be one of {known}, got 'fair'$"):
        make("fair", seed=0, schedule=Schedule(2))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_chooses_an_option(name: str) -> None:
    """A policy never leads out of what is offered."""
    scheduler = make(name, seed=1, schedule=Schedule(4))
    decisions: list[Callable[[int], Decision]] = [
        lambda step: Decision(step, "issue", 2, (0, 2, 3), 2),
        lambda step: Decision(step, "query", 2, (0, 1), 0),
    ]

    for step in range(20):
        decision = decisions[step % 2](step)
        assert scheduler.choose(decision) in decision.options
