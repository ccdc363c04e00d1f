"""Chrome: a trace as the JSON that Perfetto and chrome://tracing show."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fsdp_sim.op import Op
from fsdp_sim.timeline import Join, Span, rank_timeline

UNIT_MICROSECONDS = 10
"""How wide one unit of a timeline is drawn; the simulator itself has no time."""


def write(path: str | Path, ops: Sequence[Op], world_size: int) -> None:
    """Write a timeline: one process a rank, one row a stream, one arrow a wait.

    Args:
        path: where to.
        ops: in order of issue.
        world_size: number of ranks.
    """
    events = [event for rank in range(world_size) for event in _rank_events(ops, rank)]
    document = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "distributedInfo": {"backend": "sim", "rank": 0, "world_size": world_size},
        "traceEvents": events,
    }
    Path(path).write_text(json.dumps(document), encoding="utf-8")


def _rank_events(ops: Iterable[Op], rank: int) -> Iterator[dict[str, Any]]:
    timeline = rank_timeline(ops, rank)
    yield _name("process_name", rank, 0, f"rank {rank}")
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    for stream, role in sorted(timeline.roles.items()):
        yield _name("thread_name", rank, stream, f"stream {stream}: {role}")
    for span in timeline.spans:
        yield _span(span)
    for number, join in enumerate(timeline.joins):
        yield from _arrow(join, f"{rank}.{number}")


def _name(what: str, rank: int, stream: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": stream, "args": {"name": name}}


def _span(span: Span) -> dict[str, Any]:
    op = span.op
    arguments: dict[str, Any] = {"op": op.index}
    if op.annotation is not None:
        arguments["annotation"] = op.annotation
    if op.source is not None:
        arguments["source"] = str(op.source)
    if op.call is not None:
        arguments |= {
            "Collective name": op.call.name,
            "dtype": op.call.dtype,
            "Group size": len(op.call.group),
            "Process Group Name": op.call.group_name,
            "Process Group Ranks": list(op.call.group),
            "Seq": op.call.sequence,
        }
    label = f"{op.name} [{op.annotation}]" if op.call and op.annotation else op.name
    return {
        "ph": "X",
        "cat": op.kind.value,
        "name": label,
        "pid": op.rank,
        "tid": op.stream,
        "ts": span.start * UNIT_MICROSECONDS,
        "dur": (span.end - span.start) * UNIT_MICROSECONDS,
        "args": arguments,
    }


def _arrow(join: Join, number: str) -> Iterator[dict[str, Any]]:
    """Yield both ends of a wait's arrow.

    An arrow binds to the span that encloses its end, so it leaves just before the awaited work ends.
    """
    both = {"cat": "wait", "name": join.op.name, "id": number, "pid": join.op.rank}
    leaves = max(join.start * UNIT_MICROSECONDS - 1, 0)
    yield {"ph": "s", **both, "tid": join.other, "ts": leaves}
    yield {"ph": "f", "bp": "e", **both, "tid": join.stream, "ts": join.end * UNIT_MICROSECONDS}
