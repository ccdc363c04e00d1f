"""The programs that ever failed, and those of public bug reports: small, named, run first."""

from dataclasses import dataclass
from importlib import resources

from fsdp_sim.program.check import check_program
from fsdp_sim.program.codec import check_version
from fsdp_sim.program.record import Record
from fsdp_sim.program.schema import SchemaError, from_data, load_json
from fsdp_sim.program.spec import ProgramSpec


@dataclass(frozen=True, repr=False)
class CorpusEntry(Record):
    """A program that must run clean and with parity.

    Attributes:
        why: what went wrong with it once, or which report it stands for.
        program: the program.
    """

    why: str
    program: ProgramSpec


def load_corpus() -> dict[str, CorpusEntry]:
    """Return the entries by name, in the order of their names.

    Raises:
        SchemaError: a file does not have the form of an entry; names the file and the field.
    """
    folder = resources.files(__name__)
    files = sorted(file.name for file in folder.iterdir() if file.name.endswith(".json"))
    return {
        name.removesuffix(".json"): _load(folder.joinpath(name).read_text(), name) for name in files
    }


def _load(text: str, name: str) -> CorpusEntry:
    data = load_json(text)
    if not isinstance(data, dict):
        raise SchemaError(name, f"must be an object (a corpus entry), got {type(data).__name__}")
    check_version(data.pop("version", None))
    entry = from_data(CorpusEntry, data, name.removesuffix(".json"))
    check_program(entry.program)
    return entry
