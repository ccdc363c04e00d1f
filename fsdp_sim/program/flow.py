"""Which passes train: whether a loss depends on a trainable weight, followed through the tree; pure.

A window of gradient accumulation ends in the backward of a step's last training pass. If that pass has no
backward through any unit, while an earlier one had, nothing ever ends the window: such a program is wrong,
not the runtime.
"""

from collections.abc import Iterator

from fsdp_sim.program.spec import LayerSpec, ModuleSpec, PassSpec, ProgramSpec
from fsdp_sim.program.tree import child_path, parameter_shapes, walk


def untrained_ends(program: ProgramSpec) -> Iterator[tuple[int, int]]:
    """Yield (step, pass) of each last training pass that trains nothing on some rank, though it could."""
    frozen = {path for path, module in walk(program.model) if not _trainable(module.layer)}
    for number, step in enumerate(program.steps):
        frozen = (frozen | _with_tied(program, step.freeze)) - _with_tied(program, step.unfreeze)
        training = [n for n, one in enumerate(step.passes) if one.kind == "train"]
        if training and not all(
            _trains(program.model, "", step.passes[training[-1]], frozen, rank)
            for rank in range(program.world_size)
        ):
            default = PassSpec()
            if any(
                _trains(program.model, "", one, frozen, rank)
                for one in (default, *step.passes)
                for rank in range(program.world_size)
            ):
                yield number, training[-1]


def _with_tied(program: ProgramSpec, paths: tuple[str, ...]) -> set[str]:
    """Return ``paths`` and those of the layers that share their parameters."""
    source = {tie.module: tie.source for tie in program.ties}
    held = {source.get(path, path) for path in paths}
    return held | {module for module, of in source.items() if of in held}


def _trains(module: ModuleSpec, path: str, one: PassSpec, frozen: set[str], rank: int) -> bool:
    """Return whether what the module at ``path`` returns depends on a trainable weight in or below it."""
    if module.layer is not None and path not in frozen:
        return True
    return any(
        _trains(module.children[number], child_path(path, number), one, frozen, rank)
        for number in called(module, path, one, rank)
    )


def called(module: ModuleSpec, path: str, one: PassSpec, rank: int) -> tuple[int, ...]:
    """Return the children that the module calls on ``rank`` and whose output it uses."""
    for calls in one.calls:
        if calls.path == path and (calls.ranks is None or rank in calls.ranks):
            return tuple(n for place, n in enumerate(calls.order) if place not in calls.dropped)
    return tuple(range(len(module.children)))


def _trainable(layer: LayerSpec | None) -> bool:
    """Return whether some parameter of the layer requires a gradient."""
    if layer is None or layer.frozen == "all":
        return False
    return layer.frozen == "none" or "bias" in parameter_shapes(layer, 1)
