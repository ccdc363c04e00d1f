"""Titled notes: each one that is cited exists, once."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("fsdp_core", "fsdp_sim", "examples", "ci")
CITATION = re.compile(r"[Ss]ee\s+(?:#\s*)?Note\s+\[([^\]]+)\]")
TITLE = re.compile(r"^\s*(?:#\s*|\"\"\")?Note \[([^\]]+)\]", re.MULTILINE)


def sources() -> list[str]:
    """Return the text of every source file."""
    return [
        file.read_text() for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))
    ]


def test_cited_notes_exist() -> None:
    """`See Note [title]` leads somewhere."""
    cited = {title for text in sources() for title in CITATION.findall(text)}
    titles = {title for text in sources() for title in TITLE.findall(text)}

    assert cited <= titles


def test_a_note_has_one_place() -> None:
    """No two notes have one title."""
    titles = [title for text in sources() for title in TITLE.findall(text)]

    assert len(titles) == len(set(titles))
