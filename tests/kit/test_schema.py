"""Programs as JSON: exact round trips, and refusals that name the offending field."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_sim.program import (
    LayerSpec,
    ModuleSpec,
    ProgramSpec,
    SchemaError,
    SpecError,
    UnitSpec,
    dump_program,
    load_program,
)
from fsdp_sim.program import spec as SPEC
from fsdp_sim.strategies import programs

LEAF = ModuleSpec(LayerSpec(), UnitSpec())
SMALL = ProgramSpec(ModuleSpec(children=(LEAF, LEAF)))


def edited(path: str, value: Any) -> str:
    """Return SMALL as JSON with the field at ``path`` set, or removed where ``value`` is Ellipsis."""
    data = json.loads(dump_program(SMALL))
    *above, name = path.split("/")
    place = data
    for key in above:
        place = place[int(key) if key.isdigit() else key]
    if value is ...:
        del place[name]
    else:
        place[name] = value
    return json.dumps(data)


@given(programs())
def test_a_program_survives_the_round_trip_through_json(program: ProgramSpec) -> None:
    """Loading what was dumped gives the same program."""
    assert load_program(dump_program(program)) == program


@given(programs())
def test_a_program_prints_as_the_code_that_makes_it(program: ProgramSpec) -> None:
    """Its repr can be pasted into a test."""
    names = {"ProgramSpec": ProgramSpec}
    names |= {name: value for name, value in vars(SPEC).items() if name.endswith("Spec")}

    assert eval(repr(program), names) == program


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("surprise", 1, "surprise: unknown field of ProgramSpec; it has model, mesh"),
        ("model/children/1/layer/colour", "red", "model.children[1].layer.colour: unknown field"),
        ("width", ..., "width: missing field of ProgramSpec"),
        ("model/children/0/layer/rows", ..., "model.children[0].layer.rows: missing field"),
        ("width", "2", 'width: must be of type int, got "2"'),
        ("width", True, "width: must be of type int, got true"),
        ("mesh", 2, "mesh: must be an array, got 2"),
        ("mesh", [2, None], "mesh[1]: must be of type int, got null"),
        ("model", [], "model: must be an object (ModuleSpec), got []"),
        ("model/join", "zip", 'model.join: must be one of chain, sum; got "zip"'),
        ("steps/0/set_to_none", 1, "steps[0].set_to_none: must be of type bool, got 1"),
        ("version", 99, "version: must be 4, got 99; update fsdp_sim"),
        ("version", ..., "version: must be the whole number 4, got None"),
    ],
)
def test_a_wrong_field_is_named_with_its_path(path: str, value: Any, message: str) -> None:
    """The error says which field, what must hold and what came."""
    with pytest.raises(SchemaError) as caught:
        load_program(edited(path, value))

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be JSON, got a break at line 1 column 1"),
        (dump_program(SMALL)[:-40], "must be JSON, got a break at line"),
        ("[1]", "must be an object (a program), got list"),
        (
            '{"version": 1, "version": 1}',
            "each key must come once in an object, got 'version' twice",
        ),
        ('{"version": NaN}', "numbers must be finite, got NaN"),
        ("[" * 100_000, "must nest at most"),
        (" " * 5_000_000, "must have at most"),
    ],
)
def test_text_that_is_no_program_is_refused(text: str, message: str) -> None:
    """Truncated, repeated, unbounded or foreign text is named as such."""
    with pytest.raises(SchemaError) as caught:
        load_program(text)

    assert message in str(caught.value)


def test_a_tree_that_nests_too_deep_is_refused() -> None:
    """A file cannot exhaust the stack."""
    module = json.loads(dump_program(SMALL))["model"]["children"][0]
    for _ in range(200):
        module = {**module, "children": [module]}

    with pytest.raises(SchemaError, match="must nest at most 64 deep"):
        load_program(edited("model", module))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("mesh", [], "mesh: must be 1 to 3 axes, got 0"),
        ("mesh", [0], "mesh[0]: must be 1 to 1024 ranks, got 0"),
        ("mesh", [-1], "mesh[0]: must be 1 to 1024 ranks, got -1"),
        ("mesh", [1024, 2], "mesh: must be 1 to 1024 ranks, got 2048"),
        ("width", 0, "width: must be 1 to 64 elements, got 0"),
        ("optimizer/lr", -1.0, "optimizer.lr: must be finite and not negative, got -1.0"),
        ("model/children/0/unit", None, "model at '0': a layer must be in a unit"),
        ("model/children/0/unit/strategy", "hsdp", "model at '0', unit.strategy: must be one of"),
        ("ties", [{"source": "0", "module": "9"}], "ties[0].module: must be the path of a module"),
        (
            "steps/0/passes/0/side_stream",
            True,
            "steps[0].passes[0].side_stream: must be false where there is one forward",
        ),
        ("steps/0/freeze", [""], "steps[0].freeze: must name a module with a layer, got ''"),
    ],
)
def test_a_program_that_means_nothing_is_refused(path: str, value: Any, message: str) -> None:
    """The right form with impossible content is refused by its field too."""
    with pytest.raises(SpecError) as caught:
        load_program(edited(path, value))

    assert message in str(caught.value)


@given(st.text(max_size=40) | st.binary(max_size=40).map(lambda b: b.decode("latin1")))
def test_arbitrary_text_never_gets_through(text: str) -> None:
    """Whatever comes, the answer is a SchemaError."""
    with pytest.raises(SchemaError):
        load_program(text)
