"""Records to JSON and back, strictly: nothing unknown, nothing missing, nothing executed."""

import dataclasses
import functools
import json
import types
import typing
from typing import Any, Literal, TypeVar

from fsdp_sim.errors import ConfigError

DEPTH_MAX = 64
NBYTES_MAX = 4 * 1024 * 1024

T = TypeVar("T")


class SchemaError(ConfigError):
    """A file or value that does not have the form of the record it should be.

    Attributes:
        where: the path of the offending field, such as ``model.children[1].layer.rows``.
    """

    def __init__(self, where: str, message: str) -> None:
        super().__init__(f"{where or 'the document'}: {message}")
        self.where = where


def to_data(value: Any) -> Any:
    """Return a record as plain dicts, lists and scalars, with every field present."""
    if dataclasses.is_dataclass(value):
        return {f.name: to_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [to_data(item) for item in value]
    return value


def from_data(kind: type[T], data: Any, where: str = "") -> T:
    """Return the record of type ``kind`` that ``data`` spells.

    Raises:
        SchemaError: a field is unknown, missing or of another type; it names the field's path.
    """
    return typing.cast("T", _parse(kind, data, where))


def load_json(text: str) -> Any:
    """Return the JSON document in ``text``; only objects, arrays and scalars come out of it.

    Raises:
        SchemaError: not JSON, truncated, with a repeated key or a number that JSON lacks, or beyond
            ``NBYTES_MAX`` or ``DEPTH_MAX``.
    """
    if len(text) > NBYTES_MAX:
        raise SchemaError("", f"must have at most {NBYTES_MAX} characters, got {len(text)}")
    try:
        data = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise SchemaError("", f"must be JSON, got a break at {place} ({error.msg})") from None
    except RecursionError:
        raise SchemaError("", f"must nest at most {DEPTH_MAX} deep") from None
    return data


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of ``pairs``; refuse a key that comes twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise SchemaError("", f"each key must come once in an object, got {twice!r} twice")
    return result


def _no_constant(name: str) -> Any:
    raise SchemaError("", f"numbers must be finite, got {name}")


def _parse(kind: Any, data: Any, where: str) -> Any:
    """Return ``data`` as a value of the annotation ``kind``."""
    if where.count(".") > DEPTH_MAX:
        raise SchemaError(where[:80], f"must nest at most {DEPTH_MAX} deep")
    if dataclasses.is_dataclass(kind):
        return _parse_record(kind, data, where)
    origin = typing.get_origin(kind)
    if origin is Literal:
        return _parse_choice(typing.get_args(kind), data, where)
    if origin is tuple:
        return _parse_tuple(typing.get_args(kind), data, where)
    if origin in (types.UnionType, typing.Union):
        return _parse_optional(typing.get_args(kind), data, where)
    return _parse_scalar(kind, data, where)


def _parse_record(kind: Any, data: Any, where: str) -> Any:
    """Return the record whose fields are exactly the keys of ``data``."""
    if not isinstance(data, dict):
        raise SchemaError(where, f"must be an object ({kind.__name__}), got {_shown(data)}")
    hints = _hints(kind)
    for name in data:
        if name not in hints:
            known = ", ".join(hints)
            raise SchemaError(
                _join(where, name), f"unknown field of {kind.__name__}; it has {known}"
            )
    for name in hints:
        if name not in data:
            raise SchemaError(_join(where, name), f"missing field of {kind.__name__}")
    return kind(**{name: _parse(hints[name], data[name], _join(where, name)) for name in hints})


def _parse_choice(choices: tuple[Any, ...], data: Any, where: str) -> Any:
    if not isinstance(data, str) or data not in choices:
        raise SchemaError(where, f"must be one of {', '.join(choices)}; got {_shown(data)}")
    return data


def _parse_tuple(arguments: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise SchemaError(where, f"must be an array, got {_shown(data)}")
    assert arguments[1:] == (Ellipsis,), "records hold tuples of any length only"
    return tuple(_parse(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))


def _parse_optional(arguments: tuple[Any, ...], data: Any, where: str) -> Any:
    kinds = [kind for kind in arguments if kind is not type(None)]
    assert len(kinds) == 1, "records hold optional values, no other unions"
    return None if data is None else _parse(kinds[0], data, where)


def _parse_scalar(kind: type, data: Any, where: str) -> Any:
    """Return a str, bool, int or float; a whole number is a float too, a bool is never a number."""
    if kind is float and type(data) is int:
        return float(data)
    if type(data) is not kind:
        raise SchemaError(where, f"must be of type {kind.__name__}, got {_shown(data)}")
    return data


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """Return the types of a record's fields, in order."""
    return typing.get_type_hints(kind)


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _shown(data: Any) -> str:
    text = json.dumps(data, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."
