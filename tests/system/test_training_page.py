"""docs/training.md: every block of code runs, and every public name is explained."""

import re
from dataclasses import fields
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import fsdp_core
import fsdp_sim
from fsdp_core import MixedPrecisionPolicy, Placements, RuntimePolicy, SchedulePolicy
from fsdp_core.context_stats import ContextStats

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
WORLD_SIZE = 4
SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> dict[str, list[CodeType]]:
    """Return the blocks of each section, compiled so that errors show the page's own lines."""
    found: dict[str, list[CodeType]] = {title: [] for title in SECTION.findall(PAGE)}
    for block in BLOCK.finditer(PAGE):
        title = SECTION.findall(PAGE[: block.start()])[-1]
        lines_before = PAGE[: block.start(1)].count("\n")
        found[title].append(compile("\n" * lines_before + block[1], "docs/training.md", "exec"))
    return found


BLOCKS = blocks()
SETUP = BLOCKS["From one process to many"]


@pytest.mark.parametrize("title", [title for title in BLOCKS if BLOCKS[title] not in ([], SETUP)])
def test_blocks_of_a_section_run(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After those of the first one, on simulated ranks, with every check of the simulator."""
    monkeypatch.chdir(tmp_path)

    def program(rank: int) -> dict[str, Any]:
        namespace: dict[str, Any] = {"__name__": "training"}
        for block in [*SETUP, *BLOCKS[title]]:
            exec(block, namespace)
        return namespace

    fsdp_sim.simulate(program, WORLD_SIZE)


def test_every_public_name_and_policy_field_is_on_the_page() -> None:
    """As code, so that a search for it ends here."""
    records = (Placements, MixedPrecisionPolicy, RuntimePolicy, SchedulePolicy, ContextStats)
    names = [*fsdp_core.__all__, *(field.name for each in records for field in fields(each))]
    code = BLOCK.findall(PAGE) + re.findall(r"`(.+?)`", BLOCK.sub("", PAGE))
    words = set(re.findall(r"\w+", " ".join(code)))

    assert [name for name in names if name not in words] == []


def test_links_to_sections_lead_somewhere() -> None:
    """Each names a heading as GitHub does: in lower case, hyphens for spaces, no other signs."""
    anchors = {re.sub(r"[^\w-]", "", title.lower().replace(" ", "-")) for title in BLOCKS}

    assert set(re.findall(r"\]\(#(.+?)\)", PAGE)) <= anchors
