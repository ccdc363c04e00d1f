"""Programs to JSON and back: complete, versioned, and nothing is executed on the way."""

import json

from fsdp_sim.program.check import check_program
from fsdp_sim.program.schema import SchemaError, from_data, load_json, to_data
from fsdp_sim.program.spec import SPEC_VERSION, ProgramSpec


def dump_program(program: ProgramSpec) -> str:
    """Return the program as JSON text, every field present, in the order of the records."""
    return json.dumps({"version": SPEC_VERSION, **to_data(program)}, indent=1) + "\n"


def load_program(text: str) -> ProgramSpec:
    """Return the program that ``dump_program`` wrote; nothing is built or run.

    Raises:
        SchemaError: not JSON, another version, or a field that is unknown, missing or of another type.
        SpecError: a program that says something impossible.
    """
    data = load_json(text)
    if not isinstance(data, dict):
        raise SchemaError("", f"must be an object (a program), got {type(data).__name__}")
    check_version(data.pop("version", None))
    program = from_data(ProgramSpec, data)
    check_program(program)
    return program


def check_version(version: object) -> None:
    """Raise unless ``version`` is the one that this package reads.

    Raises:
        SchemaError: it is missing, not a whole number, or another one.
    """
    if type(version) is not int:
        raise SchemaError("version", f"must be the whole number {SPEC_VERSION}, got {version!r}")
    if version != SPEC_VERSION:
        advice = "update fsdp_sim" if version > SPEC_VERSION else "write the program anew"
        raise SchemaError("version", f"must be {SPEC_VERSION}, got {version}; {advice}")
