"""Sanitizer: PyTorch's own CUDA sanitizer on the programs whose findings are confirmed with delays."""

import json
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from tempfile import TemporaryDirectory
from typing import Any

from ci.gpu.breaking import broken
from ci.gpu.findings import KINDS, SUBJECT, Case, all_cases, start, workers
from ci.gpu.process import device, has_gpu
from ci.gpu.programs import kept
from fsdp_sim.mutation.site import Site
from fsdp_sim.mutation.subject import find
from fsdp_sim.program import run_program

RAISED = "raised"


def start_sanitized(folder: str) -> None:
    """Join a process group of this process alone, and switch the sanitizer on for good."""
    start(folder)
    if has_gpu():
        _sanitizer().enable_cuda_sanitizer()


def _sanitizer() -> Any:
    """Import the sanitizer: from then on PyTorch calls Python at every event, stream and block of memory."""
    from torch.cuda import _sanitizer as module

    return module


def alarm(name: str, site: Site | None = None) -> str | None:
    """Return what the sanitizer says of a program; None if nothing."""
    breaking = nullcontext() if site is None else broken(find(SUBJECT), site)
    try:
        with warnings.catch_warnings(), breaking:
            warnings.simplefilter("ignore")
            run_program(kept()[name], device())
    except Exception as error:
        if isinstance(error, _sanitizer().CUDASanitizerErrors):
            return str(error.errors[0])[:600]
        return f"{RAISED} {type(error).__name__}: {error}"[:300]
    return None


def alarm_of(case: Case) -> str | None:
    """Return what the sanitizer says of a broken program."""
    return alarm(case.program, case.site)


def run(names: Sequence[str] = ()) -> dict[str, object]:
    """Return how often both say that a broken program is wrong, and alarms on unbroken ones."""
    names = names or [*kept()]
    cases = all_cases(names)
    with TemporaryDirectory() as folder, workers(folder, start_sanitized) as pool:
        clean = dict(zip(names, pool.map(alarm, names)))
        alarms = list(pool.map(alarm_of, cases))
    rows: dict[str, object] = {
        "unbroken programs": len(names),
        "alarms on unbroken programs": {n: text for n, text in clean.items() if text is not None},
        "broken programs": {kind: _agreement(kind, cases, alarms) for kind in KINDS},
    }
    print(json.dumps(rows, indent=1))
    return rows


def _agreement(kind: str, cases: Sequence[Case], alarms: Sequence[str | None]) -> dict[str, object]:
    """Return how many programs of a kind of finding the sanitizer flags too."""
    pairs = [(case, text) for case, text in zip(cases, alarms) if case.finding.kind == kind]
    raised = [text for _, text in pairs if text is not None and text.startswith(RAISED)]
    alone = [f"{case.program}: {case.site}" for case, text in pairs if text is None]
    return {
        "flagged by the simulator": len(pairs),
        "flagged by both": len(pairs) - len(raised) - len(alone),
        "raised": raised,
        "by the simulator alone": alone,
    }
