"""Helpers for tests: check a rank program in program order and then under other schedules.

    from fsdp_sim.testing import check

    def test_training_is_ordered():
        check(train, ranks=4)

The pytest plugin adds to them what the command line says, and which test is running; they work without
it.  Nothing here imports torch before the first ``check``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from time import monotonic  # noqa: TID251  a limit of time decides how many schedules are run, no more
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fsdp_sim.arguments import check_positive, check_seconds
from fsdp_sim.errors import REPLAY_HINT, ConfigError

if TYPE_CHECKING:
    from fsdp_sim.exploration import Exploration
    from fsdp_sim.program.spec import ProgramSpec
    from fsdp_sim.replay_file import ReplayFile
    from fsdp_sim.simulation import Report

PORTFOLIO = ("pct", "uniform")
RANKS_DEFAULT = 4
RUNS_DEFAULT = 10
RUNS_DEFAULT_PER_EXAMPLE = 2
"""Schedules of each example that Hypothesis draws: it draws many examples."""


@dataclass(frozen=True)
class Options:
    """How programs are explored; None leaves the choice to the test.

    Attributes:
        seed: of the first explored schedule.
        runs: schedules of one ``check``, the one in program order included.
        scheduler: as ``explore`` takes it.
        time_limit: seconds after which a ``check`` starts no further schedule; the first always runs.
    """

    seed: int | None = None
    runs: int | None = None
    scheduler: str | None = None
    time_limit: float | None = None


DEFAULTS = Options(seed=0, runs=RUNS_DEFAULT, scheduler="pct")
DEFAULTS_PER_EXAMPLE = Options(seed=0, runs=RUNS_DEFAULT_PER_EXAMPLE, scheduler="pct")


@dataclass
class Scope:
    """The test that runs now, as far as ``check`` has to know.

    Attributes:
        forced: what the command line says; goes before all that the test says.
        defaults: what holds where neither says anything.
        node: the test's name; None outside pytest.
        replay: the file that this test is to follow.
        arguments: what Hypothesis drew for the example that runs now.
        calls: simulations that the test, or the example, has begun.
        searches: what they did, for the statistics.
        outcome: the replayed simulation's error, once it was run.
        is_replayed: whether it was run.
        part, parts: which share of the schedules is this test's.
    """

    forced: Options = Options()
    defaults: Options = DEFAULTS
    node: str | None = None
    replay: "ReplayFile | None" = None
    arguments: dict[str, Any] = field(default_factory=dict)
    calls: int = 0
    searches: "list[Exploration]" = field(default_factory=list)
    outcome: BaseException | None = None
    is_replayed: bool = False
    part: int = 0
    parts: int = 1

    def begin_example(self, arguments: dict[str, Any]) -> None:
        """An example starts, with what was drawn for it."""
        self.arguments, self.calls = arguments, 0


_SCOPES = [Scope()]


def scope() -> Scope:
    """Return the scope of the test that runs now."""
    return _SCOPES[-1]


@contextmanager
def in_scope(inner: Scope) -> Iterator[Scope]:
    """Make a scope current for the time of one test."""
    _SCOPES.append(inner)
    try:
        yield inner
    finally:
        _SCOPES.pop()


@dataclass
class Failure:
    """What a failed ``check`` leaves on its exception, for reports and files.

    Attributes:
        fn: the rank program.
        node, call, arguments: the place in the test, as in a replay file.
        program: what failed, if it is a program as data.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]
    node: str | None
    call: int
    arguments: dict[str, Any]
    program: "ProgramSpec | None" = None


