"""Results of a mutation as a table for people and as JSON for programs."""

import json
from collections.abc import Iterator
from pathlib import PurePath

from rich.table import Table

from fsdp_sim.mutation.campaign import Campaign, Mutant, Survivor
from fsdp_sim.mutation.proof import proof_lines
from fsdp_sim.mutation.site import BREAKS

_STYLES = {"killed": "green", "survived": "yellow", "error": "red"}


def to_json(campaign: Campaign) -> str:
    """Return ``{"mutants": [{"site", "break", "status", "killed_by", "program", "runs"}]}``."""
    return json.dumps({"mutants": [_record(mutant) for mutant in campaign.mutants]}, indent=1)


def _record(mutant: Mutant) -> dict[str, str | int | None]:
    return {
        "site": _place(mutant),
        "break": _break(mutant),
        "status": mutant.status,
        "killed_by": mutant.finding.kind if mutant.finding is not None else None,
        "program": mutant.program,
        "runs": mutant.runs,
    }


def _place(mutant: Mutant) -> str:
    if mutant.change is not None:
        return mutant.change.place
    return " + ".join(f"{site.file}:{site.line}" for site in mutant.sites)


def _shown(mutant: Mutant) -> str:
    if mutant.change is not None:
        return PurePath(mutant.change.place).name
    return " + ".join(f"{PurePath(site.file).name}:{site.line}" for site in mutant.sites)


def _break(mutant: Mutant) -> str:
    if mutant.change is not None:
        return mutant.change.name
    return " + ".join(f"drop {site.verb}" for site in mutant.sites)


def to_table(campaign: Campaign) -> Table:
    """Return one row for each break."""
    table = Table(title="Breaks of synchronisation", title_justify="left")
    for name in ("site", "break", "status", "killed by", "program"):
        table.add_column(name, overflow="fold")
    table.add_column("runs", justify="right")
    for mutant in campaign.mutants:
        if len(mutant.sites) > 1 and mutant.status == "survived":
            continue  # that two survivors survive together is no news
        status = f"[{_STYLES[mutant.status]}]{mutant.status}[/]"
        table.add_row(
            _place(mutant),
            _break(mutant),
            status,
            _cause(mutant),
            mutant.program or "",
            str(mutant.runs),
        )
    return table


def _cause(mutant: Mutant) -> str:
    if mutant.error is not None:
        return f"{type(mutant.error).__name__}: {mutant.error}".splitlines()[0]
    if mutant.finding is None:
        return ""
    places = [site.source for site in mutant.finding.ops if site.source is not None]
    shown = ", ".join(f"{PurePath(source.file).name}:{source.line}" for source in places)
    return f"{mutant.finding.kind}  {shown}"


def summary(campaign: Campaign) -> str:
    """Return the numbers in one line."""
    singles = [mutant for mutant in campaign.mutants if len(mutant.sites) == 1]
    counts = {status: sum(m.status == status for m in singles) for status in _STYLES}
    redundant = sum(survivor.is_redundant for survivor in campaign.survivors)
    line = (
        f"{len(singles)} sites: {counts['killed']} killed, {counts['survived']} survived "
        f"({redundant} redundant in every program), {counts['error']} errors"
    )
    changes = [mutant for mutant in campaign.mutants if mutant.change is not None]
    if changes:
        line += f"; {len(changes)} known bugs: {sum(m.status == 'killed' for m in changes)} killed"
    if campaign.unreached:
        line += f"; {len(campaign.unreached)} calls that no program makes"
    if campaign.untried_pairs:
        line += f"; {campaign.untried_pairs} pairs of survivors were not tried"
    return line


def survivor_lines(survivor: Survivor) -> Iterator[str]:
    """Give a survivor's proof, program by program."""
    site = survivor.site
    yield f"{site}: {BREAKS[site.verb]}"
    if survivor.partners:
        yield f"  needed where one of these is missing: {', '.join(map(str, survivor.partners))}"
    else:
        yield "  redundant in every program"
    yield from (f"  {line}" for line in proof_lines(site.verb, survivor.proofs))
