"""Programs to JSON and back: complete, versioned, and nothing is executed on the way."""

import json
from typing import Any

from fsdp_sim.program.check import check_program
from fsdp_sim.program.schema import SchemaError, from_data, load_json, to_data
from fsdp_sim.program.spec import SPEC_VERSION, ProgramSpec


def dump_program(program: ProgramSpec) -> str:
    """Return the program as JSON text, every field present, in the order of the records."""
    return json.dumps(program_to_data(program), indent=1) + "\n"


def load_program(text: str) -> ProgramSpec:
    """Return the program that ``dump_program`` wrote; nothing is built or run.

    Raises:
        SchemaError: not JSON, another version, or a field that is unknown, missing or of another type.
        SpecError: a program that says something impossible.
    """
    return program_from_data(load_json(text))


def program_to_data(program: ProgramSpec) -> dict[str, Any]:
    """Return the program, with its version, as what JSON can hold."""
    return {"version": SPEC_VERSION, **to_data(program)}


def program_from_data(data: object, where: str = "") -> ProgramSpec:
    """Return the program that ``program_to_data`` made ``data`` of; ``where`` is its path in a document.

    Raises:
        SchemaError: another version, or a field that is unknown, missing or of another type.
        SpecError: a program that says something impossible.
    """
    if not isinstance(data, dict):
        raise SchemaError(where, f"must be an object (a program), got {type(data).__name__}")
    fields = dict(data)
    check_version(fields.pop("version", None), where)
    program = from_data(ProgramSpec, fields, where)
    check_program(program)
    return program


def check_version(version: object, where: str = "") -> None:
    """Raise unless ``version``, of the program at ``where``, is the one that this package reads.

    Raises:
        SchemaError: it is missing, not a whole number, or another one.
    """
    path = f"{where}.version" if where else "version"
    if type(version) is not int:
        raise SchemaError(path, f"must be the whole number {SPEC_VERSION}, got {version!r}")
    if version != SPEC_VERSION:
        advice = "update fsdp_sim" if version > SPEC_VERSION else "write the program anew"
        raise SchemaError(path, f"must be {SPEC_VERSION}, got {version}; {advice}")
