"""Parity: run a program on simulated ranks and compare it with the unsharded run, bit for bit."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fsdp_sim.errors import REPLAY_HINT, Finding, ParityError
from fsdp_sim.program.budget import gathered_beyond_budgets, shows_budgets
from fsdp_sim.program.counts import reductions_max, uses_every_prefetch
from fsdp_sim.program.exactness import gradient_tolerance
from fsdp_sim.program.memory import frees_weights_first, taken_beside_weights
from fsdp_sim.program.results import FullRun, RankRun, Tensors
from fsdp_sim.program.run import run_program
from fsdp_sim.program.shards import ReplicaError, assemble
from fsdp_sim.program.spec import ProgramSpec
from fsdp_sim.reference import run_reference
from fsdp_sim.simulation import Report
from fsdp_sim.verbs import simulate


def verify(program: ProgramSpec, **options: Any) -> Report:
    """Run ``program`` on simulated ranks with every check on, and compare it with the unsharded run.

    Args:
        program: what to run, under its own schedule and faults.
        options: those of ``simulate`` but ``world_size`` and ``args``.

    Returns:
        The report of a clean run with parity.

    Raises:
        SpecError: the program cannot be built.
        ParityError: a value differs from the unsharded run, or a rank did or held what it need not; names
            the first ones.
        FindingError, RunError: as ``simulate`` raises them.
    """
    expected = run_reference(program)
    options.setdefault("schedule", program.schedule or None)
    options.setdefault("faults", program.faults)
    options.setdefault("trace", True)
    report = simulate(run_rank, program.world_size, args=(program,), **options)
    differences = run_differences(program, report.results, expected)
    if frees_weights_first(program):
        differences += [
            f"{place}: its full weights must be freed before memory is taken for its gradients"
            for place in taken_beside_weights(report.trace.ops)
        ]
    if shows_budgets(program):
        differences += [
            f"{place}: must gather no more early than its budget, but the last unit may overshoot"
            for place in gathered_beyond_budgets(program, report.trace.ops)
        ]
    if differences:
        raise _parity_error(differences, report)
    return report


def run_rank(_rank: int, program: ProgramSpec) -> RankRun:
    """Run ``program`` as a rank function of ``simulate``, ``explore`` and ``replay``."""
    return run_program(program)


def run_differences(
    program: ProgramSpec, ranks: Sequence[RankRun], unsharded: FullRun
) -> list[str]:
    """Return in what a run is not as it must be, first differences first; [] if it is.

    Its values must be those of the unsharded run. No unit reduces twice in one backward, no gather is
    wasted where units run in order, and a model that was dropped is gone.

    Args:
        program: what was run.
        ranks: the results of all ranks, in rank order.
        unsharded: the unsharded run.
    """
    try:
        differences = parity_differences(program, assemble(program, ranks), unsharded)
    except ReplicaError as error:
        differences = [str(error)]
    for run in ranks:
        differences += _wasted(program, run)
        if run.alive:
            parts = ", ".join(run.alive)
            differences.append(
                f"rank {run.rank}: a dropped model must be freed at once, got {parts}"
            )
    return differences


def _wasted(program: ProgramSpec, run: RankRun) -> list[str]:
    """Return what a rank's collectives were too many of, step by step."""
    lines = []
    before = {"reductions": 0, "unused_prefetches": 0}
    for number, (step, ran) in enumerate(zip(program.steps, run.steps, strict=True)):
        if step.resume is not None:
            before = dict.fromkeys(before, 0)
        added = {name: ran.stats[name] - count for name, count in before.items()}
        before = {name: ran.stats[name] for name in before}
        where, most = f"step {number}, rank {run.rank}", reductions_max(program, step)
        if added["reductions"] > most:
            lines.append(
                f"{where}: must issue at most {most} reductions, got {added['reductions']}"
            )
        if added["unused_prefetches"] and uses_every_prefetch(program, step):
            lines.append(
                f"{where}: must use all that it gathers early, got {added['unused_prefetches']} "
                f"units that it did not use"
            )
    return lines


def _parity_error(differences: list[str], report: Report) -> ParityError:
    first, *others = differences
    finding = Finding("ParityError", first, detail=tuple(others[:8]))
    error = ParityError(str(finding), finding=finding)
    error.add_note(f"{REPLAY_HINT}verify(program, schedule={report.schedule!r})")
    error.schedule, error.trace, error.report = report.schedule, report.trace, report
    return error


def parity_differences(program: ProgramSpec, sharded: FullRun, unsharded: FullRun) -> list[str]:
    """Return what differs between the two runs of a program, first differences first; [] is parity.

    Where sums are exact the comparison is of bits; else the first step's losses and gradients are
    compared within ``gradient_tolerance``.
    """
    tolerance = gradient_tolerance(program)
    steps = list(zip(sharded.steps, unsharded.steps, strict=True))
    differences = []
    for number, (got, expected) in enumerate(steps if tolerance == 0.0 else steps[:1]):
        if got.unsharded:
            names = ", ".join(got.unsharded)
            differences.append(
                f"step {number}: all units must be at rest after it, got full {names}"
            )
        if got.losses != expected.losses:
            differences.append(
                f"step {number}: losses (rank, pass, forward) must be {expected.losses}, "
                f"got {got.losses}"
            )
        differences += _differing(
            f"step {number} gradient", got.gradients, expected.gradients, tolerance
        )
        if tolerance == 0.0:
            differences += _differing(
                f"step {number} parameter", got.parameters, expected.parameters, 0.0
            )
            for rank, whole in enumerate(got.exported):
                what = f"step {number}, rank {rank}, exported"
                differences += _differing(what, whole, expected.exported[rank], 0.0)
    return differences


def _differing(what: str, got: Tensors, expected: Tensors, tolerance: float) -> list[str]:
    """Return a line for each tensor that differs by more than ``tolerance``."""
    if list(got) != list(expected):
        return [f"{what}: names must be {list(expected)}, got {list(got)}"]
    lines = []
    for name in got:
        difference = _difference(got[name], expected[name], tolerance)
        if difference:
            lines.append(f"{what} {name!r} {difference}")
    return lines


def _difference(got: Tensor | None, expected: Tensor | None, tolerance: float) -> str | None:
    """Return how two tensors differ, or None."""
    if got is None or expected is None:
        same = got is expected
        return None if same else f"must be {_shown(expected)}, got {_shown(got)}"
    if got.dtype != expected.dtype:
        return f"must be of {expected.dtype}, got {got.dtype}"
    if got.shape != expected.shape:
        return f"must have shape {list(expected.shape)}, got {list(got.shape)}"
    apart = (got.double() - expected.double()).abs()
    wrong = ~(apart <= tolerance)  # NaN is apart from everything
    if not bool(wrong.any()):
        return None
    place = tuple(int(i) for i in wrong.nonzero()[0])
    count = int(wrong.sum())
    return (
        f"must be {expected[place].item()} at {list(place)}, got {got[place].item()} "
        f"({count} of {got.numel()} elements differ by more than {tolerance})"
    )


def _shown(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"present, of shape {list(tensor.shape)}"
