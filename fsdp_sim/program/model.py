"""The torch modules of a program, as every backend and the unsharded oracle run them.

Note [fold]
    ``fold`` maps any finite number to an integer in [-2, 2], zero to zero, in forward and, applied to the gradient, in
    backward. Activations and their gradients are then integers whatever the weights are, so a weight's
    gradient is a sum of at most ``4 * batch`` units per use, and sums over ranks and microbatches are
    exact in fp32 (and in bf16 up to 256 units). A wrong weight still changes what comes out.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fsdp_sim.program.copies import copy_of, name_in_copy
from fsdp_sim.program.data import initial_weight
from fsdp_sim.program.delayed import Postponed, linear_with_delayed_weight
from fsdp_sim.program.spec import LayerSpec, ModuleSpec, Output, PassSpec, ProgramSpec
from fsdp_sim.program.tree import child_path, parameter_dtype, parameter_shapes, unit_specs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class PlannedError(Exception):
    """What a program raises where its ``RaiseSpec`` says so."""


@dataclass
class Plan:
    """What one rank does in the pass that runs now; shared by all modules of a model.

    Attributes:
        rank: whose calls are made.
        current: the pass; None outside a pass: every module calls all its children.
    """

    rank: int = 0
    current: PassSpec | None = None

    def calls(self, path: str, child_count: int) -> list[tuple[int, bool]]:
        """Return the children that the module at ``path`` calls, and whether it uses what they return."""
        for calls in self.current.calls if self.current else ():
            if calls.path == path and self._here(calls.ranks):
                return [(n, i not in calls.dropped) for i, n in enumerate(calls.order)]
        return [(number, True) for number in range(child_count)]

    def raises(self, path: str, phase: str) -> bool:
        """Return whether the module at ``path`` raises in this phase of this pass."""
        planned = self.current.raises if self.current else None
        if planned is None:
            return False
        return planned.path == path and planned.phase == phase and self._here(planned.ranks)

    def _here(self, ranks: tuple[int, ...] | None) -> bool:
        return ranks is None or self.rank in ranks


class Fold(torch.autograd.Function):
    """Map numbers to integers in [-2, 2], and gradients too. See Note [fold]."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        """Return the folded ``x`` [batch, width]."""
        return _folded(x)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        """Return the folded gradient [batch, width]."""
        return _folded(grad)


class RaiseInBackward(torch.autograd.Function):
    """Return the input; raise when its gradient comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, path: str) -> Tensor:
        """Return a copy of ``x``: a view would leave the unit's output to the node before it."""
        ctx.path = path
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> Any:
        """Raise what the program planned."""
        raise PlannedError(f"planned in backward of {ctx.path!r}")


class Node(nn.Module):
    """A module of a program: calls children as planned, then applies its own layer.

    Attributes:
        spec: what it is made from.
        path: its name in the model.
        initial: by parameter name, the name that its initial values depend on.
        cast_to: dtype in which the layer computes, by parameter name; only the unsharded oracle sets it,
            where it stands for the runtime's compute weights.
    """

    def __init__(self, spec: ModuleSpec, path: str, plan: Plan, width: int) -> None:
        super().__init__()
        self.spec, self.path, self.plan = spec, path, plan
        self.initial: dict[str, str] = {}
        self.cast_to: dict[str, torch.dtype] = {}
        if spec.layer is not None:
            _register_layer(self, spec.layer, path, width)
        for number, child in enumerate(spec.children):
            kind = DelayedNode if child.layer and child.layer.delayed else Node
            self.add_module(str(number), kind(child, child_path(path, number), plan, width))

    def reset_parameters(self) -> None:
        """Give the own parameters their initial values: small integers that depend on names alone."""
        for name, parameter in self.named_parameters(recurse=False):
            parameter.copy_(initial_weight(self.initial[name], tuple(parameter.shape)))

    def forward(self, x: Tensor) -> Any:
        """Return the output [batch, width] in the container that the spec asks for.

        Raises:
            PlannedError: the plan says so.
        """
        if self.plan.raises(self.path, "forward"):
            raise PlannedError(f"planned in forward of {self.path!r}")
        y = self._children(x)
        if self.spec.layer is not None:
            y = fold(self._layer(self.spec.layer, y))
        if self.plan.raises(self.path, "backward"):
            y = RaiseInBackward.apply(y, self.path)  # type: ignore[no-untyped-call]
        return WRAPPERS[self.spec.output](y)

    def _children(self, x: Tensor) -> Tensor:
        outputs = []
        for number, used in self.plan.calls(self.path, len(self.spec.children)):
            output = self._call(number, x)
            if used and self.spec.join == "chain":
                x = output
            elif used:
                outputs.append(output)
        return fold(sum(outputs[1:], outputs[0])) if outputs else x

    def _call(self, number: int, x: Tensor) -> Tensor:
        child = self.get_submodule(str(number))
        how = self.spec.children[number].checkpoint
        if how == "none" or not torch.is_grad_enabled():  # nothing to recompute for
            return unwrap(child(x))
        return checkpoint(lambda y: unwrap(child(y)), x, use_reentrant=how == "reentrant")

    def _layer(self, layer: LayerSpec, x: Tensor) -> Tensor:
        """Return what the layer makes of ``x`` [batch, width], in fp32, before the fold."""
        weight = self._weight("weight")
        z = x.to(weight.dtype)
        if layer.kind == "linear":
            z = self._linear(z, weight)
        elif layer.kind == "scale":
            z = z * weight
        elif layer.kind == "rows":
            z = fold(F.linear(z, weight)) @ self._weight("weight_out")
        else:
            index = x.detach().sum(dim=1).to(torch.int64).remainder(layer.rows)
            z = z + F.embedding(index, weight)
        y = z.to(x.dtype)
        return y + self._weight("bias").to(x.dtype) if layer.bias else y

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def _weight(self, name: str) -> Tensor:
        weight = getattr(self, name)
        assert isinstance(weight, Tensor), f"{self.path}.{name} is registered"
        return weight.to(self.cast_to.get(name, weight.dtype))


