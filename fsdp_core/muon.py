"""FsdpMuon: an orthogonalised optimizer whose matrices are computed whole, by their owners.

Weights, gradients and momentum stay sharded by rows. For a step each matrix' update is gathered on
one rank that holds part of it, orthogonalised there, and scattered again. The result has the bits of
`torch.optim.Muon` on one process.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Muon

from fsdp_core.errors import ConfigError, UnsupportedError
from fsdp_core.gather_scatter import gather_to_owners, scatter_from_owners
from fsdp_core.module import complete_gradients, of_other_rows, refuse_closure
from fsdp_core.owner_planning import (
    Holder,
    OwnerPlan,
    assign_owners,
    list_holders,
    orthogonalization_cost,
    plan_owner,
)
from fsdp_core.parameter_group import ParameterGroup, living_group, owner_of, parameters_held
from fsdp_core.placement import is_sharded
from fsdp_core.torch_private import adjusted_learning_rate, local_tensor, orthogonalize

Cost = Callable[[Sequence[int]], int]


@dataclass(frozen=True)
class Buffer:
    """The matrices of one parameter group.

    Attributes:
        group: the parameter group.
        parameters: its sharded parameters that this optimizer holds, by index.
        owners: global rank of the owner of each.
        process_group: carries the exchange; None is the default group.
    """

    group: ParameterGroup
    parameters: dict[int, nn.Parameter]
    owners: dict[int, int]
    process_group: dist.ProcessGroup | None

    def plan(self, indices: Sequence[int]) -> OwnerPlan:
        """Return what this rank exchanges for the given matrices."""
        owners = {index: self.owners[index] for index in indices}
        layout = self.group.layout
        return plan_owner(layout, _holders(self.group), owners, dist.get_rank())


class FsdpMuon(Muon):
    """Muon over sharded matrices; takes the arguments of `torch.optim.Muon`, and a cost.

    Owners are chosen once, and anew where groups were changed, so that the cost of the matrices that
    are spread over the same ranks is even. Which parameters have gradients must be the same on all ranks.

    Args:
        params: sharded 2-D parameters, or groups of them.
        cost: work of one matrix by its shape.
        options: of `torch.optim.Muon`: `lr`, `weight_decay`, `momentum`, `nesterov`, ...

    Ordering:
        Collective over the meshes of the parameters; runs on the current stream.

    Raises:
        ConfigError: a parameter that is not a sharded one, or has no elements.
    """

    def __init__(self, params: Any, *, cost: Cost = orthogonalization_cost, **options: Any) -> None:
        super().__init__(params, **options)
        self._cost = cost
        self._assign_owners()

    def _assign_owners(self) -> None:
        """Choose the owner of each matrix that the groups hold now."""
        self._seen = parameters_held(self)
        self.buffers = _assign(self, self._cost)
        self._plans: dict[tuple[int, tuple[int, ...]], OwnerPlan] = {}
        if any(each.process_group is None for each in self.buffers):
            # On NCCL the first point-to-point of a communicator needs all its ranks.  A barrier would do,
            # but it warns where the group was not told its device.
            device = self._seen[0].device
            dist.all_reduce(torch.zeros(1, device=device))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update this rank's shards.

        Raises:
            UnsupportedError: a closure is given: its gradients would come too late.
            StateError: some gradient is still to come, or momentum has other rows than its matrix.
        """
        refuse_closure(closure)
        held = parameters_held(self)
        if len(held) != len(self._seen) or not all(map(is_, held, self._seen)):
            self._assign_owners()
        for buffer in self.buffers:
            for index, parameter in buffer.parameters.items():
                _check_momentum(buffer.group, index, self.state.get(parameter, {}))
        options = {parameter: group for group in self.param_groups for parameter in group["params"]}
        complete_gradients(options)
        for number, buffer in enumerate(self.buffers):
            indices = tuple(
                index for index, each in buffer.parameters.items() if each.grad is not None
            )
            if indices:
                self._step_buffer(number, buffer, indices, options)

    def _step_buffer(
        self,
        number: int,
        buffer: Buffer,
        indices: tuple[int, ...],
        options: dict[nn.Parameter, dict[str, Any]],
    ) -> None:
        """Update the matrices of one buffer; no other one is whole meanwhile."""
        plan = self._plans.get((number, indices))
        if plan is None:
            plan = self._plans[number, indices] = buffer.plan(indices)
        said = {index: options[buffer.parameters[index]] for index in indices}
        directions = {index: self._follow_momentum(buffer, index, said[index]) for index in indices}
        momenta = {index: directions[index] for index in plan.held}
        wholes = gather_to_owners(plan, momenta, buffer.process_group)
        updates = {
            index: orthogonalize(
                whole,
                said[index]["ns_coefficients"],
                said[index]["ns_steps"],
                said[index]["eps"],
            ).contiguous()
            for index, whole in wholes.items()
        }
        rows = {
            index: each.new_empty(each.shape, dtype=torch.bfloat16)
            for index, each in momenta.items()
        }
        scatter_from_owners(plan, updates, rows, buffer.process_group)
        for index, update in rows.items():
            self._apply(buffer, index, update, said[index])
        buffer.group.mark_written()

    def _follow_momentum(self, buffer: Buffer, index: int, options: dict[str, Any]) -> Tensor:
        """Move the momentum by this step's gradient; return what is to be orthogonalised."""
        parameter = buffer.parameters[index]
        assert parameter.grad is not None
        grad = local_tensor(parameter.grad)  # type: ignore[arg-type]
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = buffer.group.as_sharded(index, torch.zeros_like(grad))
        momentum = local_tensor(state["momentum_buffer"])
        momentum.lerp_(grad, 1 - options["momentum"])
        return grad.lerp(momentum, options["momentum"]) if options["nesterov"] else momentum

    def _apply(self, buffer: Buffer, index: int, update: Tensor, options: dict[str, Any]) -> None:
        local = buffer.group.main_weight.get_tensor_view(index)
        lr, parameter = float(options["lr"]), buffer.parameters[index]
        local.mul_(1 - lr * options["weight_decay"])
        adjusted = adjusted_learning_rate(lr, options["adjust_lr_fn"], parameter.shape)
        local.add_(update, alpha=-adjusted)


