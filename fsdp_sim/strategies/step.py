"""steps: what a program runs, valid by construction for its model."""

from dataclasses import dataclass
from typing import Any, Literal

from hypothesis import strategies as st

from fsdp_sim.program.check import STEPS_MAX
from fsdp_sim.program.spec import (
    Backward,
    CallsSpec,
    ContextSpec,
    ModuleSpec,
    PassKind,
    PassSpec,
    RaiseSpec,
    StepSpec,
)
from fsdp_sim.program.tree import walk
from fsdp_sim.strategies.arguments import chance, check_range


@dataclass(frozen=True)
class _World:
    """What the steps of one program have in common.

    Attributes:
        nodes: the modules by path.
        free: modules whose calls may differ from rank to rank.
        recorded: whether every training pass must run the same.
    """

    nodes: dict[str, ModuleSpec]
    free: frozenset[str]
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
    come up. Calls differ between ranks only inside a unit that has a trainable weight of its own on the
    way: whether a *unit* takes part must be the same on all ranks. Under RECORDED every training pass is
    the same and has one backward.

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
    world = _World(dict(walk(model)), _rank_free(model), world_size, recorded)
    return _steps(world, steps_max, exceptions=exceptions)


def _rank_free(model: ModuleSpec) -> frozenset[str]:
    """Return the modules whose calls may differ from rank to rank.

    Such a module has no unit below it, and it or a module above it, up to its unit, has a trainable weight
    that is applied after the calls: the unit then gets a gradient on every rank, whatever was called.
    """
    free = []
    anchored: dict[str, bool] = {}
    for path, module in walk(model):
        above = anchored[path.rpartition(".")[0]] if path else False
        trains = module.layer is not None and module.layer.frozen == "none"
        anchored[path] = trains if module.unit is not None else above or trains
        below = [child for below_path, child in walk(module) if below_path]
        if anchored[path] and module.children and not any(child.unit for child in below):
            free.append(path)
    return frozenset(free)


@st.composite
def _steps(draw: Any, world: _World, steps_max: int, *, exceptions: bool) -> tuple[StepSpec, ...]:
    same = _training_pass(draw, world) if world.recorded else None
    count = draw(st.integers(1, steps_max))
    return tuple(_step(draw, world, same, exceptions=exceptions) for _ in range(count))


def _step(draw: Any, world: _World, same: PassSpec | None, *, exceptions: bool) -> StepSpec:
    microbatches = draw(st.sampled_from((1, 1, 1, 2, 2, 3)))
    passes = [same or _training_pass(draw, world) for _ in range(microbatches)]
    if draw(chance(24)):
        place = draw(st.integers(0, len(passes)))
        passes.insert(place, _evaluation(draw, world))
    if exceptions and draw(chance(10)):
        place = draw(st.integers(0, len(passes) - 1))
        passes[place] = _raising(draw, world, passes[place])
    freeze: tuple[str, ...] = ()
    unfreeze: tuple[str, ...] = ()
    if not world.recorded and draw(chance(6)):
        layer = st.sampled_from([path for path, module in world.nodes.items() if module.layer])
        freeze, unfreeze = ((draw(layer),), ()) if draw(st.booleans()) else ((), (draw(layer),))
    return StepSpec(
        tuple(passes), set_to_none=not draw(chance(15)), freeze=freeze, unfreeze=unfreeze
    )


def _training_pass(draw: Any, world: _World) -> PassSpec:
    forwards = 2 if draw(chance(15)) else 1
    backward: Backward = "joint"
    if forwards > 1 and not world.recorded:
        backward = draw(st.sampled_from(("joint", "each", "each_reversed")))
    return PassSpec(
        forwards=forwards,
        backward=backward,
        input_grad=draw(chance(20)),
        calls=_calls(draw, world) if draw(chance(55)) else (),
    )


def _evaluation(draw: Any, world: _World) -> PassSpec:
    kinds: tuple[PassKind, ...] = ("no_grad", "inference")
    if not world.recorded:
        kinds = (*kinds, "enabled")
    return PassSpec(
        draw(st.sampled_from(kinds)), calls=_calls(draw, world) if draw(chance(30)) else ()
    )


def _raising(draw: Any, world: _World, one: PassSpec) -> PassSpec:
    """Return ``one`` with an exception on all ranks."""
    path = draw(st.sampled_from(list(world.nodes)))
    in_backward = one.kind == "train" and draw(st.booleans())
    phase: Literal["forward", "backward"] = "backward" if in_backward else "forward"
    raises = RaiseSpec(path, phase, reset=not draw(chance(30)))
    return PassSpec(one.kind, one.forwards, one.backward, one.input_grad, one.calls, raises)


def _calls(draw: Any, world: _World) -> tuple[CallsSpec, ...]:
    """Draw what one or two of the modules with children call."""
    parents = [path for path, module in world.nodes.items() if module.children]
    if not parents:
        return ()
    if world.free and world.world_size > 1 and draw(chance(50)):
        return (_call(draw, world, draw(st.sampled_from(sorted(world.free)))),)
    chosen = draw(st.lists(st.sampled_from(parents), min_size=1, max_size=2, unique=True))
    return tuple(_call(draw, world, path) for path in chosen)


def _call(draw: Any, world: _World, path: str) -> CallsSpec:
    count = len(world.nodes[path].children)
    order = tuple(draw(st.lists(st.integers(0, count - 1), max_size=count + 1)))
    dropped: tuple[int, ...] = ()
    if order and draw(chance(15)):
        dropped = (draw(st.integers(0, len(order) - 1)),)
    ranks = None
    if path in world.free and world.world_size > 1 and draw(chance(75)):
        ranks = (draw(st.integers(0, world.world_size - 1)),)
    return CallsSpec(path, order, dropped, ranks)
