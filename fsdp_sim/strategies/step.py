"""steps: what a program runs, valid by construction for its model."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from hypothesis import strategies as st

from fsdp_sim.program.check import STEPS_MAX
from fsdp_sim.program.placements import letters
from fsdp_sim.program.spec import (
    Backward,
    CallsSpec,
    ContextSpec,
    LayerSpec,
    ModuleSpec,
    PassKind,
    PassSpec,
    ProgramSpec,
    RaiseSpec,
    StepSpec,
)
from fsdp_sim.program.tree import child_path, owning_unit, parameter_shapes, walk
from fsdp_sim.strategies.arguments import Draw, check_range, maybe, number, pick

Phase = Literal["forward", "backward"]


@dataclass(frozen=True)
class _World:
    """What the steps of one program have in common.

    Attributes:
        nodes: the modules by path.
        free: modules whose calls may differ from rank to rank.
        movable: layers that may be frozen and unfrozen later, by path: of units whose calls are the same on
            all ranks; in others something must stay trainable.
        owner: the key of the unit that owns each module's parameters.
        recorded: whether every training pass must run the same.
    """

    nodes: dict[str, ModuleSpec]
    free: tuple[str, ...]
    movable: dict[str, LayerSpec]
    owner: dict[str, str | None]
    world_size: int
    recorded: bool


def steps(
    model: ModuleSpec,
    world_size: int,
    context: ContextSpec | None = None,
    *,
    steps_max: int = 3,
    exceptions: bool = True,
) -> st.SearchStrategy[tuple[StepSpec, ...]]:
    """Draw the steps of a program; shrinks to one step of one pass that calls every child in order.

    Conditional, repeated and reordered calls, outputs that are dropped, calls that differ from rank to
    rank, several forwards and backwards, microbatches, evaluation, planned exceptions, and freezing later
    come up. A pass raises on all ranks, and never in the last step, so that recovery is seen. Calls differ
    between ranks only inside a unit that has a trainable weight of its own on the way: whether a *unit*
    takes part must be the same on all ranks. Under RECORDED every training pass is the same and has one
    backward, and layers are frozen before the first step only.

    Args:
        model: the tree whose modules the steps call.
        world_size: number of ranks.
        context: its prefetch order decides what is valid; the default context by default.
        steps_max: most steps.
        exceptions: whether passes may raise.

    Example:
        >>> steps(ModuleSpec(unit=UnitSpec(), layer=LayerSpec()), 2, steps_max=1)

    Raises:
        ConfigError: a number is out of range.
    """
    check_range("world_size", world_size, 1, 4096)
    check_range("steps_max", steps_max, 1, STEPS_MAX)
    recorded = context is not None and context.prefetch_order == "recorded"
    return st.composite(draw_steps)(
        model, world_size, steps_max, recorded=recorded, exceptions=exceptions
    )


def _rank_free(model: ModuleSpec) -> tuple[str, ...]:
    """Return the modules whose calls may differ from rank to rank.

    Such a module is in a unit of one module with no unit inside, before or behind which its gradients may be
    complete.
    It or a module above it, up to its unit, has a trainable weight that is applied after the calls: the
    unit then gets a gradient on every rank, whatever was called. There are none at all beside a reentrant
    checkpoint, which gathers the next unit before the runtime can see that backward has left this one, nor
    beside a unit without hooks, whose backward it cannot see.
    """
    free: list[str] = []
    if not all(_is_followed(module) for _, module in walk(model)):
        return ()
    for path, module in walk(model):
        encloses = any(below.unit for below_path, below in walk(module) if below_path)
        if module.unit is not None and not module.unit.group and not encloses:
            free += _free_in(module, path, anchored=False)
    return tuple(free)


def _is_followed(module: ModuleSpec) -> bool:
    """Return whether the runtime sees backward enter the module where it is its turn."""
    return module.checkpoint != "reentrant" and (module.unit is None or module.unit.hooks)


def _free_in(module: ModuleSpec, path: str, *, anchored: bool) -> Iterator[str]:
    """Yield the free modules of a unit; ``anchored`` says that a weight above is applied after the calls."""
    anchored = anchored or (module.layer is not None and module.layer.frozen == "none")
    if module.children and anchored:
        yield path
    for place, child in enumerate(module.children):
        yield from _free_in(child, child_path(path, place), anchored=anchored)


def _world(model: ModuleSpec, world_size: int, *, recorded: bool) -> _World:
    nodes, free, owner = dict(walk(model)), _rank_free(model), owning_unit(ProgramSpec(model))
    fixed = {owner[path] for path in free}
    movable = {
        path: module.layer
        for path, module in nodes.items()
        if module.layer is not None and owner[path] not in fixed
    }
    return _World(nodes, free, movable, owner, world_size, recorded)


def draw_steps(
    draw: Draw,
    model: ModuleSpec,
    world_size: int,
    steps_max: int,
    *,
    recorded: bool,
    exceptions: bool,
) -> tuple[StepSpec, ...]:
    """Draw steps, as ``steps`` says."""
    world = _world(model, world_size, recorded=recorded)
    same = _training_pass(draw, world) if recorded else None
    made: list[StepSpec] = []
    more, odds = True, 50 if not recorded and _gathers_at_once(model) else 95
    while more:  # asked before each step, so that shrinking can cut any step out
        more, odds = len(made) + 1 < steps_max and maybe(draw, odds), 30
        freezes = 0 if recorded and made else 30 if made else 12
        made.append(_step(draw, world, same, exceptions=exceptions and more, freezes=freezes))
    return tuple(made)


def _gathers_at_once(model: ModuleSpec) -> bool:
    """Return whether weights are gathered in the first step: others are whole until the optimizer has run.

    Under RECORDED they are gathered early from the second pass on.
    """
    specs = [module.unit for _, module in walk(model) if module.unit]
    return any(
        "S" in placed or "T" in placed
        for placed in (letters(each.strategy, 2)[0] for each in specs)
    )


def _step(
    draw: Draw, world: _World, same: PassSpec | None, *, exceptions: bool, freezes: int
) -> StepSpec:
    microbatches = pick(draw, (1, 1, 1, 1, 2, 2, 3))
    passes = [same or _training_pass(draw, world) for _ in range(microbatches)]
    if maybe(draw, 24):
        passes.insert(number(draw, 0, len(passes)), _evaluation(draw, world))
    if exceptions and maybe(draw, 18):
        place = number(draw, 0, len(passes) - 1)
        passes[place] = _raising(draw, world, passes[place])
    freeze: tuple[str, ...] = ()
    unfreeze: tuple[str, ...] = ()
    if world.movable and maybe(draw, freezes):
        trained = _trained(world)
        if trained and maybe(draw, 70):
            freeze = (pick(draw, trained),)
        else:
            unfreeze = (pick(draw, list(world.movable)),)
    export = maybe(draw, 12) and not any(one.raises for one in passes) and _is_on_whole_mesh(world)
    return StepSpec(
        tuple(passes),
        set_to_none=not maybe(draw, 15),
        export=export,
        freeze=freeze,
        unfreeze=unfreeze,
    )


def _is_on_whole_mesh(world: _World) -> bool:
    return all(node.unit is None or node.unit.axes is None for node in world.nodes.values())


def _trained(world: _World) -> list[str]:
    """Return the trained layers that may be frozen: such as leave two weights in their unit, if any do."""
    trained = {path: layer for path, layer in world.movable.items() if layer.frozen == "none"}
    counts: Counter[str | None] = Counter()
    for path, layer in trained.items():
        counts[world.owner[path]] += len(parameter_shapes(layer, 1))
    leave_two = [
        path
        for path, layer in trained.items()
        if counts[world.owner[path]] >= len(parameter_shapes(layer, 1)) + 2
    ]
    return leave_two or list(trained)


def _training_pass(draw: Draw, world: _World) -> PassSpec:
    calls = _calls(draw, world) if maybe(draw, 70) else ()
    if not maybe(draw, 40):
        return PassSpec(calls=calls)
    forwards = number(draw, 1, 2)
    backwards: tuple[Backward, ...] = ("joint", "each", "each_reversed")
    one_backward = world.recorded or any(each.ranks is not None for each in calls)
    backward = pick(draw, backwards) if forwards > 1 and not one_backward else "joint"
    return PassSpec(forwards=forwards, backward=backward, input_grad=maybe(draw, 60), calls=calls)


def _evaluation(draw: Draw, world: _World) -> PassSpec:
    kinds: tuple[PassKind, ...] = ("no_grad", "inference", "enabled", "enabled")
    kind = pick(draw, kinds[:2] if world.recorded else kinds)
    calls = _calls(draw, world) if maybe(draw, 30) else ()
    is_double = maybe(draw, 60)
    return PassSpec(kind, 1 + is_double, is_double, calls=calls)


def _raising(draw: Draw, world: _World, one: PassSpec) -> PassSpec:
    """Return ``one`` with an exception on all ranks: at the top, where their calls differ.

    Under RECORDED it comes behind a layer: the output of a module that only hands its input on would be one
    more node of the graph, so that backward would run in another order.

    It comes on one stream: whoever catches it knows nothing of another one that still reads weights.

    A step follows in which the program must have recovered; it also frees what PyTorch's engine keeps
    queued of a backward that raised, until the next one.
    """
    differ = any(calls.ranks is not None for calls in one.calls)
    path = "" if differ else pick(draw, list(world.nodes))
    can = one.kind == "train" and (world.nodes[path].layer is not None or not world.recorded)
    phase: Phase = "backward" if can and maybe(draw, 50) else "forward"
    left = _recovers(world, path) and maybe(draw, 30)
    return replace(one, side_stream=False, raises=RaiseSpec(path, phase, reset=not left))


def _recovers(world: _World, path: str) -> bool:
    """Return whether the runtime recovers by itself from an exception at ``path``.

    It must see the pass: outside every unit it does not, nor where units are driven by hand. Under RECORDED
    a pass that ends between two roots looks as if it went on.
    """
    is_in_unit = any(world.nodes[above].unit for above in world.nodes if _reaches(above, path))
    have_hooks = all(node.unit.hooks for node in world.nodes.values() if node.unit)
    return is_in_unit and have_hooks and not (world.recorded and world.nodes[""].unit is None)


def _reaches(above: str, path: str) -> bool:
    return above in ("", path) or path.startswith(f"{above}.")


def _calls(draw: Draw, world: _World) -> tuple[CallsSpec, ...]:
    """Draw what one of the modules with children calls, and sometimes a second one."""
    parents = [path for path, module in world.nodes.items() if module.children]
    if not parents:
        return ()
    if world.free and world.world_size > 1 and maybe(draw, 85):
        return (_call(draw, world, pick(draw, world.free)),)
    first, second = pick(draw, parents), pick(draw, parents)
    chosen = (first,) if first == second else (first, second)
    return tuple(_call(draw, world, path) for path in chosen)


def _call(draw: Draw, world: _World, path: str) -> CallsSpec:
    count = len(world.nodes[path].children)
    length = 0 if maybe(draw, 8) else number(draw, 1, count + 1)
    order = tuple(number(draw, 0, count - 1) for _ in range(length))
    dropped = (number(draw, 0, length - 1),) if order and maybe(draw, 22) else ()
    ranks: tuple[int, ...] | None = None
    if path in world.free and world.world_size > 1 and maybe(draw, 90):
        ranks = (number(draw, 0, world.world_size - 1),)
    return CallsSpec(path, order, dropped, ranks)
