"""Verbs: simulate and replay a program on simulated ranks."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, NoReturn

from fsdp_sim import checkers as checkers_
from fsdp_sim.arguments import check_integer, check_positive, check_seconds, several
from fsdp_sim.engine.faults import Rule, rules_of
from fsdp_sim.engine.task import HANDOVER_SECONDS_MAX
from fsdp_sim.engine.world import STEP_LIMIT_DEFAULT
from fsdp_sim.errors import (
    FINDING_KINDS,
    REPLAY_HINT,
    ConfigError,
    Diverged,
    Finding,
    InjectedCrash,
    Nondeterminism,
    SimulationError,
    WrongSchema,
)
from fsdp_sim.knobs import Knobs
from fsdp_sim.schedule import RANKS_MAX, Schedule
from fsdp_sim.scheduler import Misfit, Recheck, Replay, Scheduler, make
from fsdp_sim.scheduler.pct import STEPS_DEFAULT
from fsdp_sim.simulation import Report, Settings, Simulation
from fsdp_sim.trace import Trace, diff

__tracebackhide__ = True  # pytest leaves out the frames of this file, which tell a user nothing


def simulate(  # noqa: PLR0913  the public call: all but two by keyword
    fn: Callable[..., Any],
    world_size: int = 4,
    *,
    args: tuple[Any, ...] = (),
    seed: int = 0,
    schedule: str | Schedule | None = None,
    scheduler: str | Scheduler = "program_order",
    steps: int = STEPS_DEFAULT,
    faults: Iterable[str | Rule] = (),
    knobs: Iterable[str] = (),
    checkers: Iterable[str] = tuple(checkers_.CHECKERS),
    strict: bool = True,
    step_limit: int = STEP_LIMIT_DEFAULT,
    handover_seconds: float = HANDOVER_SECONDS_MAX,
    trace: bool = False,
    poison: bool = False,
    recheck: bool = False,
    audit: bool = False,
) -> Report:
    """Run ``fn(rank, *args)`` on ``world_size`` simulated ranks and check every ordering.

    A rank starts with its default process group in place (backend "sim"), its own environment
    variables, random numbers and current stream.  One run covers all timings of the devices for the path
    taken; the scheduler chooses what they cannot: the order of the hosts, and the results of queries.

    Args:
        fn: one rank's program.
        world_size: number of ranks, at least 1.
        args: passed to ``fn`` behind the rank.
        seed: of the schedulers "uniform" and "pct"; feeds nothing else.
        schedule: deviations to follow where they fit ("v1;w4;17>2"), and knobs.  Deviations override
            ``scheduler``.
        scheduler: "program_order", "uniform", "pct" or "replay", or an object that chooses.
        steps: decisions that "pct" expects in a run, to spread its change points over.
        faults: what is to go wrong, such as "crash:issue@rank=1,at=3" (``fsdp_sim.engine.faults``).
        knobs: what makes the run less friendly: "late", "collect", "shuffle3"; "cuda" for a program that
            says ``cuda`` and ``nccl``; "values" to see no operators, at a fraction of the cost: values,
            matching and deadlocks alone are checked (``fsdp_sim.knobs``, and the limits page).
        checkers: names of the checkers to run.
        strict: raise the first error found; otherwise report all.
        step_limit: scheduling decisions allowed.
        handover_seconds: how long one rank may run without a decision before the run is given up: it
            blocks on something outside the world, such as a lock that another rank holds.
        trace: keep all ops, for pictures and files; digests are always there.
        poison: fill memory that holds no value with NaN: fresh and released memory, and outputs of
            collectives until they are complete.
        recheck: run twice and demand that both runs are the same.
        audit: compare what each operator does to bytes with what the simulator knows of it; slow.

    Returns:
        What each rank returned, the findings, the effective schedule and the trace.

    Raises:
        ConfigError: an argument is out of range or names something unknown; nothing has been run.
        FindingError: ``strict`` and an error was found; carries ``.finding``, ``.schedule``, ``.trace``.
        RunError: the run could not be finished (``StepLimit``, ``CannotRunAhead``, ...), or was not the
            same when it was rechecked (``Nondeterminism``), or an operator of it does what the
            simulator does not know of (``WrongSchema``).
        Exception: what a rank raised comes out as itself, with a note that says where the others stood.
    """
    _check_program(fn, world_size, args, step_limit)
    check_integer("seed", seed)
    check_positive("steps", steps)
    check_seconds("handover_seconds", handover_seconds)
    plan = _plan(schedule, world_size, knobs, faults)
    chooser: Scheduler
    if not isinstance(scheduler, str):
        chooser = scheduler
    elif scheduler == "replay" and schedule is None:
        raise ConfigError(
            "scheduler 'replay' must be told what to replay, got no schedule; pass one"
        )
    elif schedule is not None and (plan.deviations or scheduler == "program_order"):
        chooser = Replay(plan, strict=False)
    else:
        chooser = make(scheduler, seed=seed, schedule=plan, steps=steps)
    double = Recheck(chooser) if recheck else None
    settings = Settings(
        world_size=world_size,
        scheduler=double or chooser,
        knobs=plan.knobs,
        checkers=checkers_.make(checkers),
        step_limit=step_limit,
        handover_seconds=handover_seconds,
        trace=trace,
        poison=poison,
        audit=audit,
    )
    simulation = Simulation(fn, args, settings)
    report = simulation.run()
    if simulation.lies:
        raise _with_facts(_wrong_schema(simulation), report)
    if double is not None:
        _demand_the_same(fn, args, settings, checkers_.make(checkers), double, report)
    _raise_if_wrong(simulation, report, strict=strict)
    return report


def replay(fn: Callable[..., Any], schedule: str | Schedule, **options: Any) -> Report:
    """Run ``fn`` again under a schedule line, demanding that every deviation fits.

    Takes the options of ``simulate`` but ``world_size``, ``scheduler`` and ``seed``, which the line holds.

    Raises:
        Diverged: a deviation did not fit; the run went on in program order, and the error says whether
            the program was then found wrong anyway.  A replay that does not fit never passes.
        ConfigError: the line is malformed or of another version.
    """
    if not isinstance(schedule, (str, Schedule)):
        raise ConfigError(f"replay takes a schedule line such as 'v1;w4;17>2', got {schedule!r}")
    plan = Schedule.parse(schedule) if isinstance(schedule, str) else schedule
    strict = options.pop("strict", True)
    options.setdefault("step_limit", STEP_LIMIT_DEFAULT)
    check_seconds("handover_seconds", options.get("handover_seconds", HANDOVER_SECONDS_MAX))
    args = options.pop("args", ())
    _check_program(fn, plan.world_size, args, options["step_limit"])
    chooser = Replay(plan, strict=True)
    settings = Settings(
        world_size=plan.world_size,
        scheduler=chooser,
        knobs=plan.knobs,
        checkers=checkers_.make(options.pop("checkers", tuple(checkers_.CHECKERS))),
        **{
            name: options.pop(name)
            for name in ("step_limit", "handover_seconds", "trace", "poison")
            if name in options
        },
    )
    if options:
        raise ConfigError(f"replay takes the options of simulate, got {', '.join(sorted(options))}")
    simulation = Simulation(fn, args, settings)
    report = simulation.run()
    chooser.end()
    misfit = chooser.misfit
    if misfit is not None:
        _raise_diverged(simulation, report, misfit)
    _raise_if_wrong(simulation, report, strict=strict)
    return report


# ---------------------------------------------------------------------- checks and outcomes


def check_options(
    options: Mapping[str, Any],
    caller: str,
    own: Sequence[str],
    refused: Sequence[str] = (),
) -> None:
    """Refuse options that ``simulate`` does not know, before anything is run.

    Args:
        options: to be passed to ``simulate``.
        caller: who passes them on.
        own: what it takes besides.
        refused: options of ``simulate`` that it decides itself.

    Raises:
        ConfigError: one is unknown; names it.
    """
    known = set(inspect.signature(simulate).parameters) - {"fn", "world_size", "strict", *refused}
    unknown = sorted(set(options) - known)
    if unknown:
        meant = get_close_matches(unknown[0], [*own, *sorted(known)], n=1)
        raise ConfigError(
            f"{caller} takes {', '.join(own)} and options of simulate ({', '.join(sorted(known))}), "
            f"got {', '.join(unknown)}{f'; did you mean {meant[0]}?' if meant else ''}"
        )


def _check_program(fn: Any, world_size: Any, args: Any, step_limit: Any) -> None:
    if Simulation.is_running():
        raise ConfigError("a world must not be started inside a world; call simulate from outside")
    if not callable(fn):
        raise ConfigError(f"fn must be callable as fn(rank, *args), got {fn!r}")
    if _runs_later(fn):
        raise ConfigError(
            f"fn must run the rank's program when it is called, got {fn!r}, which only makes a coroutine "
            "or a generator; pass a function that runs it, such as lambda rank: asyncio.run(main(rank))"
        )
    check_integer("world_size", world_size)
    if not 1 <= world_size <= RANKS_MAX:
        raise ConfigError(f"world_size must be between 1 and {RANKS_MAX}, got {world_size}")
    if not isinstance(args, (tuple, list)):
        raise ConfigError(f"args must be a tuple, got {args!r}; pass ({args!r},)")
    _check_call(fn, args)
    check_positive("step_limit", step_limit)
    if Simulation.is_real_group_initialised():
        raise ConfigError(
            "simulate must run where no real process group is initialised, got one; "
            "call torch.distributed.destroy_process_group() first"
        )


def _runs_later(fn: Any) -> bool:
    call = getattr(fn, "__call__", None)  # noqa: B004  an object's own may be a coroutine function
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(is_kind(each) for is_kind in kinds for each in (fn, call))


def _check_call(fn: Callable[..., Any], args: Iterable[Any]) -> None:
    """Refuse arguments that ``fn`` cannot take, where that can be known without calling it."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # of something that is not written in Python
        return
    try:
        signature.bind(0, *args)
    except TypeError as error:
        raise ConfigError(
            f"fn must take a rank and args, since it is called as fn(rank, *args), got "
            f"{getattr(fn, '__qualname__', fn)!s}{signature}: {error}"
        ) from error


