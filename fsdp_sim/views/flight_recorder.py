"""Flight recorder: a run as the dumps that PyTorch's ``torchfrtrace`` analyses, one file a rank."""

import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fsdp_sim.op import Call, Kind, Op
from fsdp_sim.trace import Trace

VERSION = "2.10"
"""Of the dump's format: FlightRecorder.hpp, torch 2.13."""
PREFIX = "rank_"
"""Files are called ``rank_0``, ``rank_1`` …; ``torchfrtrace --prefix rank_ DIRECTORY`` reads them."""

_POINT_TO_POINT = ("send", "recv")
_NAMES = {"barrier": "all_reduce_barrier"}
_NAMES_UNEVEN = {"all_gather": "ALLGATHER_coalesced", "reduce_scatter": "REDUCE_SCATTER_coalesced"}
"""What NCCL does an operation by is what it records, and what the analysis of every version knows."""
_Numels = list[list[int]]
_Key = tuple[str, tuple[int, ...], int, str]


def dump(trace: Trace, directory: str | Path) -> list[Path]:
    """Write one dump a rank; return their paths.

    An operation that not all ranks of its group have issued is *scheduled*, else *completed*: the
    analysis then names the ranks that are missing.

    Args:
        trace: a run whose ops were kept.
        directory: where to; made if it is not there.

    Raises:
        ConfigError: the ops were not kept.
    """
    calls = [(op, op.call) for op in trace.all_ops() if op.kind is Kind.COLLECTIVE and op.call]
    arrived = Counter(_key(call) for _, call in calls)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for rank in range(trace.world_size):
        recorder = _Recorder([(op, call) for op, call in calls if op.rank == rank], arrived)
        path = directory / f"{PREFIX}{rank}"
        path.write_bytes(pickle.dumps(recorder.document()))
        paths.append(path)
    return paths


def _key(call: Call) -> _Key:
    """Return what the parts of one collective have in common."""
    return (call.group_name, call.group, call.sequence, call.name)


class _Recorder:
    """The dump of one rank."""

    def __init__(self, calls: Sequence[tuple[Op, Call]], arrived: Counter[_Key]) -> None:
        self._calls = calls
        self._arrived = arrived
        self._collectives: Counter[str] = Counter()
        self._messages: Counter[str] = Counter()

    def document(self) -> dict[str, Any]:
        """Return the whole dump."""
        groups = {
            call.group_name: {
                "name": call.group_name,
                "desc": call.group_name,
                "ranks": str(list(call.group)),
            }
            for _, call in self._calls
        }
        entries = list(self._entries())
        for number, entry in enumerate(entries):
            entry["record_id"] = entry["op_id"] = number
        return {"version": VERSION, "pg_config": groups, "pg_status": {}, "entries": entries}

    def _entries(self) -> Iterator[dict[str, Any]]:
        """Yield one entry an operation, and one more behind each batch of messages."""
        for position, (op, call) in enumerate(self._calls):
            is_message = call.name in _POINT_TO_POINT
            batch = call.batch if is_message else None
            if not is_message:
                # As the run counted: a trace may begin anywhere, elsewhere on each rank.
                self._collectives[call.group_name] = call.sequence + 1
            elif batch is None or self._batch_at(position - 1) != (call.group_name, batch):
                self._messages[call.group_name] += 1
            yield self._entry(op, call, _profiling_name(op, call))
            if batch is not None and self._batch_at(position + 1) != (call.group_name, batch):
                yield self._entry(op, call, "nccl:coalesced")

    def _batch_at(self, position: int) -> tuple[str, int | None] | None:
        """Return the group and batch of a call, None beyond both ends."""
        if not 0 <= position < len(self._calls):
            return None
        call = self._calls[position][1]
        return (call.group_name, call.batch)

    def _entry(self, op: Op, call: Call, name: str) -> dict[str, Any]:
        is_message = call.name in _POINT_TO_POINT
        inputs, outputs = _numels(op, call)
        is_done = is_message or self._arrived[_key(call)] == len(call.group)
        source = op.source
        frame = source and {
            "name": op.annotation or "",
            "filename": source.file,
            "line": source.line,
        }
        return {
            "pg_id": 0,
            "process_group": (call.group_name, call.group_name),
            "collective_seq_id": self._collectives[call.group_name],
            "p2p_seq_id": self._messages[call.group_name],
            "is_p2p": is_message,
            "profiling_name": name,
            "time_created_ns": op.index,
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
            "timeout_ms": 0,
            "input_sizes": inputs,
            "output_sizes": outputs,
            "input_dtypes": [call.dtype] * len(inputs),
            "output_dtypes": [call.dtype] * len(outputs),
            "state": "completed" if is_done else "scheduled",
            "retired": is_done,
            "frames": [frame] if frame else [],
        }


def _profiling_name(op: Op, call: Call) -> str:
    """Return the name by which the analysis knows an operation."""
    if call.name in _POINT_TO_POINT and call.peer is not None:
        arrow = "->" if call.name == "send" else "<-"
        ranks = (call.group.index(rank) for rank in (op.rank, call.peer))
        return f"nccl:{call.name} {arrow.join(map(str, ranks))}"
    names = _NAMES_UNEVEN if len(call.sizes) > 1 else _NAMES
    return f"nccl:{names.get(call.name, call.name)}"


def _numels(op: Op, call: Call) -> tuple[_Numels, _Numels]:
    """Return the elements of the inputs and outputs of one rank's part."""
    world = len(call.group)
    own = [[numel] for numel in call.sizes] or [[0]]
    whole = [[numel * world] for numel in call.sizes] or [[0]]
    is_root = call.root is None or call.group[call.root] == op.rank
    match call.name:
        case "all_gather" | "reduce_scatter":
            if len(call.sizes) > 1:  # uneven, one number a rank; the analysis compares them whole
                whole = [[sum(call.sizes)]]
            return (own, whole) if call.name == "all_gather" else (whole, own)
        case "gather":
            return own, whole if is_root else [[0]]
        case "scatter":
            return whole if is_root else [[0]], own
        case "all_to_all":
            half = len(call.sizes) // 2
            return [[sum(call.sizes[:half])]], [[sum(call.sizes[half:])]]
        case "send":
            return own, [[0]]
        case "recv":
            return [[0]], own
        case _:
            return own, own
