"""How many collectives a program may cost: a bound of its reductions, and where no gather is wasted; pure."""

from fsdp_sim.program.exactness import uses_in_step
from fsdp_sim.program.spec import ProgramSpec, StepSpec
from fsdp_sim.program.tree import parameter_dtype, parameter_shapes, roots, units, walk


def reductions_max(program: ProgramSpec, step: StepSpec) -> int:
    """Return how many reductions a rank issues at most: one for each parameter group and backward.

    What a reentrant checkpoint recomputes has a backward of its own beside those, as often as it is called.
    """
    trained = [one for one in step.passes if one.kind == "train"]
    backwards = sum(1 if one.backward == "joint" else one.forwards for one in trained)
    if _has_reentrant(program):
        backwards += uses_in_step(step, program)
    return backwards * _group_count(program)


def uses_every_prefetch(program: ProgramSpec, step: StepSpec) -> bool:
    """Return whether what a step gathers early is used: its units run in the order of the tree, each once.

    The modules of a unit of several lie apart in the tree, so it may be gathered for one that has run.
    Backward enters no unit that has no parameter, or below which nothing is trained; and what a failed
    step gathered may be given back in the next one. Who drives a unit by hand decides what it gathers.
    One of several roots in a reentrant checkpoint runs as in an evaluation, which gives back what is left.
    """
    layers = {
        path: module.layer for path, module in walk(program.model) if module.layer is not None
    }
    return (
        not any(one.calls for one in step.passes)
        and not any(one.raises for each in program.steps for one in each.passes)
        and all(layer.frozen == "none" for layer in layers.values())
        and not any(each.freeze for each in program.steps)
        and (len(roots(program)) == 1 or not _has_reentrant(program))
        and all(
            unit.spec.hooks and len(unit.paths) == 1 and not layers.keys().isdisjoint(unit.members)
            for unit in units(program)
        )
    )


def _has_reentrant(program: ProgramSpec) -> bool:
    return any(module.checkpoint == "reentrant" for _, module in walk(program.model))


def _group_count(program: ProgramSpec) -> int:
    """Return how many groups of one dtype and trainability the units' parameters form."""
    nodes = dict(walk(program.model))
    groups: dict[tuple[object, ...], None] = {}
    for unit in units(program):
        for path in unit.members:
            layer = nodes[path].layer
            for name in parameter_shapes(layer, program.width) if layer else ():
                assert layer is not None
                trains = layer.frozen == "none" or (layer.frozen == "weight" and name == "bias")
                groups[unit.paths, parameter_dtype(layer, name), trains] = None
    return len(groups)
