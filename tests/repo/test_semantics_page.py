"""docs/semantics.md: every rule has a litmus test."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (?!rule |---)(.+?) \| `(test_\w+\.py)::(test_\w+)` \|$", re.MULTILINE)


def lines() -> list[str]:
    """Return the rows of the page's tables, without their heads."""
    text = (ROOT / "docs" / "semantics.md").read_text()
    return [
        line
        for line in text.splitlines()
        if line.startswith("|") and "| test |" not in line and not line.startswith("|---")
    ]


def functions_in(file: str) -> set[str]:
    """Return the names of the functions in a file of ``tests/sim``."""
    tree = ast.parse((ROOT / "tests" / "sim" / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_rule_has_a_test_that_exists() -> None:
    """A row is a rule and the name of its test."""
    rows = [ROW.match(line) for line in lines()]

    assert len(rows) > 0
    assert all(rows)
    assert [
        (row[2], row[3]) for row in rows if row is not None and row[3] not in functions_in(row[2])
    ] == []


def test_no_test_stands_for_two_rules() -> None:
    """A rule that has no test of its own is not tested."""
    names = [(row[2], row[3]) for row in map(ROW.match, lines()) if row is not None]

    assert len(names) == len(set(names))