def check(
    fn: Callable[..., Any],
    ranks: int = RANKS_DEFAULT,
    *,
    args: tuple[Any, ...] = (),
    schedule: str | None = None,
    runs: int | None = None,
    scheduler: str | None = None,
    seed: int | None = None,
    time_limit: float | None = None,
    **options: Any,
) -> "Report":
    """Run ``fn(rank, *args)`` on simulated ranks in program order, then under other schedules.

    Usable in any test and inside ``@given``; it draws nothing.  Each run covers all timings of the
    devices; the schedules cover the order of the hosts.  Options of the command line go first.

    Args:
        fn: one rank's program; run several times, so it must not keep state between runs.
        ranks: how many.
        args: passed to ``fn`` behind the rank; shared by all ranks.
        schedule: a line ("v1;w4;17>2") to run under, where it fits, instead of exploring.
        runs: schedules, the one in program order included.
        scheduler: as ``explore`` takes it.
        seed: of the first explored schedule.
        time_limit: seconds after which no further schedule is started.
        options: of ``fsdp_sim.simulate``.

    Returns:
        The report of the run in program order (or of the one under ``schedule``).

    Raises:
        ConfigError: an argument is out of range or unknown; nothing has been run.
        Exception: what ``fsdp_sim.explore`` raises: the first failure, with its smallest schedule.
    """
    here = scope()
    said = Options(seed, runs, scheduler, time_limit)
    how = _share(_merged(here.forced, said, _portfolio(here), here.defaults), here)
    check_options(options)
    check_positive("ranks", ranks)
    check_positive("runs", how.runs)
    if how.time_limit is not None:
        check_seconds("time_limit", how.time_limit)
    options = {"args": args, **options}

    def run() -> "Report":
        if schedule is not None:
            from fsdp_sim.verbs import simulate

            return simulate(fn, ranks, schedule=schedule, **options)
        return _search(here, fn, ranks, how, options)

    def follow(line: str) -> "Report":
        from fsdp_sim.verbs import replay

        return replay(fn, line, **options)

    return _run(here, run, follow, _place(here, fn, args, options))


def check_program(program: "ProgramSpec", **options: Any) -> "Report":
    """Run a program as data under its own schedule, with every check, against the unsharded run.

    Args:
        program: as the strategies of ``fsdp_sim.strategies`` draw them.
        options: of ``fsdp_sim.simulate``.

    Raises:
        Exception: as ``fsdp_sim.program.parity.verify``.
    """
    from fsdp_sim.follow import follow_program
    from fsdp_sim.program.parity import run_rank, verify

    here = scope()
    check_options(options)
    place = _place(here, run_rank, (program,), {"args": (program,), **options})
    place.program = program
    return _run(
        here,
        lambda: verify(program, **options),
        lambda line: follow_program(program, line, **options),
        place,
    )


@contextmanager
def checking(ranks: int = RANKS_DEFAULT, **options: Any) -> Iterator[Callable[..., "Report"]]:
    """Give a function that checks rank programs with the options said once.

        with checking(ranks=4, runs=50) as run:
            report = run(train, model_size)

    Usable inside ``@given``.

    Args:
        ranks: how many.
        options: of ``check``.

    Raises:
        ConfigError: at the end, if nothing was run: a test that checks nothing must not pass.
    """
    count = 0

    def run(fn: Callable[..., Any], *args: Any) -> "Report":
        nonlocal count
        count += 1
        return check(fn, ranks, args=args, **options)

    yield run
    if count == 0:
        raise ConfigError(
            "a block of checking(...) must run a program, got none; call what it gives"
        )


# ---------------------------------------------------------------------- running


