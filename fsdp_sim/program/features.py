"""Which features a program has, by name: what coverage of generated programs is counted in; pure."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain

from fsdp_sim.program.placements import ONE_AXIS, TWO_AXES
from fsdp_sim.program.spec import LayerSpec, ModuleSpec, PassSpec, ProgramSpec, UnitSpec
from fsdp_sim.program.tree import Unit, owning_unit, parameter_shapes, roots, units, walk

Test = Callable[["Facts"], bool]


class Facts:
    """What the tests of features look at, gathered once from a program."""

    def __init__(self, program: ProgramSpec) -> None:
        self.program = program
        self.nodes: dict[str, ModuleSpec] = dict(walk(program.model))
        self.units: tuple[Unit, ...] = units(program)
        self.layers: list[LayerSpec] = [n.layer for n in self.nodes.values() if n.layer]
        self.unit_specs: list[UnitSpec] = [unit.spec for unit in self.units]
        self.passes: list[PassSpec] = [one for step in program.steps for one in step.passes]
        self.trained: list[PassSpec] = [one for one in self.passes if one.kind == "train"]

    def unit_levels(self) -> int:
        """Return how many units deep the deepest unit lies."""
        owner = owning_unit(self.program)
        depth: dict[str, int] = {}
        for path in self.nodes:
            above = depth[path.rpartition(".")[0]] if path else 0
            depth[path] = above + (self.nodes[path].unit is not None)
        assert len(depth) == len(owner), "every module is walked once"
        return max(depth.values(), default=0)

    def orders(self) -> Iterator[tuple[int, ...]]:
        """Yield the order of every planned call list of a training pass."""
        return (calls.order for one in self.trained for calls in one.calls)

    def skips(self) -> bool:
        """Return whether some training pass leaves a child out."""
        return any(
            set(calls.order) != set(range(len(self.nodes[calls.path].children)))
            for one in self.trained
            for calls in one.calls
        )

    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of all parameters."""
        width = self.program.width
        return list(chain(*(parameter_shapes(layer, width).values() for layer in self.layers)))


def features(program: ProgramSpec) -> tuple[str, ...]:
    """Return the names of the features that ``program`` has, in the order of ``FEATURES``."""
    facts = Facts(program)
    return tuple(name for name, test in FEATURES.items() if test(facts))


def _strategy(name: str) -> Test:
    return lambda facts: any(spec.strategy == name for spec in facts.unit_specs)


def _has_empty_shard(facts: Facts) -> bool:
    """Return whether some parameter has fewer rows than the ranks that it may be spread over."""
    return any(shape[0] < facts.program.world_size for shape in facts.shapes())


