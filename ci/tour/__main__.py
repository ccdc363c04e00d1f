"""Train sharded on simulated ranks, compare with the unsharded run, catch two bugs, draw a timeline."""

import argparse
import hashlib
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

import fsdp_sim
from ci.tour import bugs
from ci.tour.figures import findings_of_steps, step_figures
from ci.tour.reference import train_at_once, train_in_turn
from ci.tour.simulated import Trained, train_on_rank, whole_weights
from examples.train_lm import make_model, parse
from fsdp_sim.views.picture import draw
from fsdp_sim.views.report import finding_text

RANKS = 4
STEPS = 24
OUTPUT = Path("out")
KIB = 1024

console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    """Run the whole demo; return 0 only when everything is as promised."""
    torch.set_num_threads(1)
    OUTPUT.mkdir(exist_ok=True)
    options = parse(["--steps", str(STEPS)])
    console.rule("[bold]1  one model, trained sharded and unsharded")
    report, losses, weights, at_once = train_everywhere(options)
    promises = [
        show_losses(report.results, losses, weights, at_once),
        show_figures(report),
    ]
    console.rule("[bold]2  a stream wait removed from the runtime")
    promises.append(show_missing_wait())
    console.rule("[bold]3  an order of collectives that depends on a query")
    promises.append(show_order_by_query())
    console.rule("[bold]4  a timeline")
    show_timeline(report)
    return 0 if all(promises) else 1


def train_everywhere(
    options: argparse.Namespace,
) -> tuple[fsdp_sim.Report, list[float], dict[str, Tensor], list[float]]:
    """Train on simulated ranks, unsharded in turn, and unsharded at once, behind a progress bar."""
    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        sharded = progress.add_task(f"sharded, {RANKS} simulated ranks", total=STEPS)
        report = fsdp_sim.simulate(
            train_on_rank,
            RANKS,
            args=(options, lambda: progress.advance(sharded)),
            strict=False,
            trace=True,
        )
        unsharded = progress.add_task("unsharded, each rank's batch in turn", total=STEPS)
        model, losses = make_model(options), list[float]()
        for loss in train_in_turn(model, options, RANKS):
            losses.append(loss)
            progress.advance(unsharded)
        whole = progress.add_task("unsharded, all batches at once", total=STEPS)
        at_once = list[float]()
        for loss in train_at_once(options, RANKS):
            at_once.append(loss)
            progress.advance(whole)
    return report, losses, dict(model.named_parameters()), at_once


def show_losses(
    of_ranks: list[Trained],
    losses: list[float],
    weights: dict[str, Tensor],
    at_once: list[float],
) -> bool:
    """Print the losses side by side; return whether losses and weights are equal bit for bit."""
    table = Table("step", "loss, sharded", "loss, unsharded", "bits", "all at once", "difference")
    sharded = of_ranks[0].losses
    for step, (mine, theirs, whole) in enumerate(zip(sharded, losses, at_once, strict=True)):
        bits = "equal" if mine == theirs else "[red]differ[/]"
        table.add_row(
            str(step),
            f"{mine:.9g}",
            f"{theirs:.9g}",
            bits,
            f"{whole:.9g}",
            f"{whole - theirs:+.1e}",
        )
    console.print(table)
    put_together = whole_weights(of_ranks)
    unequal = [
        name for name, weight in weights.items() if not torch.equal(weight, put_together[name])
    ]
    console.print(f"weights, sharded:   {weights_digest(put_together)}")
    console.print(f"weights, unsharded: {weights_digest(weights)}")
    console.print(
        f"losses fell from {losses[0]:.3f} to {losses[-1]:.3f}; "
        f"of {len(weights)} weights {len(unequal)} differ in any bit"
    )
    return sharded == losses and not unequal


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of all weights' bytes, in order of their names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(weights[name].detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def show_figures(report: fsdp_sim.Report) -> bool:
    """Print what the runtime did in each step; return whether nothing was found wrong."""
    of_ranks = [step_figures(report.trace.ops, rank) for rank in range(RANKS)]
    counts = findings_of_steps(report.findings, of_ranks)
    table = Table(
        "step", "gathers", "scatters", "ahead", "KiB on each rank", "findings", box=SIMPLE
    )
    for step, of_rank in enumerate(zip(*of_ranks, strict=True)):
        first = of_rank[0]
        memory = " ".join(f"{figures.peak_full_nbytes / KIB:.0f}" for figures in of_rank)
        table.add_row(
            *map(str, (step, first.all_gathers, first.reduce_scatters, first.ahead)),
            memory,
            str(counts[step] or "none"),
        )
    console.print(table)
    console.print("gathers, scatters: all-gathers and reduce-scatters that rank 0 issued")
    console.print("ahead: collectives of rank 0 that were issued before compute that they overlap")
    console.print("KiB: most memory that full parameters took at once")
    console.print(f"findings: {len(report.findings) or 'none'}")
    for finding in report.findings:
        console.print(finding_text(finding), markup=False)
    return not report.findings


def show_missing_wait() -> bool:
    """Show that the default schedule finds a missing wait; return whether it did."""
    console.print(f"like: fsdp-sim run --ranks {bugs.RANKS} {bugs.MISSING_WAIT}")
    report = bugs.run_in_order(bugs.MISSING_WAIT)
    if report.findings:
        show_report(report, bugs.MISSING_WAIT)
    return bool(report.findings)


def show_order_by_query() -> bool:
    """Show what only another schedule finds, and its replay; return whether all is as promised."""
    console.print(f"like: fsdp-sim run --ranks {bugs.RANKS} {bugs.ORDER_BY_QUERY}")
    first = bugs.run_in_order(bugs.ORDER_BY_QUERY)
    console.print(f"default schedule {first.schedule}: {len(first.findings) or 'no'} findings")
    console.print(f"\nlike: fsdp-sim explore --ranks {bugs.RANKS} {bugs.ORDER_BY_QUERY}")
    found = bugs.explore(bugs.ORDER_BY_QUERY)
    show_report(found, bugs.ORDER_BY_QUERY)
    command = bugs.replay_command(bugs.ORDER_BY_QUERY, found.schedule)
    console.print(f"\n$ PYTHONHASHSEED={bugs.OTHER_HASH_SEED} {shlex.join(command)}")
    output = bugs.replay_elsewhere(command)
    is_same = found.trace.digest in output
    console.print(f"digest here: {found.trace.digest}; there: {'the same' if is_same else output}")
    return is_same and not first.findings


def show_report(report: fsdp_sim.Report, script: str) -> None:
    """Print the first finding and how to replay it; what else follows from it is counted."""
    first, *others = (*report.findings, *report.notices)
    console.print(finding_text(first), markup=False)
    if others:
        kinds = ", ".join(f"{each.kind}{' (a notice)' * each.is_notice}" for each in others)
        console.print(f"and {len(others)} more that follow from it: {kinds}")
    for deviation in report.deviations:
        console.print(deviation, markup=False)
    line = shlex.join(bugs.replay_command(script, report.schedule))
    console.print(f"\nreplay with: {line}\ndigest: {report.trace.digest}")


def show_timeline(report: fsdp_sim.Report) -> None:
    """Write the timeline of the training and a picture of it, and say where they are."""
    timeline, picture = OUTPUT / "timeline.json", OUTPUT / "timeline.png"
    report.trace.to_chrome(timeline)
    draw(report.trace.ops, range(RANKS), picture)
    console.print(f"timeline (open it in Perfetto): {timeline}")
    console.print(
        f"picture of a gather, the compute it overlaps, the wait that joins them: {picture}"
    )


if __name__ == "__main__":
    sys.exit(main())
