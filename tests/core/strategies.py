"""Every strategy by name, the unsharded run that each is compared with, and what it exchanges."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_core import FsdpModule, Placements
from tests.cases.programs import Row, batch, fill, linear, loss_of
from tests.core.worlds import world_size

Make = Callable[[Iterable[Any]], Optimizer]

R, P, S = Replicate(), Partial("avg"), Shard(0)
STRATEGIES: dict[str, tuple[tuple[Placement, ...], ...]] = {
    "no_shard": ((R,), (P,), (R,)),
    "zero_1": ((R,), (P,), (S,)),
    "zero_2": ((R,), (S,), (S,)),
    "zero_3": ((S,), (S,), (S,)),
    "no_shard_2d": ((R, R), (P, P), (R, R)),
    "hsdp": ((R, S), (P, S), (R, S)),
    "hfsdp": ((R, S), (P, S), (S, S)),
    "zero_1_outer_zero_2_inner": ((R, R), (P, S), (S, S)),
    "all_sharded_2d": ((S, S), (S, S), (S, S)),
}


def placements_of(name: str) -> Placements:
    """The placements of a strategy on all axes of its mesh."""
    roles = STRATEGIES[name]
    return Placements(tuple(range(len(roles[0]))), *roles)


def mesh_shape(name: str) -> tuple[int, ...]:
    """Four ranks, or as many as there are, on as many axes as the strategy has."""
    size = world_size(4)
    outer = 2 if size % 2 == 0 else 1
    return (size,) if len(STRATEGIES[name][0]) == 1 else (outer, size // outer)


def width_of(model: nn.Module) -> int:
    """How many columns the inputs of a model have: those of its first weight."""
    return next(model.parameters()).shape[-1]


def uneven() -> nn.Module:
    """Rows of 31, 29 and 27 elements: to pad them would take more than the weights, so shards differ."""
    return fill(Row(a=linear(29, 31), b=linear(27, 29), c=linear(31, 27)))


def sgd(parameters: Iterable[Any]) -> Optimizer:
    """The plainest optimizer: weights less gradients."""
    return torch.optim.SGD(parameters, lr=1.0)


def reference(
    build: Callable[[], nn.Module],
    world_size: int,
    steps: int,
    microbatches: int,
    make: Make = sgd,
) -> dict[str, Tensor]:
    """The weights of the unsharded run: each rank's batches in turn, gradients averaged."""
    model = build()
    optimizer = make(model.parameters())
    for number in range(steps):
        for micro in range(microbatches):
            for rank in range(world_size):
                x = batch(rank, number * microbatches + micro, width=width_of(model))
                loss_of(model(x), rank).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= world_size
        optimizer.step()
        optimizer.zero_grad()
    return {name: each.detach() for name, each in model.named_parameters()}


def whole_by_name(model: nn.Module) -> dict[str, Tensor | None]:
    """All parameters, whole, by their names in the model."""
    tensors = {}
    for prefix, module in model.named_modules():
        if isinstance(module, FsdpModule):
            for name, tensor in whole_of_unit(module).items():
                tensors[f"{prefix}.{name}" if prefix else name] = tensor
    return tensors


def whole_of_unit(module: FsdpModule) -> dict[str, Tensor | None]:
    """The parameters of one unit, whole."""
    tensors: dict[str, Tensor | None] = {}
    for group in module.fsdp_unit.groups:
        full = group.gather_main_weight()
        for index, member in enumerate(group.members):
            tensors[member.fqn] = full.get_tensor_view(index)
    return tensors


class Collectives(TorchDispatchMode):
    """Counts the collectives of this rank, by kind, and notes the dtypes that each kind carried."""

    KINDS = {  # noqa: RUF012 - nobody changes it
        "_allgather_base_": "all-gather",
        "_reduce_scatter_base_": "reduce-scatter",
        "allreduce_": "all-reduce",
    }

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = dict.fromkeys(self.KINDS.values(), 0)
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count what is a collective, and run it."""
        if func.namespace == "c10d":
            kind = self.KINDS[func.__name__.removesuffix(".default")]
            self.counts[kind] += 1
            tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
            self.dtypes.setdefault(kind, set()).update(each.dtype for each in tensors)
        return func(*args, **(kwargs or {}))
