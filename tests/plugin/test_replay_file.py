"""Replay files: what is written is read back; nothing else is, and nothing is executed."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_sim.errors import ConfigError
from fsdp_sim.program import LayerSpec, ModuleSpec, ProgramSpec, UnitSpec
from fsdp_sim.program.spec import SPEC_VERSION
from fsdp_sim.replay_file import (
    Argument,
    Expected,
    PytestNode,
    ReplayFile,
    ScriptCall,
    Versions,
    decode,
    dump,
    encode,
    load,
    verdict,
    versions,
)

PROGRAM = ProgramSpec(ModuleSpec(layer=LayerSpec(), unit=UnitSpec()))
FILE = ReplayFile(
    schedule="v1;w2;3>1",
    expected=Expected("Race", "rank 0: ..."),
    digest="d",
    order_digest="o",
    versions=Versions("0.1.0", "2.13.0", "3.11.7"),
    test=PytestNode("tests/test_a.py::test_b[1]", 0, (Argument("size", "literal", "3"),)),
)

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner)
    ),
    max_leaves=6,
)


@pytest.mark.parametrize(
    "file",
    [
        FILE,
        replace(FILE, test=None, program=PROGRAM),
        replace(FILE, test=None, script=ScriptCall("train.py", ("--steps", "3"))),
        replace(FILE, test=PytestNode("test_a.py::test_b", 2, None)),
    ],
    ids=["test", "program", "script", "no arguments"],
)
def test_a_file_is_read_as_it_was_written(file: ReplayFile) -> None:
    """Nothing is lost."""
    assert load(dump(file)) == file


@given(value=plain)
def test_plain_arguments_come_back(value: Any) -> None:
    """Numbers, text and containers of them are literals."""
    encoded = encode({"value": value})

    assert encoded is not None
    assert decode(encoded[0]) == value


def test_a_program_is_an_argument_as_data() -> None:
    """It is written as JSON inside the file."""
    encoded = encode({"program": PROGRAM})

    assert encoded is not None
    assert (encoded[0].kind, decode(encoded[0])) == ("program", PROGRAM)


class LooksLikeThree:
    """Prints like a literal and is none."""

    def __repr__(self) -> str:
        return "3"


@pytest.mark.parametrize(
    "value", [object(), LooksLikeThree(), [LooksLikeThree()], float("nan"), print]
)
def test_other_arguments_cannot_be_written(value: object) -> None:
    """Then the file holds none, and only Hypothesis's database can bring them back."""
    assert encode({"value": value, "size": 3}) is None


def _changed(**changes: Any) -> str:
    return json.dumps({**json.loads(dump(FILE)), **changes})


def _with_program(**changes: Any) -> str:
    data = json.loads(dump(replace(FILE, test=None, program=PROGRAM)))
    return json.dumps({**data, "program": {**data["program"], **changes}})


def _with_test(**changes: Any) -> str:
    return _changed(test={**json.loads(dump(FILE))["test"], **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the document: must be JSON, got a break at line 1 column 1 (Expecting value)"),
        (dump(FILE)[:200], "must be JSON, got a break at"),
        ("[]", "the document: must be an object (a replay file), got list"),
        (_changed(version=2), "version: must be 1, got 2; update fsdp_sim"),
        (_changed(version=0), "version: must be 1, got 0; make the file anew"),
        (_changed(version=True), "version: must be the whole number 1, got True"),
        (
            _with_program(version=SPEC_VERSION + 1),
            f"program.version: must be {SPEC_VERSION}, got {SPEC_VERSION + 1}; update fsdp_sim",
        ),
        (
            _with_program(version=None),
            f"program.version: must be the whole number {SPEC_VERSION}, got None",
        ),
        (_with_program(budget=1), "program.budget: unknown field of ProgramSpec"),
        (_changed(program=[]), "program: must be an object (a program), got list"),
        (_changed(code="import os"), "code: unknown field of ReplayFile; it has schedule"),
        (_changed(schedule="v1;w0"), "world size must be between 1 and 4096, got 0"),
        (_changed(schedule=3), "schedule: must be of type str, got 3"),
        (_changed(test=None), "the document: must have one of program, test and script, got none"),
        (
            _with_test(node="/etc/test_a.py::test_b"),
            "test.node: must be a test below the root folder",
        ),
        (
            _with_test(node="../test_a.py::test_b"),
            "test.node: must be a test below the root folder",
        ),
        (_with_test(node="--co"), "test.node: must be a test below the root folder"),
        (_with_test(call=-1), "test.call: must not be negative, got -1"),
        (
            _with_test(arguments=[{"name": "x", "kind": "literal", "value": "print(1)"}]),
            "test.arguments.x: must be a Python literal, got 'print(1)'",
        ),
        (
            _with_test(arguments=[{"name": "x", "kind": "pickle", "value": ""}]),
            'test.arguments[0].kind: must be one of literal, program; got "pickle"',
        ),
    ],
)
def test_a_file_that_is_not_one_is_refused(text: str, message: str) -> None:
    """The error names the field and what must hold."""
    with pytest.raises(ConfigError) as caught:
        load(text)

    assert message in str(caught.value)


def test_the_verdict_of_a_clean_replay_claims_no_pass() -> None:
    """It says that the finding did not come up, and which versions differ."""
    file = replace(FILE, versions=replace(versions(), torch="2.11.0"))

    assert verdict(file, None) == (
        "the schedule fits and the run is clean: Race did not come up, so the code or its versions have "
        f"changed (torch 2.11.0 is now {versions().torch})"
    )
