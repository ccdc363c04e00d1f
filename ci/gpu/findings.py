"""Findings: broken programs that the simulator flags go wrong on the GPU, and unbroken ones never do."""

import functools
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

import fsdp_sim
from ci.gpu.breaking import broken
from ci.gpu.delays import AtRandom, BeforeFirst, Delays, Place
from ci.gpu.process import device, has_gpu
from ci.gpu.programs import kept, without_collector
from fsdp_sim.errors import Finding
from fsdp_sim.mutation.programs import SpecProgram, same
from fsdp_sim.mutation.site import Site, Verb
from fsdp_sim.mutation.subject import find
from fsdp_sim.mutation.trial import attempt
from fsdp_sim.program import passes, run_program
from fsdp_sim.program.results import RankRun

KINDS = ("Race", "UseAfterFree")
SUBJECT = "fsdp_core"
PROCESSES = 8
PROGRAMS_PER_SITE = 3
DELAY_MS = 30.0
PLACEMENTS = 100
CHANCE = 0.02
SHORT_DELAY_MS = 2.0


@dataclass(frozen=True)
class Case:
    """One site broken in one program, and what the simulator found."""

    program: str
    site: Site
    finding: Finding


@dataclass
class Trial:
    """What a case did on the GPU.

    Attributes:
        place: what the delay was put before; ``hits``: how often.
        wrong: the first wrong number with the delay; None if all were right.
        wrong_undelayed: the same without any delay.
        raised: what the run raised instead of ending.
    """

    program: str
    site: str
    kind: str
    place: str
    hits: int
    wrong: str | None
    wrong_undelayed: str | None
    raised: str | None = None


# ---------------------------------------------------------------------- on simulated ranks


def cases_of(name: str) -> list[Case]:
    """Break each site that a program reaches, and return those that are a race or reuse of memory."""
    subject, program = find(SUBJECT), SpecProgram(name, kept()[name])
    clean = attempt(subject, program)
    cases = []
    for site in sorted(clean.uses):
        if site.verb is Verb.RELEASE:
            continue
        known = {finding.message for finding in clean.findings}
        findings = attempt(subject, program, (site,)).findings
        new = [f for f in findings if f.kind in KINDS and f.message not in known]
        if new:
            cases.append(Case(name, site, new[0]))
    return cases


def chosen(cases: Sequence[Case]) -> list[Case]:
    """Return a few programs for each site, those of few cases first."""
    count: Counter[Site] = Counter()
    taken = []
    for case in cases:
        if count[case.site] < PROGRAMS_PER_SITE:
            count[case.site] += 1
            taken.append(case)
    return taken


# ---------------------------------------------------------------------- on the GPU


def start(folder: str) -> None:
    """Join a process group of this process alone, in a worker."""
    if has_gpu():
        torch.cuda.set_device(0)
    store = f"file://{folder}/store-{os.getpid()}"
    dist.init_process_group("nccl" if has_gpu() else "gloo", store, rank=0, world_size=1)
    on_device_once()


def on_device_once() -> None:
    """Let inputs be copied to the GPU once: PyTorch's host waits in each such copy."""
    for name in ("input_batch", "loss_weights"):
        made: dict[Any, torch.Tensor] = {}
        setattr(passes, name, _cached(getattr(passes, name), made))


def _cached(
    make: Callable[..., torch.Tensor], made: dict[Any, torch.Tensor]
) -> Callable[..., torch.Tensor]:
    def get(shape: Any, place: Any, where: torch.device) -> torch.Tensor:
        key = (shape, place, where.type)
        if key not in made:
            made[key] = make(shape, place, where)
        return made[key].clone()

    return get


def run_once(
    name: str, delay: Callable[[Place], float] | None = None, site: Site | None = None
) -> RankRun:
    """Run a program on this rank and return what it holds, on the host."""
    with without_collector(), fsdp_sim.record(device=device().type):
        breaking = nullcontext() if site is None else broken(find(SUBJECT), site)
        with breaking, nullcontext() if delay is None else Delays(delay):
            run = run_program(kept()[name], device())
        if has_gpu():
            torch.cuda.synchronize()
    return _on_host(run)


