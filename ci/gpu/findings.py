"""Findings: broken programs that the simulator flags go wrong on the GPU, and unbroken ones never do."""

import functools
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

import fsdp_sim
from ci.gpu.breaking import broken
from ci.gpu.delays import AtRandom, BeforeFirst, Delays, Place
from ci.gpu.process import device, has_gpu
from ci.gpu.programs import kept, on_host, without_collector
from fsdp_sim.errors import Finding
from fsdp_sim.mutation.programs import SpecProgram, same
from fsdp_sim.mutation.site import Site, Verb
from fsdp_sim.mutation.subject import find
from fsdp_sim.mutation.trial import attempt
from fsdp_sim.op import Kind, Op
from fsdp_sim.program import passes, run_program
from fsdp_sim.program.results import RankRun

REUSE = "UseAfterFree"
KINDS = ("Race", REUSE)
SUBJECT = "fsdp_core"
PROCESSES = 8
PROGRAMS_PER_SITE = 3
DELAY_MS = 300.0
"""Longer than the host of a recorded step may need to come to the op that is to overtake."""
STREAMS = 32
"""As many as PyTorch has of one priority; they are taken in turn."""
SEGMENT_NBYTES = 2 << 20
"""What the allocator takes from the driver for small blocks, of half of that at most."""
PLACEMENTS = 100
CHANCE = 0.02
SHORT_DELAY_MS = 2.0


@dataclass(frozen=True)
class Case:
    """One site broken in one program, and what the simulator found.

    Attributes:
        rule: of the simulator, that the program breaks.
        is_work: both ops are work of the device on one rank too.
    """

    program: str
    site: Site
    finding: Finding
    rule: str
    is_work: bool


@dataclass
class Trial:
    """What a case did on the GPU.

    Attributes:
        is_work: both ops of the finding are work of the device on one rank too.
        place: what the delay was put before; ``hits``: how often.
        wrong: the first wrong number with the delay; None if all were right.
        wrong_undelayed: the same without any delay.
        raised: what the run raised instead of ending.
    """

    program: str
    site: str
    rule: str
    is_work: bool
    place: str
    hits: int = 0
    wrong: str | None = None
    wrong_undelayed: str | None = None
    raised: str | None = None


# ---------------------------------------------------------------------- on simulated ranks


def cases_of(name: str) -> list[Case]:
    """Break each site that a program reaches, and return those that are a race or reuse of memory."""
    subject, program = find(SUBJECT), SpecProgram(name, kept()[name])
    clean = attempt(subject, program)
    known = {finding.message for finding in clean.findings}
    cases = []
    for site in sorted(clean.uses):
        if site.verb is Verb.RELEASE:
            continue
        outcome = attempt(subject, program, (site,), keeps_ops=True)
        new = [f for f in outcome.findings if f.kind in KINDS and f.message not in known]
        if new and outcome.trace is not None:
            ops = {op.index: op for op in outcome.trace.ops}
            found = [_case(name, site, finding, ops) for finding in new]
            cases.append(max(found, key=lambda case: case.is_work))
    return cases


def _case(name: str, site: Site, finding: Finding, ops: dict[int, Op]) -> Case:
    pair = [ops[each.index] for each in finding.ops]
    rule = finding.kind
    if finding.kind == REUSE:
        is_by_allocation = any(op.kind is Kind.ALLOC for op in pair)
        rule = f"{REUSE} {'by the next allocation' if is_by_allocation else 'on another stream'}"
    return Case(name, site, finding, rule, not any(map(is_no_work, pair)))


def is_no_work(op: Op) -> bool:
    """Whether an op is none of the device's on one rank: a collective whose result is where it was."""
    if op.kind is not Kind.COLLECTIVE:
        return False
    read, written = (
        {access[:3] for access in op.accesses if access.write is write} for write in (False, True)
    )
    return read == written


def chosen(cases: Sequence[Case]) -> list[Case]:
    """Return a few programs for each site, those first whose ops are both work on one rank."""
    count: Counter[Site] = Counter()
    taken = []
    for case in sorted(cases, key=lambda case: not case.is_work):
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
    return on_host(run)


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
    trial = Trial(case.program, str(case.site), case.rule, case.is_work, delay.place)
    try:
        trial.wrong_undelayed = _wrong(case)
        trial.wrong = _wrong(case, delay)
    except Exception as error:
        trial.raised = f"{type(error).__name__}: {error}"[:300]
    trial.hits = delay.hits
    return trial


def _wrong(case: Case, delay: Callable[[Place], float] | None = None) -> str | None:
    """Return the first wrong number of a broken program whose memory held NaN before."""
    fill_free_memory()
    return difference(case.program, run_once(case.program, delay, case.site))


def fill_free_memory() -> None:
    """Let free memory hold NaN, of whichever stream it is: by luck it holds what the last run left."""
    if not has_gpu():
        return
    torch.cuda.empty_cache()
    for stream in (torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(STREAMS))):
        with torch.cuda.stream(stream):
            [torch.full((SEGMENT_NBYTES // 8,), torch.nan, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()


def try_clean(task: tuple[str, int, int]) -> tuple[str, int, list[str]]:
    """Run an unbroken program under drawn delays; return how many there were, and what went wrong."""
    name, first, last = task
    hits, wrong = 0, []
    for seed in range(first, last):
        delay = AtRandom(seed, CHANCE, SHORT_DELAY_MS)
        fill_free_memory()
        differs = difference(name, run_once(name, delay))
        hits += delay.hits
        if differs is not None:
            wrong.append(f"seed {seed}: {differs}")
    return name, hits, wrong


def unlike_unsharded(name: str) -> str | None:
    """Return where an undisturbed run is not as the unsharded one says, as far as sums are exact."""
    return SpecProgram(name, kept()[name]).difference([undisturbed(name)])


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
        unlike = dict(zip(names, pool.map(unlike_unsharded, names)))
    rows: dict[str, object] = {
        "broken": _rates(trials),
        "clean": {
            "programs": len(names),
            "unlike the unsharded run on a CPU": {n: text for n, text in unlike.items() if text},
            "placements of each": placements,
            "delays": sum(hits for _, hits, _ in clean),
            "wrong": [f"{name} {line}" for name, _, wrong in clean for line in wrong],
        },
    }
    print(json.dumps(rows, indent=1))
    return rows | {"trials": [asdict(trial) for trial in trials]}


def _rates(trials: Sequence[Trial]) -> dict[str, object]:
    """Return the share of findings that went wrong, by rule."""
    rates: dict[str, object] = {}
    for rule in sorted({trial.rule for trial in trials}):
        of_rule = [trial for trial in trials if trial.rule == rule]
        rates[rule] = {
            "cases": len(of_rule),
            "sites": len({trial.site for trial in of_rule}),
            "wrong with the delay": sum(trial.wrong is not None for trial in of_rule),
            "wrong without": sum(trial.wrong_undelayed is not None for trial in of_rule),
            "raised": sum(trial.raised is not None for trial in of_rule),
            "not confirmed": [_line(trial) for trial in of_rule if trial.wrong is None],
        }
    return rates


def _line(trial: Trial) -> str:
    why = "" if trial.is_work else "a collective in place, which one rank does not run; "
    delayed = f"delayed {trial.place} ({trial.hits} times)"
    return f"{trial.program}: {trial.site}; {why}{trial.raised or delayed}"
