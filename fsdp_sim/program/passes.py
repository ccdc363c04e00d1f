"""One pass of a program over a model: forwards, losses, backwards; sharded or not, it is the same."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from fsdp_sim.program.data import input_batch, loss_weights
from fsdp_sim.program.model import Node, delayed_nodes, unwrap
from fsdp_sim.program.results import Losses
from fsdp_sim.program.spec import PassSpec, ProgramSpec, StepSpec
from fsdp_sim.program.tree import walk

Scope = Callable[[bool], AbstractContextManager[object]]


def run_pass(
    program: ProgramSpec,
    model: Node,
    place: tuple[int, int],
    device: torch.device,
    scope: Scope = lambda _is_last: nullcontext(),
) -> Losses:
    """Run the pass at ``place`` (step, pass) as the model's plan says; gradients are accumulated.

    Nothing is read on the host, so the order of the device's work rests on the program's own waits.

    Args:
        program: the whole program.
        model: its model, sharded or not.
        place: number of the step, and of the pass in it.
        device: where inputs are made.
        scope: what each backward runs in, given whether it is the last of its step.

    Returns:
        The losses of the forwards, still on the device.

    Raises:
        PlannedError: the pass says so.
    """
    one = program.steps[place[0]].passes[place[1]]
    model.plan.current = one
    try:
        with _grad_mode(one):
            losses = _forwards(program, model, place, device)
        if one.kind == "train":
            _backward(model, one, losses, scope, ends_step=_ends_step(program, place))
    finally:
        model.plan.current = None
        for node in delayed_nodes(model):
            node.postponed.parts.clear()
    return tuple(loss.detach() for loss in losses)


def set_frozen(model: nn.Module, step: StepSpec) -> None:
    """Freeze and unfreeze the layers that the step names."""
    for paths, requires_grad in ((step.freeze, False), (step.unfreeze, True)):
        for path in paths:
            for parameter in model.get_submodule(path).parameters(recurse=False):
                parameter.requires_grad_(requires_grad)


def _forwards(
    program: ProgramSpec, model: Node, place: tuple[int, int], device: torch.device
) -> list[Tensor]:
    """Return the losses of a pass, which the current stream may read.

    Ordering:
        A second stream begins behind the current one before the first forward, and is joined at the end.
    """
    one = program.steps[place[0]].passes[place[1]]
    accelerator = torch.get_device_module(device)
    current = accelerator.current_stream()
    other = accelerator.Stream() if one.side_stream else current
    if one.side_stream:
        other.wait_stream(current)
    losses = [_loss(program, model, (*place, 0), device)]
    with accelerator.stream(other):
        losses += [_loss(program, model, (*place, n), device) for n in range(1, one.forwards)]
    if one.side_stream:
        current.wait_stream(other)
    return losses


def _loss(
    program: ProgramSpec, model: Node, place: tuple[int, int, int], device: torch.device
) -> Tensor:
    """Return the loss of one forward: each output element times half of itself plus a weight."""
    one = program.steps[place[0]].passes[place[1]]
    shape, where = (program.batch, program.width), (*place, model.plan.rank)
    x = input_batch(shape, where, device)
    if torch.is_grad_enabled() and (one.input_grad or _needs_input_grad(program)):
        x.requires_grad_()
    y = unwrap(model(x))
    return (y * (0.5 * y + loss_weights(shape, where, device))).sum()


def _backward(
    model: Node, one: PassSpec, losses: list[Tensor], scope: Scope, *, ends_step: bool
) -> None:
    """Call backward as often as the pass says, on those losses that something trainable reached.

    Behind each, the weight gradients that it postponed are computed.
    """
    live = [loss for loss in losses if loss.requires_grad]
    if one.backward == "joint":
        live = [sum(live[1:], live[0])] if live else []
    if one.backward == "each_reversed":
        live.reverse()
    for number, loss in enumerate(live):
        with scope(ends_step and number == len(live) - 1):
            loss.backward()
            for node in delayed_nodes(model):
                node.backward_dw()


def _ends_step(program: ProgramSpec, place: tuple[int, int]) -> bool:
    """Return whether the pass at ``place`` is the last one of its step that trains."""
    later = program.steps[place[0]].passes[place[1] + 1 :]
    return all(one.kind != "train" for one in later)


def _grad_mode(one: PassSpec) -> AbstractContextManager[object]:
    if one.kind == "no_grad":
        return torch.no_grad()
    return torch.inference_mode() if one.kind == "inference" else nullcontext()


def _needs_input_grad(program: ProgramSpec) -> bool:
    """Return whether a reentrant checkpoint needs an input that requires a gradient to have one."""
    return any(module.checkpoint == "reentrant" for _, module in walk(program.model))
