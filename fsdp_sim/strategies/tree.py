"""module_trees: trees of modules, units among them."""

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from fsdp_sim.program.spec import (
    Checkpoint,
    DType,
    Frozen,
    LayerKind,
    LayerSpec,
    ModuleSpec,
    Output,
    ProgramSpec,
    UnitSpec,
)
from fsdp_sim.program.tree import owning_unit, replace_module, walk
from fsdp_sim.strategies.arguments import Draw, check_bounds, check_range, maybe, number, pick

_DEPTH_MAX = 8
_MODULES_MAX = 64
_ROWS_MAX = 5
_UNITS_WANTED = 3
"""With weights: where one computes, another one can be gathered."""
_OUTPUTS: tuple[Output, ...] = (
    "tuple", "list", "dict", "nested", "namedtuple", "dataclass", "frozen_dataclass",
)  # fmt: skip


@dataclass
class _Budget:
    """How many modules may still be drawn, and what they may be."""

    modules: int
    children_max: int
    low_precision: bool


def module_trees(
    *,
    depth_max: int = 2,
    children_max: int = 3,
    modules_max: int = 7,
    low_precision: bool = True,
) -> st.SearchStrategy[ModuleSpec]:
    """Draw a tree of modules in which every layer lies in a unit; shrinks to one unit with one weight.

    Containers, several roots, units without parameters, units of several modules, frozen and partly
    frozen layers, mixed dtypes, uneven, tiny and empty weights, both kinds of checkpoint, and all kinds of
    output containers come up. Units have default options: ``programs`` replaces them.

    Args:
        depth_max: most levels below the top.
        children_max: most children of a module.
        modules_max: most modules in all.
        low_precision: whether weights may be bf16.

    Example:
        >>> module_trees(depth_max=1)  # ModuleSpec(unit=UnitSpec(), children=(...))

    Raises:
        ConfigError: a number is out of range.
    """
    check_range("depth_max", depth_max, 0, _DEPTH_MAX)
    check_range("modules_max", modules_max, 1, _MODULES_MAX)
    check_range("children_max", children_max, 0, _MODULES_MAX)
    return st.composite(draw_tree)(
        depth_max, modules_max, children_max=children_max, low_precision=low_precision
    )


def layers(
    *, rows_min: int = 0, rows_max: int = 5, low_precision: bool = True
) -> st.SearchStrategy[LayerSpec]:
    """Draw a layer; shrinks to one square weight without bias.

    Args:
        rows_min: fewest rows of an uneven weight.
        rows_max: most rows of it.
        low_precision: whether it may be bf16.

    Example:
        >>> layers(rows_max=1)

    Raises:
        ConfigError: a number is out of range, or the minimum over the maximum.
    """
    check_range("rows_min", rows_min, 0, 64)
    check_range("rows_max", rows_max, 1, 64)
    check_bounds("rows", rows_min, rows_max)
    return st.composite(_layer)(rows_min, rows_max, low_precision=low_precision)


def _layer(draw: Draw, rows_min: int, rows_max: int, *, low_precision: bool) -> LayerSpec:
    kinds: tuple[LayerKind, ...] = ("linear", "linear", "scale", "rows", "embed")
    kind, rows = pick(draw, kinds), 1
    if kind in ("rows", "embed"):
        rows = number(draw, max(rows_min, kind == "embed"), rows_max)
    if not maybe(draw, 55):
        return LayerSpec(kind, rows)
    bias = maybe(draw, 60)
    low = low_precision and maybe(draw, 22)
    mixed = low_precision and bias and maybe(draw, 20)
    frozen: tuple[Frozen, ...] = ("none",) * 4 + ("weight", "all")
    other: DType = "float32" if low else "bfloat16"
    return LayerSpec(
        kind,
        rows,
        bias,
        dtype="bfloat16" if low else "float32",
        bias_dtype=other if mixed else None,
        frozen=pick(draw, frozen),
    )


def draw_tree(
    draw: Draw,
    depth_max: int,
    modules_max: int,
    *,
    children_max: int = 3,
    low_precision: bool,
) -> ModuleSpec:
    """Draw a tree, as ``module_trees`` says."""
    budget = _Budget(modules_max - 1, children_max, low_precision)
    tree = _node(draw, depth_max, budget, is_top=True, covered=False)
    if all(module.layer is None for _, module in walk(tree)):
        layer = _layer(draw, 0, _ROWS_MAX, low_precision=low_precision)
        tree = replace(tree, layer=layer, unit=UnitSpec())
    tree = _grouped(draw, tree)
    while (count := _count_units(tree)) < _UNITS_WANTED and maybe(draw, 97):
        tree = _with_another_unit(draw, tree, budget)
        if _count_units(tree) == count:
            break
    return _branched(draw, tree, budget)