FEATURES: dict[str, Test] = {
    "several units": lambda f: len(f.units) > 1,
    "units on two levels": lambda f: len(f.units) > 1 and f.unit_levels() > 1,
    "several roots": lambda f: len(roots(f.program)) > 1,
    "container unit": lambda f: any(not _layers(f, unit) for unit in f.units),
    "unit of several modules": lambda f: any(len(unit.paths) > 1 for unit in f.units),
    "several layers in a unit": lambda f: any(len(_layers(f, unit)) > 1 for unit in f.units),
    "parallel children": lambda f: any(n.join == "sum" and n.children for n in f.nodes.values()),
    "tied": lambda f: bool(f.program.ties),
    "frozen": lambda f: any(layer.frozen == "all" for layer in f.layers),
    "partly frozen": lambda f: any(layer.frozen == "weight" and layer.bias for layer in f.layers),
    "frozen later": lambda f: any(step.freeze or step.unfreeze for step in f.program.steps),
    "mixed dtypes": lambda f: any(_mixed(f, unit) for unit in f.units),
    "low-precision weights": lambda f: any(layer.dtype != "float32" for layer in f.layers),
    "low-precision compute": lambda f: any(
        spec.precision and spec.precision.compute not in (None, "float32") for spec in f.unit_specs
    ),
    "empty shard": _has_empty_shard,
    "no rows": lambda f: any(shape[0] == 0 for shape in f.shapes()),
    "lookup": lambda f: any(layer.kind == "embed" for layer in f.layers),
    "odd output": lambda f: any(n.output != "tensor" for n in f.nodes.values()),
    "checkpoint": lambda f: any(n.checkpoint == "non_reentrant" for n in f.nodes.values()),
    "reentrant checkpoint": lambda f: any(n.checkpoint == "reentrant" for n in f.nodes.values()),
    "repeated": lambda f: any(max(Counter(o).values(), default=0) > 1 for o in f.orders()),
    "conditional": lambda f: f.skips(),
    "reordered": lambda f: any(list(order) != sorted(order) for order in f.orders()),
    "dropped output": lambda f: any(c.dropped for one in f.trained for c in one.calls),
    "ranks differ": lambda f: any(
        calls.ranks is not None for one in f.trained for calls in one.calls
    ),
    "microbatches": lambda f: any(
        sum(one.kind == "train" for one in step.passes) > 1 for step in f.program.steps
    ),
    "evaluation": lambda f: any(one.kind in ("no_grad", "inference") for one in f.passes),
    "forward only": lambda f: any(one.kind == "enabled" for one in f.passes),
    "several forwards": lambda f: any(one.forwards > 1 for one in f.trained),
    "several backwards": lambda f: any(
        one.forwards > 1 and one.backward != "joint" for one in f.trained
    ),
    "second stream": lambda f: any(one.side_stream for one in f.passes),
    "input gradient": lambda f: any(one.input_grad for one in f.trained),
    "exception": lambda f: any(one.raises for one in f.passes),
    "sub-mesh": lambda f: any(spec.axes is not None for spec in f.unit_specs),
    "driven by hand": lambda f: not all(spec.hooks for spec in f.unit_specs),
    "meta device": lambda f: f.program.meta,
    "delayed gradient": lambda f: any(layer.delayed for layer in f.layers),
    "declared gradients": lambda f: any(
        spec.grad_accumulation_count is not None for spec in f.unit_specs
    ),
    "another schedule": lambda f: ">" in f.program.schedule,
    "shuffled sets": lambda f: "shuffle" in f.program.schedule,
    "late rank": lambda f: bool(f.program.faults),
    "several steps": lambda f: len(f.program.steps) > 1,
    "resumed": lambda f: any(step.resume is not None for step in f.program.steps),
    "whole state": lambda f: any(step.export for step in f.program.steps),
    "zeroed gradients": lambda f: any(not step.set_to_none for step in f.program.steps),
    "recorded": lambda f: f.program.context.prefetch_order == "recorded",
    "one stream": lambda f: not f.program.context.overlap_allgather_reduction,
    "outer stream": lambda f: f.program.context.overlap_outer_communication,
    "caller syncs": lambda f: f.program.context.caller_managed_grad_sync,
    "prefetch budget": lambda f: any(
        (spec.forward_prefetch, spec.backward_prefetch) != (None, None) for spec in f.unit_specs
    ),
    "no prefetch": lambda f: any(
        0 in (spec.forward_prefetch, spec.backward_prefetch) for spec in f.unit_specs
    ),
    "kept after forward": lambda f: any(not spec.reshard_after_forward for spec in f.unit_specs),
    "divisor": lambda f: any(spec.grad_divisor != 1 for spec in f.unit_specs),
    "strategies differ": lambda f: len({spec.strategy for spec in f.unit_specs}) > 1,
    "two axes": lambda f: len(f.program.mesh) > 1,
    "one rank": lambda f: f.program.world_size == 1,
    "momentum": lambda f: f.program.optimizer.momentum > 0,
    "adaptive optimizer": lambda f: f.program.optimizer.kind != "sgd",
    "foreach or fused": lambda f: f.program.optimizer.implementation != "plain",
    **{name: _strategy(name) for name in dict.fromkeys((*ONE_AXIS, *TWO_AXES))},
}

EXCLUDED: dict[frozenset[str], str] = {
    frozenset((feature, other)): why
    for feature, others, why in (
        ("ranks differ", ("one rank",), "it takes two"),
        ("ranks differ", ("reentrant checkpoint",), "the order of reductions would differ too"),
        ("resumed", ("sub-mesh",), "a checkpoint has one weight of each name"),
        ("whole state", ("sub-mesh",), "a state dict has one weight of each name"),
        ("momentum", ("adaptive optimizer",), "it is an option of SGD"),
        (
            "recorded",
            ("forward only", "several backwards", "driven by hand"),
            "a pass repeats the recorded one, and has one backward and hooks",
        ),
        ("driven by hand", ("reentrant checkpoint",), "its backward is not one piece"),
        ("driven by hand", ("ranks differ",), "the order of reductions would differ too"),
        (
            "declared gradients",
            (
                *("repeated", "conditional", "reordered", "dropped output", "ranks differ"),
                *("exception", "frozen later", "reentrant checkpoint"),
            ),
            "each gradient comes once in each backward",
        ),
    )
    for other in others
}
"""Pairs of features that no valid program has, with the reason."""


def _layers(facts: Facts, unit: Unit) -> list[LayerSpec]:
    return [layer for path in unit.members if (layer := facts.nodes[path].layer)]


def _mixed(facts: Facts, unit: Unit) -> bool:
    layers = _layers(facts, unit)
    dtypes = {layer.dtype for layer in layers}
    return len(dtypes | {layer.bias_dtype or layer.dtype for layer in layers if layer.bias}) > 1