def _check_momentum(group: ParameterGroup, index: int, state: dict[str, Any]) -> None:
    """Refuse momentum that does not lie as its matrix does on this rank.

    Raises:
        StateError: it has other rows.
    """
    local, momentum = group.main_weight.get_tensor_view(index), state.get("momentum_buffer")
    if momentum is None or (
        isinstance(momentum, DTensor) and local_tensor(momentum).shape == local.shape
    ):
        return
    raise of_other_rows("the state 'momentum_buffer'", momentum, group, index)


def _assign(optimizer: FsdpMuon, cost: Cost) -> list[Buffer]:
    """Choose the owner of each matrix, buffer by buffer."""
    by_group: dict[ParameterGroup, dict[int, nn.Parameter]] = {}
    for position, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            owner = owner_of(parameter)
            if owner is None:
                msg = (
                    f"FsdpMuon must hold sharded parameters only, got one of shape "
                    f"{tuple(parameter.shape)} in param_groups[{position}] that belongs to no unit; "
                    f"shard its module first, or leave it to another optimizer"
                )
                raise ConfigError(msg)
            found = living_group(owner)
            fqn = found.full_name(owner.fqn)
            if parameter.ndim != 2:
                msg = (
                    f"FsdpMuon must hold matrices, got {fqn!r} of shape {tuple(parameter.shape)}; leave "
                    f"it to another optimizer"
                )
                raise UnsupportedError(msg, fqn=fqn)
            if not parameter.numel():
                msg = (
                    f"FsdpMuon must hold matrices with elements, got {fqn!r} of shape "
                    f"{tuple(parameter.shape)}; leave it to another optimizer"
                )
                raise UnsupportedError(msg, fqn=fqn)
            by_group.setdefault(found, {})[found.index_of(parameter)] = parameter
    # Apart for each set of ranks: what others do elsewhere is not known to all of them.
    loads: dict[tuple[int, ...], Mapping[int, int]] = {}
    buffers = []
    for found, parameters in by_group.items():
        holders = _holders(found)
        ranks = tuple(sorted(each.rank for each in holders))
        assignment = assign_owners(
            found.layout, holders, sorted(parameters), cost=cost, load=loads.get(ranks)
        )
        loads[ranks] = assignment.load
        ordered = {index: parameters[index] for index in sorted(parameters)}
        buffers.append(Buffer(found, ordered, dict(assignment.owners), _process_group(found)))
    return buffers


def _holders(group: ParameterGroup) -> tuple[Holder, ...]:
    buffer = group.main_weight
    axes = buffer.axes

    def global_rank_at(place: tuple[int, ...]) -> int:
        return int(axes.mesh.mesh[place].item())

    return list_holders(
        buffer.layout, axes.sizes, buffer.placements, axes.coordinate, global_rank_at
    )


def _process_group(group: ParameterGroup) -> dist.ProcessGroup | None:
    """Return the process group of the one axis that a buffer is sharded on; None if several."""
    buffer = group.main_weight
    sharded = [axis for axis, each in enumerate(buffer.placements) if is_sharded(each)]
    return buffer.axes.process_groups[sharded[0]] if len(sharded) == 1 else None