def _with_another_unit(draw: Draw, tree: ModuleSpec, budget: _Budget) -> ModuleSpec:
    """Return ``tree`` with one more unit that has weights of its own, if it can have one."""
    wider = [tree]
    if budget.modules and len(tree.children) < budget.children_max:
        wider.append(replace(tree, children=(*tree.children, ModuleSpec())))
    layer = _layer(draw, 0, _ROWS_MAX, low_precision=budget.low_precision)
    made = [
        (each, _as_unit(each, path, module, layer))
        for each in wider
        for path, module in walk(each)
        if path and (module.unit is None or module.layer is None)
    ]
    better = [(before, after) for before, after in made if _count_units(after) > _count_units(tree)]
    if not better:
        return tree
    before, after = pick(draw, better)
    budget.modules -= before is not tree
    return after


def _as_unit(tree: ModuleSpec, path: str, module: ModuleSpec, layer: LayerSpec) -> ModuleSpec:
    """Return ``tree`` with the module at ``path`` a unit with weights: its own, else those of ``layer``."""
    unit = module.unit or UnitSpec()
    return replace_module(tree, path, unit=unit, layer=module.layer or layer)


def _count_units(tree: ModuleSpec) -> int:
    """Return how many units have weights of their own."""
    owner = owning_unit(ProgramSpec(tree))
    return len({owner[path] for path, module in walk(tree) if module.layer})


def _branched(draw: Draw, tree: ModuleSpec, budget: _Budget) -> ModuleSpec:
    """Give the last unit without children two layers to choose from, sometimes: ranks may differ there."""
    leaves = [path for path, node in walk(tree) if node.unit and node.layer and not node.children]
    if not leaves or budget.modules < 2 or budget.children_max < 2 or not maybe(draw, 40):
        return tree
    layers_below = tuple(
        ModuleSpec(layer=_layer(draw, 0, _ROWS_MAX, low_precision=budget.low_precision))
        for _ in range(2)
    )
    return replace_module(tree, leaves[-1], children=layers_below)


def _node(draw: Draw, depth: int, budget: _Budget, *, is_top: bool, covered: bool) -> ModuleSpec:
    """Draw a module; ``covered`` says that a unit lies above it."""
    count = _child_count(draw, depth, budget, is_top=is_top)
    has_layer = not maybe(draw, 36 if count else 8)
    is_unit = maybe(draw, 48 if covered else 60) or (has_layer and not covered)
    children = tuple(
        _node(draw, depth - 1, budget, is_top=False, covered=covered or is_unit)
        for _ in range(count)
    )
    return ModuleSpec(
        layer=_layer(draw, 0, _ROWS_MAX, low_precision=budget.low_precision) if has_layer else None,
        unit=UnitSpec() if is_unit else None,
        children=children,
        join="sum" if count > 1 and maybe(draw, 25) else "chain",
        checkpoint="none" if is_top else _checkpoint(draw),
        output=pick(draw, _OUTPUTS) if maybe(draw, 10) else "tensor",
    )


def _child_count(draw: Draw, depth: int, budget: _Budget, *, is_top: bool) -> int:
    most = min(budget.children_max, budget.modules) if depth > 0 else 0
    if most == 0 or (not is_top and not maybe(draw, 45)):
        return 0
    count = min(most, pick(draw, (0, 2, 2, 2, 3, 3, 3, most)))
    budget.modules -= count
    return count


def _checkpoint(draw: Draw) -> Checkpoint:
    odds = number(draw, 0, 99)
    if odds < 86:
        return "none"
    return "non_reentrant" if odds < 93 else "reentrant"


def _grouped(draw: Draw, tree: ModuleSpec) -> ModuleSpec:
    """Make one unit of the first and the last child of some module, if both are units."""
    if not maybe(draw, 30):
        return tree
    children = tuple(_grouped_inside(child, str(n)) for n, child in enumerate(tree.children))
    return _joined(replace(tree, children=children), "g")


def _grouped_inside(module: ModuleSpec, name: str) -> ModuleSpec:
    children = tuple(
        _grouped_inside(child, f"{name}.{n}") for n, child in enumerate(module.children)
    )
    return _joined(replace(module, children=children), f"g{name}")


def _joined(module: ModuleSpec, group: str) -> ModuleSpec:
    """Return ``module`` with its outermost two children that are units made one unit."""
    marked = [n for n, child in enumerate(module.children) if child.unit is not None]
    if len(marked) < 2:
        return module
    ends = {marked[0], marked[-1]}
    children = tuple(
        replace(child, unit=replace(child.unit, group=group)) if n in ends and child.unit else child
        for n, child in enumerate(module.children)
    )
    return replace(module, children=children)
