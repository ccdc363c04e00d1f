"""Trace files: ops as JSON lines of a versioned schema, from a simulation or a recorder.

The first line is a header: ``schema``, ``version``, ``world_size``, ``ranks`` (whose ops are in it),
``stands`` (where each rank's host stood at the end, where that is known), ``schedule`` (or null),
``torch``, ``digest``, ``order_digest``.  Every other line is one op: the fields of ``Op`` by their names,
without those that have their default.  A source is ``[file, line]``, with the user's line as a third
where the line is a library's.  An access is ``[block, lo, hi, write]``, with ``[itemsize, sizes,
strides]`` behind where not every byte of the range is touched.  A stand has the fields of ``Stand``; what it
waits for is ``["op", rank, index]``, ``["key", name]`` or ``["call", rank, name]``.  Reading one runs nothing.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

from fsdp_sim.checkers.deadlock import Arrival, Issued, Stand, StoreKey
from fsdp_sim.errors import ConfigError
from fsdp_sim.op import Access, Call, Kind, Op, Source

SCHEMA = "fsdp_sim.trace"
VERSION = 4
HEADER = (
    "schema",
    "version",
    "world_size",
    "ranks",
    "stands",
    "schedule",
    "torch",
    "digest",
    "order_digest",
)

_DEFAULTS: dict[str, Any] = {"other": -1, "nbytes": 0, "annotation": None}
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "rank": int,
    "index": int,
    "kind": str,
    "name": str,
    "stream": int,
    "other": int,
    "nbytes": int,
    "annotation": str,
    "accesses": list,
    "source": list,
    "call": dict,
}
_REQUIRED = ("rank", "index", "kind", "name", "stream")


def write(path: str | Path, header: dict[str, Any], ops: Iterable[Op]) -> None:
    """Write a trace file.

    Args:
        path: where to.
        header: the fields of ``HEADER`` but for the first two.
        ops: in order of issue.
    """
    with Path(path).open("w", encoding="utf-8") as file:
        file.write(json.dumps({"schema": SCHEMA, "version": VERSION, **header}) + "\n")
        for op in ops:
            file.write(json.dumps(_record(op), separators=(",", ":")) + "\n")


def read(path: str | Path) -> tuple[dict[str, Any], list[Op]]:
    """Read a trace file; return its header and its ops.

    Raises:
        ConfigError: the file is no trace, of another version, or a line of it is malformed.
    """
    with Path(path).open(encoding="utf-8") as file:
        lines = enumerate(file, start=1)
        header = _header(path, next(lines, (1, ""))[1])
        return header, list(_ops(path, lines, header["ranks"]))


def is_trace(text: str) -> bool:
    """Whether a file that begins with ``text`` means to be a trace, of whatever version."""
    return text.startswith(f'{{"schema": "{SCHEMA}"')


def _record(op: Op) -> dict[str, Any]:
    """Return an op as its line holds it."""
    record: dict[str, Any] = {name: getattr(op, name) for name in _REQUIRED}
    record |= {n: getattr(op, n) for n, default in _DEFAULTS.items() if getattr(op, n) != default}
    if op.accesses:
        record["accesses"] = [
            [a.storage, a.lo, a.hi, int(a.write), *([] if a.strides is None else [a.strides])]
            for a in op.accesses
        ]
    if op.source is not None:
        record["source"] = _lines(op.source)
    if op.call is not None:
        defaults = Call._field_defaults
        record["call"] = {
            n: value for n, value in op.call._asdict().items() if defaults.get(n, ...) != value
        }
    return record


def _lines(source: Source) -> list[Any]:
    user = () if source.user is None else (_lines(source.user),)
    return [source.file, source.line, *user]


def _source(file: str, line: int, user: Sequence[Any] | None = None) -> Source:
    return Source(str(file), int(line), None if user is None else _source(*user))


def _header(path: str | Path, line: str) -> dict[str, Any]:
    header = _json(path, 1, line)
    if header.get("schema") != SCHEMA:
        raise ConfigError(f"{path}:1 must be the header of a trace, got {line[:80]!r}")
    if header.get("version") != VERSION:
        raise ConfigError(
            f"{path}:1 must be of version {VERSION}, got {header.get('version')!r};"
            " read it with the version of fsdp_sim that wrote it"
        )
    if tuple(header) != HEADER or not isinstance(header["world_size"], int):
        raise ConfigError(f"{path}:1 must have the fields {', '.join(HEADER)}, got {line[:200]!r}")
    ranks = header["ranks"]
    if not isinstance(ranks, list) or not set(ranks) <= set(range(header["world_size"])):
        raise ConfigError(
            f"{path}:1 ranks must be numbers below {header['world_size']}, got {ranks!r}"
        )
    try:
        header["stands"] = tuple(_stand(**record) for record in header["stands"])
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{path}:1 stands must say of each rank where its host stood, got "
            f"{str(header['stands'])[:200]}: {error}"
        ) from error
    if [stand.rank for stand in header["stands"]] not in ([], list(range(header["world_size"]))):
        raise ConfigError(f"{path}:1 stands must be of all ranks in order, or none")
    return header


_AWAITED: dict[str, Callable[..., Issued | StoreKey | Arrival]] = {
    "op": Issued,
    "key": StoreKey,
    "call": Arrival,
}


def stand_record(stand: Stand) -> dict[str, Any]:
    """Return a stand as the header holds it."""
    names = {kind: name for name, kind in _AWAITED.items()}
    stored = stand.stored()
    waits_for = [[names[type(each)], *astuple(each)] for each in stored.waits_for]  # type: ignore[index, arg-type]
    return {**asdict(replace(stored, waits_for=())), "waits_for": waits_for}


def _stand(
    *, rank: int, is_ended: bool, is_host_wait: bool, describe: str, waits_for: list[list[Any]]
) -> Stand:
    awaited = tuple(_AWAITED[kind](*fields) for kind, *fields in waits_for)
    return Stand(int(rank), bool(is_ended), bool(is_host_wait), awaited, str(describe))


def _ops(path: str | Path, lines: Iterable[tuple[int, str]], ranks: Sequence[int]) -> Iterator[Op]:
    for number, line in lines:
        record = _json(path, number, line)
        _check_fields(path, number, record)
        try:
            op = _op(record)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}:{number} must be an op, got {line[:200]!r}: {error}"
            ) from error
        if op.rank not in ranks:
            raise ConfigError(f"{path}:{number} rank must be one of {ranks}, got {op.rank}")
        yield op


def _json(path: str | Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{path}:{number} must be JSON, got {line[:80]!r}: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{path}:{number} must be a JSON object, got {line[:80]!r}")
    return record


def _check_fields(path: str | Path, number: int, record: dict[str, Any]) -> None:
    for name in _REQUIRED:
        if name not in record:
            raise ConfigError(f"{path}:{number} must have the field {name!r}")
    for name, value in record.items():
        if name not in _FIELDS:
            raise ConfigError(
                f"{path}:{number} must have no field {name!r}; known: {list(_FIELDS)}"
            )
        if not isinstance(value, _FIELDS[name]) or isinstance(value, bool):
            raise ConfigError(
                f"{path}:{number} field {name!r} must be {_FIELDS[name]}, got {value!r}"
            )


def _op(record: dict[str, Any]) -> Op:
    """Return the op of a line whose fields have been checked."""
    fields = dict(record)
    fields["kind"] = Kind(fields["kind"])
    fields["accesses"] = tuple(_access(*access) for access in fields.get("accesses", ()))
    if "source" in fields:
        fields["source"] = _source(*fields["source"])
    if "call" in fields:
        call: dict[str, Any] = {
            n: tuple(v) if isinstance(v, list) else v for n, v in fields["call"].items()
        }
        fields["call"] = Call(**call)
    return Op(**fields)


def _access(
    storage: int, lo: int, hi: int, is_write: int, strides: list[Any] | None = None
) -> Access:
    if not all(isinstance(number, int) for number in (storage, lo, hi)) or is_write not in (0, 1):
        raise ValueError(f"an access is [block, lo, hi, 0 or 1], got {[storage, lo, hi, is_write]}")
    if strides is None:
        return Access(storage, lo, hi, bool(is_write))
    itemsize, sizes, steps = strides
    if len(sizes) != len(steps):
        raise ValueError(f"strides must have one step a dimension, got {strides}")
    return Access(storage, lo, hi, bool(is_write), (int(itemsize), tuple(sizes), tuple(steps)))
