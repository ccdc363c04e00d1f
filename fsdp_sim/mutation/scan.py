"""Scan: calls of a package that look like synchronisation in its source, to name those never reached."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from fsdp_sim.mutation.site import Site
from fsdp_sim.mutation.subject import Subject

NAMES = frozenset(
    {
        *("wait_stream", "wait_event", "wait_ready", "record_event", "on_stream"),
        *("keep_alive", "let_go", "record_stream"),
    }
)
"""Names that mean nothing else, on whatever object they are called."""


def unreached(subject: Subject, sites: Iterable[Site]) -> list[str]:
    """Return ``file:line name`` of each such call that is no site, because no program has made it.

    Args:
        subject: the package.
        sites: those that were reached.
    """
    lines = {(site.file, site.line) for site in sites}
    found = []
    for file in _sources(subject):
        name = str(file.relative_to(subject.root))
        for called, first, last in _calls(ast.parse(file.read_text(encoding="utf-8"))):
            if not any((name, line) in lines for line in range(first, last + 1)):
                found.append(f"{name}:{first} {called}")
    return found


def _sources(subject: Subject) -> list[Path]:
    files = sorted(subject.home.rglob("*.py")) if subject.home.is_dir() else [subject.home]
    return [file for file in files if file not in subject.seams]


def _calls(tree: ast.AST) -> Iterator[tuple[str, int, int]]:
    """Give the name and the lines of each call, in order of line."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for node in sorted(calls, key=lambda node: node.lineno):
        name = getattr(node.func, "attr", getattr(node.func, "id", None))
        if name in NAMES:
            yield name, node.lineno, node.end_lineno or node.lineno