class DelayedNode(Node):
    """A node whose linear weight gets its gradient after the backward.

    Attributes:
        postponed: what the backwards so far left to be done.
    """

    def __init__(self, spec: ModuleSpec, path: str, plan: Plan, width: int) -> None:
        super().__init__(spec, path, plan, width)
        self.postponed = Postponed()
        self.get_parameter("weight").skip_backward_post_hook = True  # type: ignore[attr-defined]

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear_with_delayed_weight(x, weight, self.postponed)

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Have ``hook`` called whenever the gradient of the weight is there."""
        self.postponed.hooks.append(hook)

    def backward_dw(self) -> None:
        """Compute the weight's gradient of the backwards so far, and tell."""
        self.postponed.accumulate(self.get_parameter("weight"))


def delayed_nodes(model: nn.Module) -> list[DelayedNode]:
    """Return the nodes whose weights get their gradients after the backward, in order."""
    return [node for node in model.modules() if isinstance(node, DelayedNode)]


def build_model(program: ProgramSpec, plan: Plan) -> Node:
    """Return the unsharded model of a program on the CPU, with the initial weights of the plan's rank.

    A program that says so gets its model on the meta device instead, to be initialised later.
    """
    with torch.device("meta" if program.meta else "cpu"):
        top = program.model
        kind = DelayedNode if top.layer and top.layer.delayed else Node
        model = kind(top, "", plan, program.width)
    for path, unit in unit_specs(program).items():
        node = _node(model, path)
        copy = copy_of(unit, program.mesh, plan.rank)
        node.initial = {name: name_in_copy(f"{path}.{name}", copy) for name in node.initial}
    for tie in program.ties:
        source, module = _node(model, tie.source), _node(model, tie.module)
        module.initial = source.initial
        for name, parameter in source.named_parameters(recurse=False):
            setattr(module, name, parameter)
    if not program.meta:
        initialise(model)
    return model


def initialise(model: Node) -> None:
    """Give all parameters of a model their initial values."""
    with torch.no_grad():
        for node in model.modules():
            assert isinstance(node, Node), "a program's modules are nodes"
            node.reset_parameters()


def _node(model: Node, path: str) -> Node:
    node = model.get_submodule(path)
    assert isinstance(node, Node), "a program's modules are nodes"
    return node


def _register_layer(node: Node, layer: LayerSpec, path: str, width: int) -> None:
    """Register the layer's parameters, whose values are still to be given."""
    for name, shape in parameter_shapes(layer, width).items():
        frozen = layer.frozen == "all" or (layer.frozen == "weight" and name != "bias")
        empty = torch.empty(shape, dtype=DTYPES[parameter_dtype(layer, name)])
        node.register_parameter(name, nn.Parameter(empty, requires_grad=not frozen))
        node.initial[name] = f"{path}.{name}"


def fold(x: Tensor) -> Tensor:
    """Return ``x`` mapped to integers in [-2, 2]. See Note [fold]."""
    y: Tensor = Fold.apply(x)  # type: ignore[no-untyped-call]
    return y


def _folded(x: Tensor) -> Tensor:
    return torch.floor(x).fmod_(3)


class Named(NamedTuple):
    """An output in a named tuple."""

    y: Tensor
    label: str = "named"


@dataclass
class Boxed:
    """An output in a dataclass."""

    y: Tensor
    extra: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Sealed:
    """An output in a frozen dataclass."""

    y: Tensor


WRAPPERS: dict[Output, Callable[[Tensor], Any]] = {
    "tensor": lambda y: y,
    "tuple": lambda y: (y, None, 3),
    "list": lambda y: [None, y],
    "dict": lambda y: {"y": y},
    "nested": lambda y: {"outer": {"inner": [y]}},
    "namedtuple": Named,
    "dataclass": Boxed,
    "frozen_dataclass": Sealed,
}


def unwrap(output: Any) -> Tensor:
    """Return the tensor in a container made by ``WRAPPERS``, which must have come back as it was."""
    match output:
        case Tensor():
            return output
        case Boxed(y=y) | Sealed(y=y) | Named(y=y):
            return y
        case {"outer": {"inner": [Tensor() as y]}} | {"y": y}:
            return y
        case (Tensor() as y, None, 3) if isinstance(output, tuple):
            return y
        case [None, Tensor() as y] if isinstance(output, list):
            return y
        case _:
            pass
    raise AssertionError(f"a module's output came back as {type(output).__name__}")
