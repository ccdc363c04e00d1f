"""Walks over module trees: paths, units, owners, names."""

from fsdp_sim.program.spec import LayerSpec, ModuleSpec, ProgramSpec, TieSpec, UnitSpec
from fsdp_sim.program.tree import owning_unit, parameter_names, replace_module, units, walk

UNIT = UnitSpec()
LINEAR = LayerSpec(bias=True)


def leaf(unit: UnitSpec | None = None) -> ModuleSpec:
    """Return a module with one linear."""
    return ModuleSpec(LINEAR, unit)


def test_parents_are_walked_before_their_children() -> None:
    """Pre-order, with paths as torch names modules."""
    tree = ModuleSpec(children=(ModuleSpec(children=(leaf(UNIT),)), leaf(UNIT)))

    assert [path for path, _ in walk(tree)] == ["", "0", "0.0", "1"]


def test_units_are_sharded_children_first() -> None:
    """A parent's unit owns what its children's units do not."""
    program = ProgramSpec(ModuleSpec(LINEAR, UNIT, (leaf(UNIT), leaf())))

    assert [(unit.paths, unit.members) for unit in units(program)] == [
        (("0",), ("0",)),
        (("",), ("", "1")),
    ]


def test_modules_of_one_group_are_one_unit() -> None:
    """It is sharded when its last module is reached, with the options of the first."""
    first = UnitSpec("zero2", group="g")
    program = ProgramSpec(ModuleSpec(children=(leaf(first), leaf(UNIT), leaf(UnitSpec(group="g")))))

    made = units(program)

    assert [unit.paths for unit in made] == [("1",), ("0", "2")]
    assert made[1].spec == first


def test_a_layer_belongs_to_the_nearest_unit_above() -> None:
    """None where there is none."""
    program = ProgramSpec(ModuleSpec(children=(ModuleSpec(unit=UNIT, children=(leaf(),)), leaf())))

    assert owning_unit(program) == {"": None, "0": "path 0", "0.0": "path 0", "1": None}


def test_tied_parameters_are_named_once() -> None:
    """As ``named_parameters`` does."""
    tree = ModuleSpec(unit=UNIT, children=(leaf(), leaf()))
    program = ProgramSpec(tree, ties=(TieSpec("0", "1"),))

    assert parameter_names(program) == ("0.weight", "0.bias")


def test_one_module_of_a_tree_can_be_changed() -> None:
    """The others stay as they are."""
    tree = ModuleSpec(children=(leaf(), ModuleSpec(children=(leaf(),))))

    changed = replace_module(tree, "1.0", join="sum")

    assert changed.children[1].children[0].join == "sum"
    assert changed.children[0] == tree.children[0]