def _place(
    here: Scope, fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> Failure:
    """Return where the next simulation of the test stands, and count it."""
    call, here.calls = here.calls, here.calls + 1
    options = {name: value for name, value in options.items() if name != "args"}
    return Failure(fn, args, options, here.node, call, dict(here.arguments))


def _run(
    here: Scope,
    run: Callable[[], "Report"],
    follow: Callable[[str], "Report"],
    place: Failure,
) -> "Report":
    """Run, or follow the replay file that is about this simulation; mark what is raised."""
    try:
        if _is_subject(here, place.call):
            return _follow(here, follow)
        return run()
    except ConfigError:
        raise
    except Exception as error:
        with suppress(AttributeError):
            error.fsdp_sim_failure = place  # type: ignore[attr-defined]
        if here.node is not None:
            _drop_replay_hint(error)
        raise error.with_traceback(_outside(error.__traceback__)) from error.__cause__


def _drop_replay_hint(error: BaseException) -> None:
    """Leave the command that replays a test to the plugin: the call would need the test's own objects."""
    notes = getattr(error, "__notes__", [])
    notes[:] = [note for note in notes if not note.startswith(REPLAY_HINT)]


def _is_subject(here: Scope, call: int) -> bool:
    """Whether this simulation is the one that the replay file is about."""
    test = here.replay.test if here.replay is not None else None
    return test is not None and call == test.call and not here.is_replayed


def _follow(here: Scope, follow: Callable[[str], "Report"]) -> "Report":
    assert here.replay is not None
    here.is_replayed = True
    try:
        return follow(here.replay.schedule)
    except Exception as error:
        here.outcome = error
        raise


def _search(
    here: Scope, fn: Callable[..., Any], ranks: int, how: Options, options: dict[str, Any]
) -> "Report":
    """Explore, and keep the statistics whatever comes."""
    from fsdp_sim.exploration import explore

    assert how.runs is not None
    assert how.seed is not None
    assert how.scheduler is not None
    try:
        search = explore(
            fn,
            ranks,
            schedules=how.runs,
            scheduler=how.scheduler,
            seed=how.seed,
            on_schedule=_time_limit(how),
            **options,
        )
    except Exception as error:
        failed: Exploration | None = getattr(error, "exploration", None)
        if failed is not None:
            here.searches.append(failed)
        raise
    here.searches.append(search)
    assert search.first is not None
    return search.first


def _time_limit(how: Options) -> Callable[[int], bool] | None:
    if how.time_limit is None:
        return None
    end = monotonic() + how.time_limit
    return lambda _: monotonic() < end


# ---------------------------------------------------------------------- options


def _merged(*layers: Options) -> Options:
    """Return options in which the first layer that says something is heard."""
    merged = Options()
    for layer in reversed(layers):
        said = {f.name: getattr(layer, f.name) for f in fields(layer)}
        merged = replace(
            merged, **{name: value for name, value in said.items() if value is not None}
        )
    return merged


def _portfolio(here: Scope) -> Options:
    """Let the parts of a test draw schedules in different ways."""
    return Options(scheduler=PORTFOLIO[here.part % len(PORTFOLIO)]) if here.parts > 1 else Options()


OWN_OPTIONS = ("ranks", "runs", "time_limit")
"""What ``check`` takes besides the options of ``simulate``."""


def check_options(options: dict[str, Any], caller: str = "check") -> None:
    """Refuse options that are none of ``simulate``'s, before anything is run.

    Args:
        options: by name.
        caller: who was given them, for the message.

    Raises:
        ConfigError: one is unknown; names it.
    """
    from fsdp_sim import verbs

    verbs.check_options(options, caller, OWN_OPTIONS, refused=("trace",))


def _share(how: Options, here: Scope) -> Options:
    """Return this part's share: seeds of its own, after the run in program order that each part makes."""
    if here.parts == 1:
        return how
    assert how.runs is not None
    assert how.seed is not None
    others = -(-(how.runs - 1) // here.parts)
    return replace(how, runs=1 + others, seed=how.seed + here.part * others)


# ---------------------------------------------------------------------- tracebacks

_PACKAGE = str(Path(__file__).parent)
_PROGRAMS = str(Path(__file__).parent / "program")
__tracebackhide__ = True  # pytest leaves out the frames of this file


def _outside(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the simulator's own frames, which tell a user nothing."""
    kept = []
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not file.startswith(_PACKAGE) or file.startswith(_PROGRAMS):
            kept.append(traceback)
        traceback = traceback.tb_next
    outside: TracebackType | None = None
    for entry in reversed(kept):
        outside = TracebackType(outside, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return outside
