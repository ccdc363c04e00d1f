"""Litmus: each rule of streams, events, collectives and memory, on the GPU under a delay and simulated."""

import torch

import fsdp_sim
from ci.gpu.process import device, has_gpu, one_process_group
from ci.gpu.programs import without_collector
from ci.gpu.rules import RULES, Bench, Body


def run() -> dict[str, object]:
    """Return, for each rule, whether the simulator and the GPU say what it says."""
    simulated = {name: not _findings(body) for name, (_, body) in RULES.items()}
    with one_process_group():
        values = {name: _value(body) for name, (_, body) in RULES.items()}
    rows = {}
    for name, (is_ordered, _) in RULES.items():
        rows[name] = {
            "ordered": is_ordered,
            "simulator says ordered": simulated[name],
            "on the GPU": values[name],
            "agree": is_ordered == simulated[name] == (values[name] == 1.0),
        }
        print(f"{'agree' if rows[name]['agree'] else 'DIFFER':7s}{values[name]!s:8s}{name}")
    disagreeing = [name for name, row in rows.items() if not row["agree"]]
    print(f"{len(rows) - len(disagreeing)} of {len(rows)} rules agree")
    return {"rules": len(rows), "disagreeing": disagreeing, "table": rows}


def _findings(body: Body) -> list[str]:
    def rank_program(_: int) -> None:
        body(Bench(torch.cpu, torch.device("cpu")))

    with without_collector():
        report = fsdp_sim.simulate(rank_program, 1, strict=False)
    return [finding.kind for finding in report.findings]


def _value(body: Body) -> float | str:
    module = torch.cuda if has_gpu() else torch.cpu
    try:
        with without_collector():
            body(Bench(module, device()))  # kernels are loaded
            if has_gpu():
                torch.cuda.empty_cache()  # no other block of a buffer's size is free
            return body(Bench(module, device()))
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
