"""Frozen records that read as they were written: the base of every part of a program."""

import dataclasses
from typing import Any


class Record:
    """Base of frozen dataclasses whose ``repr`` leaves out what has its default value.

    A program of three modules then prints in three lines instead of thirty, and what it prints can be
    pasted back into a test.
    """

    def __repr__(self) -> str:
        """Return the constructor call with only those arguments that differ from their defaults."""
        said = [f"{name}={value!r}" for name, value in changed(self)]
        return f"{type(self).__name__}({', '.join(said)})"

    def _repr_pretty_(self, printer: Any, _cycle: object) -> None:
        """Print the same in lines of bounded width, as IPython and Hypothesis ask for it."""
        with printer.group(1, f"{type(self).__name__}(", ")"):
            for number, (name, value) in enumerate(changed(self)):
                if number:
                    printer.text(",")
                    printer.breakable()
                printer.text(f"{name}=")
                printer.pretty(value)


def changed(record: Any) -> list[tuple[str, Any]]:
    """Return (field, value) of every field that has no default or differs from it."""
    named = [(field, getattr(record, field.name)) for field in dataclasses.fields(record)]
    return [(field.name, value) for field, value in named if value != field.default]
