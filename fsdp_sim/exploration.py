"""Exploration: run many schedules, and give the first failure with the fewest deviations that keep it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any, NamedTuple

from fsdp_sim.arguments import check_integer, check_positive
from fsdp_sim.errors import ConfigError, SimulationError
from fsdp_sim.schedule import Deviation, Schedule
from fsdp_sim.scheduler import Decision, Exhaustive, Scheduler
from fsdp_sim.simulation import Report
from fsdp_sim.statistics import Statistics, joined
from fsdp_sim.verbs import check_options, simulate

PORTFOLIO = ("pct", "uniform")
SEARCHES = (*PORTFOLIO, "portfolio", "exhaustive")
SCHEDULES_DEFAULT = 200
RECHECK_EVERY = 20
"""One run in so many is made twice and compared, to notice a program that keeps state."""
MINIMISE_RUNS_MAX = 300
"""Runs spent on making a failing schedule smaller."""
SINGLES_MAX = 100
"""Schedules of one deviation that are tried where chunks cannot be dropped from several."""

Outcome = Report | BaseException


@dataclass
class Exploration:
    """What a search did.

    Attributes:
        schedules: how many were run.
        orderings: how many of them differed in the choices made.
        decisions: of each run.
        stopped: how many reached the step limit.
        probes: by name, whether it has held in any of them.
        is_exhausted: no other schedule is left of those that were to be tried.
        first: report of the run in program order, or None if it failed.
        failure: the first error found, with the fewest deviations that keep it, or None.
        schedule: that failure's schedule line.
        shrunk_from: deviations of the schedule that failed first.
        shrink_runs: runs spent on making it smaller.
    """

    schedules: int = 0
    orderings: int = 0
    decisions: list[int] = field(default_factory=list)
    stopped: int = 0
    probes: dict[str, bool] = field(default_factory=dict)
    is_exhausted: bool = False
    first: Report | None = None
    failure: BaseException | None = None
    schedule: str | None = None
    shrunk_from: int = 0
    shrink_runs: int = 0
    _seen: dict[str, None] = field(default_factory=dict, repr=False)

    def note(self, outcome: Outcome, schedule: Schedule) -> None:
        """Count one more run."""
        report = _report_of(outcome)
        if self.schedules == 0 and isinstance(outcome, Report):
            self.first = outcome
        self.schedules += 1
        self._seen[str(schedule)] = None
        self.orderings = len(self._seen)
        self.decisions.append(0 if report is None else report.decisions)
        self.stopped += type(outcome).__name__ == "StepLimit"
        self.probes = joined(self.probes, {} if report is None else report.probes)

    @property
    def statistics(self) -> Statistics:
        """What was done, in a form that can be added to that of other searches."""
        counts = self.decisions or [0]
        return Statistics(
            self.schedules,
            self.orderings,
            min(counts),
            max(counts),
            sum(counts),
            self.stopped,
            self.probes,
        )

    def summary(self) -> str:
        """Return one line of statistics, and one for what was never exercised."""
        return str(self.statistics)


def explore(
    fn: Callable[..., Any],
    world_size: int = 4,
    *,
    schedules: int = SCHEDULES_DEFAULT,
    scheduler: str = "pct",
    seed: int = 0,
    strict: bool = True,
    on_schedule: Callable[[int], bool | None] | None = None,
    **options: Any,
) -> Exploration:
    """Run ``fn`` in program order, then under ``schedules - 1`` others, up to the first failure.

    Schedule k is drawn from seed ``seed + k``, so a search can be split over workers.  A failing one is
    re-expressed as deviations from program order and reduced to the fewest that keep the failure.

    Args:
        fn: one rank's program, called as ``fn(rank, *args)``; run many times, so it must not keep state.
        world_size: number of ranks.
        schedules: how many to run at most.
        scheduler: "pct", "uniform", "portfolio" (both in turn), or "exhaustive" (every schedule of at most
            two deviations whose order can matter, one after the other).
        seed: of the first schedule.
        strict: raise the failure, with ``.exploration`` attached; otherwise return it.
        on_schedule: called with the number of schedules run, for a progress bar or a limit of time;
            False ends the search.
        options: of ``simulate``.

    Raises:
        ConfigError: an argument is out of range; nothing has been run.
        Exception: ``strict`` and a schedule failed: what it raised, with the smallest schedule found.
    """
    _check(schedules, seed, scheduler)
    own = ("schedules", "scheduler", "seed", "strict", "on_schedule")
    check_options(options, "explore", own)
    options.pop("strict", None)
    search = Exploration()
    failed: tuple[Schedule, BaseException] | None = None
    for number, chooser in zip(range(schedules), _schedulers(scheduler), strict=False):
        outcome, schedule = _attempt(
            fn,
            world_size,
            options,
            scheduler=chooser,
            seed=seed + number,
            steps=_steps(search),
            recheck=number % RECHECK_EVERY == RECHECK_EVERY - 1,
        )
        search.note(outcome, schedule)
        if isinstance(outcome, BaseException):
            failed = (schedule, outcome)
            break
        if on_schedule is not None and on_schedule(search.schedules) is False:
            break
    else:
        search.is_exhausted = search.schedules < schedules
    if failed is not None:
        _minimise(fn, world_size, options, search, *failed)
        if strict:
            assert search.failure is not None
            search.failure.exploration = search  # type: ignore[attr-defined]
            raise search.failure
    return search


def _schedulers(name: str) -> Iterator[str | Scheduler]:
    """Yield what chooses in each run; the first one is always in program order."""
    if name == "exhaustive":
        exhaustive = Exhaustive(reduced=True)
        yield exhaustive
        while exhaustive.next():
            yield exhaustive
        return
    yield "program_order"
    yield from cycle(PORTFOLIO if name == "portfolio" else (name,))


def _check(schedules: Any, seed: Any, scheduler: str) -> None:
    check_positive("schedules", schedules)
    check_integer("seed", seed)
    if scheduler not in SEARCHES:
        raise ConfigError(
            f"explore's scheduler must be one of {', '.join(SEARCHES)}, got {scheduler!r}"
        )


def _steps(search: Exploration) -> int:
    return max(search.decisions, default=1) or 1


def _attempt(
    fn: Callable[..., Any], world_size: int, options: dict[str, Any], **how: Any
) -> tuple[Outcome, Schedule]:
    """Run once; an error that was found is the outcome, a wrong argument is raised."""
    try:
        report = simulate(fn, world_size, strict=True, **how, **options)
    except ConfigError:
        raise
    except Exception as error:
        line = getattr(error, "schedule", None)
        if line is None:
            raise
        return error, Schedule.parse(line)
    return report, Schedule.parse(report.schedule)


def _report_of(outcome: Outcome) -> Report | None:
    return outcome if isinstance(outcome, Report) else getattr(outcome, "report", None)


def _signature(outcome: Outcome) -> tuple[str, ...] | None:
    """Return what must stay the same while a schedule is made smaller, None for a clean run."""
    if isinstance(outcome, Report):
        return None
    finding = outcome.finding if isinstance(outcome, SimulationError) else None
    return (type(outcome).__name__, finding.kind if finding is not None else "")


def _minimise(
    fn: Callable[..., Any],
    world_size: int,
    options: dict[str, Any],
    search: Exploration,
    schedule: Schedule,
    failure: BaseException,
) -> None:
    """Find the fewest deviations that keep the failure.

    First some are dropped; where several need each other, single ones may do what they do together.
    """
    wanted = _signature(failure)
    search.shrunk_from = len(schedule.deviations)

    def run(deviations: Iterable[Deviation]) -> _Failed | None:
        search.shrink_runs += 1
        plan = Schedule(world_size, schedule.knobs, tuple(deviations))
        outcome, effective = _attempt(fn, world_size, options, schedule=plan)
        if isinstance(outcome, BaseException) and _signature(outcome) == wanted:
            return _Failed(list(effective.deviations), outcome)
        return None

    best = _drop_chunks(_Failed(list(schedule.deviations), failure), run)
    if len(best.deviations) > 1:
        singles = _singles(fn, world_size, options, schedule, best.deviations)
        best = next((found for each in singles if (found := run([each]))), best)
    search.failure = best.failure
    search.schedule = str(Schedule(world_size, schedule.knobs, tuple(best.deviations)))


class _Failed(NamedTuple):
    """A failure and the deviations that it takes."""

    deviations: list[Deviation]
    failure: BaseException


def _drop_chunks(best: _Failed, run: Callable[[list[Deviation]], _Failed | None]) -> _Failed:
    """Drop deviations, in ever smaller chunks, as long as the same failure comes up.

    Source: delta debugging (Zeller and Hildebrandt 2002), keeping complements only.
    """
    runs_left = MINIMISE_RUNS_MAX
    chunk = max(len(best.deviations) // 2, 1)
    while best.deviations and runs_left:
        smaller = None
        for candidate in islice(_without_chunks(best.deviations, chunk), runs_left):
            runs_left -= 1
            smaller = run(candidate)
            if smaller is not None:
                break
        if smaller is not None and len(smaller.deviations) < len(best.deviations):
            best = smaller
            chunk = max(min(chunk, len(best.deviations) // 2), 1)
        elif chunk == 1:
            break
        else:
            chunk //= 2
    return best


class _Offers:
    """Program order, noting what else could be chosen at each decision."""

    def __init__(self) -> None:
        self.deviations: list[Deviation] = []

    def choose(self, decision: Decision) -> int:
        """Return the default."""
        others = (option for option in decision.options if option != decision.default)
        self.deviations += [Deviation(decision.step, option) for option in others]
        return decision.default


def _singles(
    fn: Callable[..., Any],
    world_size: int,
    options: dict[str, Any],
    schedule: Schedule,
    best: list[Deviation],
) -> list[Deviation]:
    """Return the deviations that program order could take, those nearest to known ones first."""
    offers = _Offers()
    knobs = {**options, "knobs": schedule.knobs, "faults": ()}
    _attempt(fn, world_size, knobs, scheduler=offers)
    near = sorted(
        offers.deviations, key=lambda each: min(abs(each.step - known.step) for known in best)
    )
    return near[:SINGLES_MAX]


def _without_chunks(deviations: list[Deviation], chunk: int) -> Iterable[list[Deviation]]:
    for start in range(0, len(deviations), chunk):
        yield deviations[:start] + deviations[start + chunk :]