def _wrong_schema(simulation: Simulation) -> WrongSchema:
    lies = "\n".join(f"  {lie}" for lie in simulation.lies)
    return WrongSchema(
        "operators must do to bytes what the simulator knows of them, got:\n"
        f"{lies}\nadd them to the tables of fsdp_sim.engine.dispatch"
    )


def _demand_the_same(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    settings: Settings,
    checkers: list[Any],
    double: Recheck,
    first: Report,
) -> None:
    """Run a second time, with the same choices, and compare."""
    double.again()
    second = Simulation(fn, args, replace(settings, checkers=checkers)).run()
    double.end()
    difference = double.difference or _difference_of_ops(first.trace, second.trace)
    if difference is not None:
        message = (
            f"two runs of one schedule must be the same, got at {difference}; look for what differs "
            "from run to run: id(), hash(), a clock, state that a run leaves behind"
        )
        raise _with_facts(Nondeterminism(message), first)


def _difference_of_ops(first: Trace, second: Trace) -> str | None:
    if first.digest == second.digest:
        return None
    if first.keeps_all and second.keeps_all:
        return f"the first differing op: {diff(first, second)}"
    return "some op (pass trace=True to see which)"


def _plan(
    schedule: str | Schedule | None,
    world_size: int,
    knobs: Iterable[str],
    faults: Iterable[str | Rule],
) -> Schedule:
    """Return the schedule with all knobs in it; faults are knobs too, so its line holds everything."""
    plan = Schedule(world_size) if schedule is None else schedule
    plan = Schedule.parse(plan) if isinstance(plan, str) else plan
    rules = rules_of(several("faults", faults, (str, Rule)))
    names = (*plan.knobs, *several("knobs", knobs), *map(str, rules))
    Knobs.parse(names)
    plan = replace(plan, knobs=tuple(dict.fromkeys(names)))
    if plan.world_size != world_size:
        raise ConfigError(
            f"the schedule's world size must be world_size={world_size}, got {plan.world_size}"
        )
    return plan


