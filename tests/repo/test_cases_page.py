"""docs/cases.md: every case has its row, and every row its test."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "cases"
ROW = re.compile(
    r"^\| (B\d\d) .*\| `(test_\w+\.py)`(, `test_on_processes\.py`)? \| \d+\.\d+\.\d+ \|$",
    re.MULTILINE,
)


def rows() -> list[tuple[str, str, str]]:
    """Return number and test of each row, and what it says of real processes."""
    return ROW.findall((ROOT / "docs" / "cases.md").read_text())


def test_every_row_names_a_test_of_its_number() -> None:
    """And the test is there."""
    for number, name, _ in rows():
        assert name.startswith(f"test_{number.lower()}_")
        assert (CASES / name).exists(), name


def test_every_case_has_one_row() -> None:
    """In order of their numbers."""
    files = sorted(file.name for file in CASES.glob("test_b*.py"))

    assert [name for _, name, _ in rows()] == files


def test_the_rows_that_run_on_processes_say_so() -> None:
    """Those whose programs that file imports."""
    text = (CASES / "test_on_processes.py").read_text()
    imported = [f"{name}.py" for name in re.findall(r"tests\.cases\.(test_b\w+)", text)]

    assert [name for _, name, on_processes in rows() if on_processes] == imported