def _on_host(run: RankRun) -> RankRun:
    def move(rows: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        return {key: None if row is None else row.cpu() for key, row in rows.items()}

    steps = [
        replace(
            step,
            losses=tuple(tuple(loss.cpu() for loss in one) for one in step.losses),
            gradients=move(step.gradients),
            parameters=move(step.parameters),
        )
        for step in run.steps
    ]
    return replace(run, steps=tuple(steps))


@functools.cache
def undisturbed(name: str) -> RankRun:
    """Return an unbroken run without delays; its inputs are on the device and its kernels loaded."""
    run_once(name)
    return run_once(name)


def difference(name: str, run: RankRun) -> str | None:
    """Return where a run differs from an undisturbed one, bit for bit."""
    for number, (got, expected) in enumerate(zip(run.steps, undisturbed(name).steps, strict=True)):
        for what in ("losses", "gradients", "parameters"):
            if not same(getattr(got, what), getattr(expected, what)):
                return f"step {number}: {what}"
    return None


def try_case(case: Case) -> Trial:
    """Run a broken program with the delay that its finding asks for, and without."""
    undisturbed(case.program)
    delay = BeforeFirst(case.finding, DELAY_MS)
    trial = Trial(case.program, str(case.site), case.finding.kind, delay.place, 0, None, None)
    try:
        trial.wrong_undelayed = difference(case.program, run_once(case.program, site=case.site))
        trial.wrong = difference(case.program, run_once(case.program, delay, case.site))
    except Exception as error:
        trial.raised = f"{type(error).__name__}: {error}"[:300]
    trial.hits = delay.hits
    return trial


def try_clean(task: tuple[str, int, int]) -> tuple[str, int, list[str]]:
    """Run an unbroken program under drawn delays; return how many there were, and what went wrong."""
    name, first, last = task
    hits, wrong = 0, []
    for seed in range(first, last):
        delay = AtRandom(seed, CHANCE, SHORT_DELAY_MS)
        differs = difference(name, run_once(name, delay))
        hits += delay.hits
        if differs is not None:
            wrong.append(f"seed {seed}: {differs}")
    return name, hits, wrong


def equals_unsharded(name: str) -> bool:
    """Whether an undisturbed run has the numbers of the unsharded one, as far as sums are exact."""
    return SpecProgram(name, kept()[name]).difference([undisturbed(name)]) is None


# ---------------------------------------------------------------------- the part


def workers(folder: str, begin: Callable[[str], None]) -> ProcessPoolExecutor:
    """Return processes that each have a process group of their own on the GPU."""
    count = PROCESSES if has_gpu() else 2
    return ProcessPoolExecutor(count, get_context("spawn"), initializer=begin, initargs=(folder,))


def all_cases(names: Sequence[str]) -> list[Case]:
    """Return the cases of the programs, looked for in parallel."""
    with ProcessPoolExecutor(2 * PROCESSES if has_gpu() else 2, get_context("spawn")) as pool:
        return chosen([case for found in pool.map(cases_of, names) for case in found])


def run(names: Sequence[str] = (), placements: int = PLACEMENTS) -> dict[str, object]:
    """Return what broken programs did with a delay where the finding asks for it, and unbroken ones."""
    names = names or [*kept()]
    cases = all_cases(names)
    part = max(placements // 4, 1)
    tasks = [
        (n, at, min(at + part, placements)) for n in names for at in range(0, placements, part)
    ]
    with TemporaryDirectory() as folder, workers(folder, start) as pool:
        trials = list(pool.map(try_case, cases))
        clean = list(pool.map(try_clean, tasks))
        parity = dict(zip(names, pool.map(equals_unsharded, names)))
    rows: dict[str, object] = {
        "broken": _rates(trials),
        "clean": {
            "programs": len(names),
            "unlike the unsharded run on a CPU": [name for name in names if not parity[name]],
            "placements of each": placements,
            "delays": sum(hits for _, hits, _ in clean),
            "wrong": [f"{name} {line}" for name, _, wrong in clean for line in wrong],
        },
    }
    print(json.dumps(rows, indent=1))
    return rows | {"trials": [asdict(trial) for trial in trials]}


def _rates(trials: Sequence[Trial]) -> dict[str, object]:
    """Return the share of findings that went wrong, by kind."""
    rates: dict[str, object] = {}
    for kind in KINDS:
        of_kind = [trial for trial in trials if trial.kind == kind]
        rates[kind] = {
            "cases": len(of_kind),
            "sites": len({trial.site for trial in of_kind}),
            "wrong with the delay": sum(trial.wrong is not None for trial in of_kind),
            "wrong without": sum(trial.wrong_undelayed is not None for trial in of_kind),
            "raised": sum(trial.raised is not None for trial in of_kind),
            "not confirmed": [
                f"{trial.program}: {trial.site}; delayed {trial.place} ({trial.hits} times)"
                for trial in of_kind
                if trial.wrong is None and trial.raised is None
            ],
        }
    return rates
