"""The tutorial and the page on reports: their code, commands, outputs and pictures are real."""

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

import fsdp_sim.exploration  # noqa: F401  torch must be loaded before pytester takes its snapshot
from ci.pages import PICTURE, agree, run_page, words_of
from fsdp_sim.cli import main

pytest_plugins = ["pytester"]

DOCS = Path(__file__).parents[2] / "docs"


def run(pytester: pytest.Pytester, line: str) -> str:
    """Run one command of a page in this process and return what it prints."""
    program, *arguments = shlex.split(line)
    if program == "fsdp-sim":
        result = CliRunner().invoke(main, arguments)
        return result.stdout + result.stderr
    assert program == "pytest", line
    fresh = ("-p", "no:cacheprovider", "-p", "no:xdist", *arguments)
    return pytester.runpytest_inprocess(*fresh).stdout.str()


@pytest.mark.parametrize("name", ["reports.md", "tutorial.md"])
def test_a_page_says_what_its_commands_print(name: str, pytester: pytest.Pytester) -> None:
    """Every output on the page is what comes out, and every picture what is drawn."""
    drawn: list[set[str]] = []
    for command, printed in run_page(DOCS / name, pytester.path, lambda line: run(pytester, line)):
        assert agree(command.output, printed), f"{command.line}\n{printed}"
        drawn += [words_of(picture) for picture in pytester.path.rglob("*.svg")]

    pictures = PICTURE.findall((DOCS / name).read_text())
    assert pictures
    for path, _ in pictures:
        assert words_of(DOCS / path) in drawn, f"{path} must be what the page's commands draw"


def test_only_numbers_that_vary_may_differ_from_a_page() -> None:
    """Operations are counted otherwise by another version of PyTorch; ranks, bytes and lines are not."""
    said = (
        "op 5  sum  on stream 0 of rank 1\n  bytes [0, 4) of block 3\n  a.py:7\n1 failed in 0.52s"
    )

    assert agree(
        said, said.replace("op 5", "op 6").replace("0.52", "1.1").replace("block 3", "block 4")
    )
    for number, other in (
        ("stream 0", "stream 1"),
        ("rank 1", "rank 0"),
        ("4)", "8)"),
        (":7", ":8"),
    ):
        assert not agree(said, said.replace(number, other))
