"""docs/cases.md: every case has its row, and every row its test."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (B\d\d) .*\| `(test_\w+\.py)` \| \d+\.\d+\.\d+ \|$", re.MULTILINE)


def rows() -> list[tuple[str, str]]:
    """Return number and test of each row."""
    return ROW.findall((ROOT / "docs" / "cases.md").read_text())


def test_every_row_names_a_test_of_its_number() -> None:
    """And the test is there."""
    for number, name in rows():
        assert name.startswith(f"test_{number.lower()}_")
        assert (ROOT / "tests" / "cases" / name).exists(), name


def test_every_case_has_one_row() -> None:
    """In order of their numbers."""
    files = sorted(file.name for file in (ROOT / "tests" / "cases").glob("test_b*.py"))

    assert [name for _, name in rows()] == files
