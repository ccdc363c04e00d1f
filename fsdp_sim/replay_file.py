"""Replay files: what failed, under which schedule, as JSON; loading one executes nothing.

A file names its subject - a program as data, a test, or a script - and holds the schedule line, the
failure that is expected, the digests of the run and the versions that made it.
"""

import ast
import dataclasses
import json
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from fsdp_sim.errors import ConfigError, FindingError
from fsdp_sim.program.codec import (
    dump_program,
    load_program,
    program_from_data,
    program_to_data,
)
from fsdp_sim.program.schema import SchemaError, from_data, load_json, to_data
from fsdp_sim.program.spec import ProgramSpec
from fsdp_sim.schedule import Schedule
from fsdp_sim.trace_file import is_trace

VERSION = 1
MESSAGE_LENGTH_MAX = 2000

_NODE = re.compile(r"[^-/][^\0\n]*\.py::[^\0\n]+")


@dataclass(frozen=True)
class Argument:
    """An argument that was drawn for a test: a Python literal, or a program as JSON."""

    name: str
    kind: Literal["literal", "program"]
    value: str


@dataclass(frozen=True)
class PytestNode:
    """A test as the subject of a replay.

    Attributes:
        node: as pytest names it, relative to its root folder.
        call: which of the test's simulations failed, counted from 0.
        arguments: what Hypothesis drew; None if a value cannot be written down, so that only its own
            database can bring it back.
    """

    node: str
    call: int
    arguments: tuple[Argument, ...] | None


@dataclass(frozen=True)
class ScriptCall:
    """A script and its command line as the subject of a replay."""

    path: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Expected:
    """The failure: its kind (a finding, or the class of an exception) and what it said."""

    kind: str
    message: str


@dataclass(frozen=True)
class Versions:
    """What the file was made with."""

    fsdp_sim: str
    torch: str
    python: str


@dataclass(frozen=True)
class ReplayFile:
    """All that it takes to see a failure again.  Exactly one of the three subjects is there.

    Attributes:
        schedule: the line that ``fsdp_sim.replay`` takes.
        digest: of the trace; the same wherever code, torch's minor version and device type are.
        order_digest: of its ordering alone; survives a refactoring.
    """

    schedule: str
    expected: Expected
    digest: str
    order_digest: str
    versions: Versions
    program: ProgramSpec | None = None
    test: PytestNode | None = None
    script: ScriptCall | None = None


def dump(replay: ReplayFile) -> str:
    """Return the file's text."""
    data = {"version": VERSION, **to_data(replay)}
    if replay.program is not None:
        data["program"] = program_to_data(replay.program)
    return json.dumps(data, indent=1) + "\n"


def load(text: str) -> ReplayFile:
    """Return what ``dump`` wrote.

    Raises:
        SchemaError: not JSON, truncated, of another version, or with a field that is unknown, missing
            or of another type; it names the field.
        ConfigError: the schedule or the program says something impossible.
    """
    data = load_json(text)
    if not isinstance(data, dict):
        raise SchemaError("", f"must be an object (a replay file), got {type(data).__name__}")
    _check_version(data.pop("version", None))
    program = data.get("program")
    replay = from_data(ReplayFile, data if program is None else {**data, "program": None})
    if program is not None:  # it has a version of its own
        replay = dataclasses.replace(replay, program=program_from_data(program, "program"))
    Schedule.parse(replay.schedule)
    _check_subject(replay)
    return replay


