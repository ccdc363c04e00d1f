"""What a failed test shows and leaves behind: a block of three lines, a replay file, a timeline and a picture."""

import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_sim.errors import SimulationError
from fsdp_sim.follow import command
from fsdp_sim.replay_file import (
    PytestNode,
    ReplayFile,
    dump,
    encode,
    failure_of,
    of_failure,
    verdict,
)
from fsdp_sim.statistics import Statistics
from fsdp_sim.verbs import replay
from fsdp_sim.views.report import error_text, shorten

if TYPE_CHECKING:
    from fsdp_sim.exploration import Exploration
    from fsdp_sim.testing import Failure, Scope

NAME_LENGTH_MAX = 100
ARGUMENTS_LENGTH_MAX = 400
ANOTHER_RUN = (
    "no timeline: a second run of the same schedule was another one; "
    "the program keeps state between runs, or depends on what the simulator does not control"
)


def failures(error: BaseException) -> Iterator[BaseException]:
    """Give each failure of a ``check`` in an exception, which may be a group of them."""
    if getattr(error, "fsdp_sim_failure", None) is not None:
        yield error
    elif isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from failures(inner)


def plain_text(error: BaseException) -> str | None:
    """Return what a simulation raised, without a traceback, which would show the simulator alone."""
    if not isinstance(error, SimulationError):
        return None
    return "\n".join([error_text(error), *getattr(error, "__notes__", ())])


def failure_block(error: BaseException, folder: Path, root: Path, *, last_ops: int = 0) -> str:
    """Return what failed, its smallest form and the command that replays it; write the files.

    Args:
        error: as ``check`` raised it.
        folder: of all artefacts; this failure gets one below it.
        root: folder where pytest is started, to which the command is relative.
        last_ops: how many of the last operations to show.
    """
    place: Failure = error.fsdp_sim_failure  # type: ignore[attr-defined]
    if getattr(error, "trace", None) is None or getattr(error, "schedule", None) is None:
        return f"{type(error).__name__}: raised before a run could be recorded; there is nothing to replay"
    replay_file = _replay_file(error, place)
    own = _own_folder(folder, place)
    path = own / "replay.json"
    path.write_text(dump(replay_file), encoding="utf-8")
    shown = path.relative_to(root) if path.is_relative_to(root) else path
    expected = failure_of(error)
    lines = [
        f"{expected.kind}: {shorten(expected.message).splitlines()[0] if expected.message else ''}",
        f"smallest: {replay_file.schedule}{_search_size(error)}{_drawn(place)}",
        f"replay with: {command(replay_file, str(shown))}",
    ]
    lines += _draw(error, place, own)
    if last_ops:
        lines += ["last operations:", *_last_operations(error, last_ops)]
    return "\n".join(lines)


def _replay_file(error: BaseException, place: "Failure") -> ReplayFile:
    """Return the file; a program that a test drew in a form of its own stands for itself."""
    arguments = encode(place.arguments)
    if place.program is not None and (arguments is None or place.node is None):
        return of_failure(error, program=place.program)
    assert place.node is not None, "only the plugin asks for a block"
    return of_failure(error, test=PytestNode(place.node, place.call, arguments))


def _own_folder(folder: Path, place: "Failure") -> Path:
    """Make the folder of one test's failure; the folder of all is ignored by git."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", place.node or "program").strip("-")
    if len(name) > NAME_LENGTH_MAX:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        name = f"{name[: NAME_LENGTH_MAX - 9]}-{digest}"
    own = folder / name
    own.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n", encoding="utf-8")
    return own


def _search_size(error: BaseException) -> str:
    search: Exploration | None = getattr(error, "exploration", None)
    if search is None or not search.shrunk_from:
        return ""
    return f" (from {search.shrunk_from} deviations, after {search.schedules} schedules)"


def _drawn(place: "Failure") -> str:
    """Return the drawn arguments as one line."""
    arguments = dict(place.arguments)
    if place.program is not None and place.program not in arguments.values():
        arguments["program"] = place.program
    if not arguments:
        return ""
    text = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    if len(text) > ARGUMENTS_LENGTH_MAX:
        text = text[: ARGUMENTS_LENGTH_MAX - 1] + "…"
    return f"  {text}"


def _draw(error: BaseException, place: "Failure", own: Path) -> list[str]:
    """Run the failure once more to keep all its operations; a second run that differs is worth a line."""
    from fsdp_sim.views.finding_picture import draw_finding

    trace: Any
    try:
        options = {**place.options, "args": place.args, "trace": True, "strict": False}
        with (
            redirect_stdout(StringIO()),
            redirect_stderr(StringIO()),
        ):  # it was shown the first time
            trace = replay(place.fn, str(error.schedule), **options).trace  # type: ignore[attr-defined]
    except Exception as again:
        trace = getattr(again, "trace", None)
    if trace is None or trace.digest != error.trace.digest:  # type: ignore[attr-defined]
        return [ANOTHER_RUN]
    trace.to_chrome(own / "timeline.json")
    for finding in error.report.findings[:1]:  # type: ignore[attr-defined]
        draw_finding(trace.ops, finding, trace.world_size, own / "picture.svg")
    return []


def _last_operations(error: BaseException, count: int) -> Iterable[str]:
    text: str = error.trace.to_text()  # type: ignore[attr-defined]
    return text.splitlines()[-count:]


# ---------------------------------------------------------------------- statistics


def statistics(search: "Exploration") -> dict[str, Any]:
    """Return what a search did, as plain data."""
    return asdict(search.statistics)


def summary_lines(all_statistics: list[dict[str, Any]]) -> list[str]:
    """Sum the searches of all tests up in one line, and one for what none of them exercised."""
    total = sum((Statistics(**each) for each in all_statistics), Statistics())
    return f"fsdp_sim: {len(all_statistics)} checks, {total}".splitlines()


def replay_lines(here: "Scope") -> list[str]:
    """Say what came of a replay, if there was one."""
    if here.replay is None:
        return []
    if not here.is_replayed:
        assert here.replay.test is not None
        number = here.replay.test.call
        return [
            f"fsdp_sim replay: nothing was replayed: the test has no simulation number {number}"
        ]
    outcome = here.outcome
    if outcome is not None and type(outcome).__name__ == "Diverged":
        return [f"fsdp_sim replay: diverged: {outcome}"]
    return [f"fsdp_sim replay: {verdict(here.replay, outcome)}"]