def _raise_if_wrong(simulation: Simulation, report: Report, *, strict: bool) -> None:
    """Raise what a rank raised, then what stopped the world, then the first error found."""
    stop = simulation.world.stop_error
    if any(_is_own(error) for error in report.errors.values()):
        _raise_rank_error(simulation, report)
    if stop is not None and (strict or stop.finding is None):
        if stop.finding is not None:
            stop = type(stop)(_message(stop.finding, report), finding=stop.finding)
            stop.add_note(_replay_hint(simulation, report))
        raise _with_facts(stop, report)
    if strict and report.findings:
        finding = report.findings[0]
        error = FINDING_KINDS[finding.kind](_message(finding, report), finding=finding)
        error.add_note(_replay_hint(simulation, report))
        raise _with_facts(error, report)


def _is_own(error: BaseException) -> bool:
    """Whether a rank's program raised it; a crash that the caller asked for is part of the run."""
    return not isinstance(error, InjectedCrash)


def _message(finding: Finding, report: Report) -> str:
    more = len(report.findings) - 1
    others = f"\n  and {more} more finding{'s' if more > 1 else ''}" if more else ""
    return "\n  ".join([f"{finding.describe()}{others}", *report.deviations])


def _replay_hint(simulation: Simulation, report: Report) -> str:
    """Return the call that replays a run, for those who called ``simulate`` themselves."""
    name = getattr(simulation.fn, "__name__", "")
    args = ", args=args" if simulation.args else ""
    fn = name if name.isidentifier() else "fn"
    return f"{REPLAY_HINT}fsdp_sim.replay({fn}, {report.schedule!r}{args})"


