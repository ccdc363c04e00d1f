"""Pages: the code, the commands and the outputs of a page of the docs, run in order as a reader would."""

import doctest
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE_NAME = re.compile(r"# (\S+\.py)\n")
VARYING = (
    r"\b((?:op|block|event|step|min|mean|max) )\d+(?:\.\d+)?",
    r"(torch/\S+\.py:)\d+",
    r"( in )\d+\.\d+(?=s\b)",
    r"\b(digest:? )[0-9a-f]{32}\b",
    r"(;)\d+>\d+(?:;\d+>\d+)*",
)
"""Numbers that differ between versions of PyTorch, and times, each behind what is before it."""
PICTURE = re.compile(r"!\[[^]]*\]\((pictures/(\S+\.svg))\)")


class Command(NamedTuple):
    """A command line and what it prints."""

    line: str
    output: str


def run_page(page: Path, folder: Path, run: Callable[[str], str]) -> Iterator[tuple[Command, str]]:
    """Write a page's files and run its commands; give each command with what it really printed.

    Args:
        page: Markdown; a block of Python that begins with a comment of a file's name is that file, a
            console block is commands with their outputs.
        folder: where the files go, and where commands are to run.
        run: runs one command line and returns what it prints.
    """
    for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        name = FILE_NAME.match(text)
        if kind == "python" and name is not None:
            (folder / name[1]).write_text(text, encoding="utf-8")
        for command in commands(text) if kind == "console" else ():
            yield command, run(command.line)


def commands(text: str) -> Iterator[Command]:
    """Give the commands of a console block."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, _, output = part.partition("\n")
        yield Command(line, output)


def agree(said: str, printed: str) -> bool:
    """Whether a page's output is what was printed; ``...`` stands for anything.

    Numbers count, but for those that differ between versions of PyTorch, and times.
    """
    return doctest.OutputChecker().check_output(
        without_varying_numbers(said).strip(),
        without_varying_numbers(printed).strip(),
        doctest.ELLIPSIS,
    )


def without_varying_numbers(text: str) -> str:
    """Return a text with a sign for each number that may differ from run to run or between versions."""
    for pattern in VARYING:
        text = re.sub(pattern, r"\1#", text)
    return text


def words_of(picture: Path) -> set[str]:
    """Return what is written in an SVG file, but for varying numbers and lines of PyTorch's files."""
    texts = re.findall(r">([^<>]+)</text>", picture.read_text("utf-8"))
    return {without_varying_numbers(text) for text in texts if "torch/" not in text}