def read(path: str | Path) -> ReplayFile:
    """Load the file at ``path``.

    Raises:
        ConfigError: there is no such file, it is not text, or ``load`` refuses it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"a replay file must be a readable file of text, got {path}: {error}"
        ) from None
    if is_trace(text):
        raise ConfigError(
            f"{path} must be a replay file, got a trace; read it with fsdp-sim check or fsdp-sim trace"
        )
    try:
        return load(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _check_version(version: object) -> None:
    if type(version) is not int:
        raise SchemaError("version", f"must be the whole number {VERSION}, got {version!r}")
    if version != VERSION:
        advice = "update fsdp_sim" if version > VERSION else "make the file anew"
        raise SchemaError("version", f"must be {VERSION}, got {version}; {advice}")


def _check_subject(replay: ReplayFile) -> None:
    subjects = [s for s in ("program", "test", "script") if getattr(replay, s) is not None]
    if len(subjects) != 1:
        got = " and ".join(subjects) or "none"
        raise SchemaError("", f"must have one of program, test and script, got {got}")
    if replay.test is not None:
        node = replay.test.node
        if not _NODE.fullmatch(node) or ".." in Path(node.partition("::")[0]).parts:
            raise SchemaError(
                "test.node",
                f"must be a test below the root folder (tests/test_a.py::test_b), got {node!r}",
            )
        if replay.test.call < 0:
            raise SchemaError("test.call", f"must not be negative, got {replay.test.call}")
        for argument in replay.test.arguments or ():
            decode(argument)


# ---------------------------------------------------------------------- what was drawn


def encode(arguments: dict[str, Any]) -> tuple[Argument, ...] | None:
    """Return drawn arguments in the form of a file; None if one of them cannot be written down."""
    encoded = [_encode(name, value) for name, value in arguments.items()]
    known = tuple(argument for argument in encoded if argument is not None)
    return known if len(known) == len(encoded) else None


def _encode(name: str, value: Any) -> Argument | None:
    if isinstance(value, ProgramSpec):
        return Argument(name, "program", dump_program(value))
    text = repr(value)
    try:
        is_faithful = repr(ast.literal_eval(text)) == text and _is_plain(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return Argument(name, "literal", text) if is_faithful else None


def _is_plain(value: Any) -> bool:
    """Whether a value is made of Python's own types alone, not of classes that print like them."""
    if type(value) in (list, tuple, set):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, complex, str, bytes)


def decode(argument: Argument) -> Any:
    """Return an argument's value; nothing is executed.

    Raises:
        ConfigError: it is neither a Python literal nor a program.
    """
    if argument.kind == "program":
        return load_program(argument.value)
    try:
        return ast.literal_eval(argument.value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise SchemaError(
            f"test.arguments.{argument.name}",
            f"must be a Python literal, got {argument.value[:60]!r}",
        ) from None


# ---------------------------------------------------------------------- making and judging


def versions() -> Versions:
    """Return the versions in use."""
    python = ".".join(map(str, sys.version_info[:3]))
    return Versions(metadata.version("fsdp-sim"), metadata.version("torch"), python)


def failure_of(error: BaseException) -> Expected:
    """Return a failure's kind and what it says first."""
    finding = getattr(error, "finding", None)
    kind = finding.kind if finding is not None else type(error).__name__
    text = finding.message if finding is not None else str(error)
    return Expected(kind, text[:MESSAGE_LENGTH_MAX])


def of_failure(error: BaseException, **subject: Any) -> ReplayFile:
    """Return the replay file of what ``simulate`` or ``explore`` raised.

    Args:
        error: as raised, with its schedule and trace.
        subject: ``program``, ``test`` or ``script``.
    """
    trace: Any = getattr(error, "trace", None)
    return ReplayFile(
        schedule=str(error.schedule),  # type: ignore[attr-defined]
        expected=failure_of(error),
        digest=trace.digest,
        order_digest=trace.order_digest,
        versions=versions(),
        **subject,
    )


def verdict(replay: ReplayFile, error: BaseException | None) -> str:
    """Say how a replay that followed the whole schedule compares with what the file expects.

    Args:
        replay: the file.
        error: what the replay raised; None for a clean run.
    """
    if error is None:
        return (
            f"the schedule fits and the run is clean: {replay.expected.kind} did not come up, "
            "so the code or its versions have changed" + _changes(replay)
        )
    found = failure_of(error)
    if found.kind != replay.expected.kind:
        return f"expected {replay.expected.kind}, got {found.kind}: {found.message}"
    what = "finding" if isinstance(error, FindingError) else "failure"
    trace = getattr(error, "trace", None)
    if trace is not None and trace.digest == replay.digest:
        return f"the same {what} came up ({found.kind}), with the same digest"
    is_same_order = trace is not None and trace.order_digest == replay.order_digest
    digest = "the same order_digest" if is_same_order else "another order_digest"
    return f"the same {what} came up ({found.kind}), with {digest}" + _changes(replay)


def _changes(replay: ReplayFile) -> str:
    """Name the versions that differ from the file's."""
    now, then = versions(), replay.versions
    changed = [
        f"{name} {getattr(then, name)} is now {getattr(now, name)}"
        for name in ("fsdp_sim", "torch", "python")
        if getattr(then, name) != getattr(now, name)
    ]
    return f" ({'; '.join(changed)})" if changed else ""