def _with_facts(error: SimulationError, report: Report) -> SimulationError:
    error.schedule, error.trace, error.report = report.schedule, report.trace, report
    return error


def _raise_rank_error(simulation: Simulation, report: Report) -> NoReturn:
    """Raise the first exception that a rank's program ended with, as itself."""
    ranks = [simulation.world.ranks[index] for index, e in report.errors.items() if _is_own(e)]
    first = min(ranks, key=lambda rank: rank.order_of_error or 0)
    error = first.error
    assert error is not None
    others = [rank.index for rank in ranks if rank is not first]
    notes = [f"raised on simulated rank {first.index}; schedule {report.schedule!r}"]
    if others:
        notes.append(f"ranks {others} raised too")
    notes += [str(finding) for finding in report.findings]
    facts = {"rank": first.index, "schedule": report.schedule, "trace": report.trace}
    # An exception class may forbid attributes, and notes with them; then it comes out bare.
    with suppress(Exception):
        error.add_note("\n".join(notes))
        for name, value in {**facts, "report": report}.items():
            setattr(error, name, value)
    raise error


def _raise_diverged(simulation: Simulation, report: Report, misfit: Misfit) -> NoReturn:
    stop = simulation.world.stop_error
    wrong = [finding.kind for finding in report.findings]
    wrong += [type(error).__name__ for error in report.errors.values()]
    if stop is not None and stop.finding is None:
        wrong.append(type(stop).__name__)
    outcome = (
        f"in program order from there the run ended in {', '.join(dict.fromkeys(wrong))}"
        if wrong
        else "in program order from there the run was clean, which proves nothing"
    )
    raise _with_facts(Diverged(f"{misfit}; {outcome}"), report)
