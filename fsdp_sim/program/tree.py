"""Walks over the module tree of a program: paths, units, parameters; pure."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fsdp_sim.program.spec import DType, LayerSpec, ModuleSpec, ProgramSpec, UnitSpec


@dataclass(frozen=True)
class Unit:
    """The modules that one call of ``fully_shard`` gets, and the parameters they own.

    Attributes:
        paths: the modules, in order of the tree.
        spec: the options of the call.
        members: paths of all modules whose own parameters belong to it.
    """

    paths: tuple[str, ...]
    spec: UnitSpec
    members: tuple[str, ...]


def walk(module: ModuleSpec, path: str = "") -> Iterator[tuple[str, ModuleSpec]]:
    """Yield (path, module) of every module, parents before children."""
    yield path, module
    for number, child in enumerate(module.children):
        yield from walk(child, child_path(path, number))


def child_path(path: str, number: int) -> str:
    """Return the path of a child. See Note [paths]."""
    return f"{path}.{number}" if path else str(number)


def units(program: ProgramSpec) -> tuple[Unit, ...]:
    """Return the units in the order in which they are sharded: children before parents.

    Modules of one group form one unit; it is sharded when the last of them is reached.
    """
    nodes = dict(walk(program.model))
    last: dict[str, str] = {}
    for path in _children_first(program.model):
        unit = nodes[path].unit
        if unit is not None:
            last[_key(path, unit)] = path
    order = sorted(last, key=lambda key: _position(program.model, last[key]))
    owner = owning_unit(program)
    return tuple(_unit(key, nodes, owner) for key in order)


def owning_unit(program: ProgramSpec) -> dict[str, str | None]:
    """Return, for each path, the key of the unit that owns the module's own parameters."""
    owner: dict[str, str | None] = {}
    for path, module in walk(program.model):
        above = owner[parent_path(path)] if path else None
        owner[path] = above if module.unit is None else _key(path, module.unit)
    return owner


def roots(program: ProgramSpec) -> list[str]:
    """Return the paths of the modules of units that have no unit above them."""
    paths = [path for path, module in walk(program.model) if module.unit]
    return [p for p in paths if not any(o != p and (not o or p.startswith(f"{o}.")) for o in paths)]


def unit_specs(program: ProgramSpec) -> dict[str, UnitSpec]:
    """Return, for each module in a unit, the options of that unit."""
    return {path: unit.spec for unit in units(program) for path in unit.members}


def at_step(program: ProgramSpec, number: int) -> ProgramSpec:
    """Return ``program`` with the strategies that its units have in step ``number``."""
    said = [step.resume for step in program.steps[: number + 1] if step.resume is not None]

    def placed(module: ModuleSpec) -> ModuleSpec:
        unit = module.unit and dataclasses.replace(module.unit, strategy=said[-1])
        return dataclasses.replace(module, unit=unit, children=tuple(map(placed, module.children)))

    return dataclasses.replace(program, model=placed(program.model)) if said else program


def replace_module(module: ModuleSpec, path: str, **changes: Any) -> ModuleSpec:
    """Return the tree below ``module`` with the fields of the module at ``path`` changed."""
    if path == "":
        return dataclasses.replace(module, **changes)
    number, _, below = path.partition(".")
    children = list(module.children)
    children[int(number)] = replace_module(children[int(number)], below, **changes)
    return dataclasses.replace(module, children=tuple(children))


def parent_path(path: str) -> str:
    """Return the path of the parent of a module that is not the top."""
    return path.rpartition(".")[0]


def parameter_shapes(layer: LayerSpec, width: int) -> dict[str, tuple[int, ...]]:
    """Return name and shape of each parameter of a layer, in order of registration."""
    kinds: dict[str, dict[str, tuple[int, ...]]] = {
        "linear": {"weight": (width, width)},
        "scale": {"weight": (width,)},
        "rows": {"weight": (layer.rows, width), "weight_out": (layer.rows, width)},
        "embed": {"weight": (layer.rows, width)},
    }
    shapes = kinds[layer.kind]
    return {**shapes, "bias": (width,)} if layer.bias else shapes


def parameter_dtype(layer: LayerSpec, name: str) -> DType:
    """Return the dtype in which a parameter of a layer is made."""
    return layer.bias_dtype or layer.dtype if name == "bias" else layer.dtype


def parameter_names(program: ProgramSpec) -> tuple[str, ...]:
    """Return the full names of all parameters, tied ones once, as ``named_parameters`` lists them."""
    tied = {tie.module for tie in program.ties}
    names = []
    for path, module in walk(program.model):
        if module.layer is not None and path not in tied:
            own = parameter_shapes(module.layer, program.width)
            names += [f"{path}.{name}" if path else name for name in own]
    return tuple(names)


def _key(path: str, unit: UnitSpec) -> str:
    """Return what units are told apart by: the group's name, else the module's path."""
    return f"group {unit.group}" if unit.group else f"path {path}"


def _unit(key: str, nodes: dict[str, ModuleSpec], owner: dict[str, str | None]) -> Unit:
    paths = [path for path, node in nodes.items() if node.unit and _key(path, node.unit) == key]
    spec = nodes[paths[0]].unit
    assert spec is not None, "a key comes from a unit"
    return Unit(tuple(paths), spec, tuple(path for path, unit in owner.items() if unit == key))


def _children_first(module: ModuleSpec, path: str = "") -> Iterator[str]:
    for number, child in enumerate(module.children):
        yield from _children_first(child, child_path(path, number))
    yield path


def _position(module: ModuleSpec, path: str) -> int:
    return list(_children_first(module)).index(path)
