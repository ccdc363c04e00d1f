"""FsdpModule: what `fully_shard` adds to a module's class, and what the users of gradients ask first."""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_core.context import FsdpContext
from fsdp_core.errors import StateError, UnsupportedError
from fsdp_core.parameter_group import ParameterGroup, living_group, owner_of, without_model
from fsdp_core.phase import Phase
from fsdp_core.torch_private import keep_marked_last, local_tensor
from fsdp_core.unit import ShardedUnit

Direction = Literal["forward", "backward", "none"]


def unit_of(module: nn.Module) -> ShardedUnit:
    """Return the unit that a sharded module is part of."""
    unit: ShardedUnit = module.__dict__["fsdp_unit"]
    return unit


def complete_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Check that the gradients of sharded parameters are complete, for something that uses them.

    Ordering:
        The current stream is put behind reductions that nobody waited for yet.

    Raises:
        StateError: some are still to come.
    """
    owners = [owner for parameter in parameters if (owner := owner_of(parameter)) is not None]
    complete_groups(living_group(owner) for owner in owners)


def refuse_closure(closure: object) -> None:
    """Check that a step was given no closure: the gradients that it makes would come too late.

    Raises:
        UnsupportedError: it was given one.
    """
    if closure is not None:
        msg = (
            "step must be called without a closure, got one, which would run inside the sharded step; "
            "call it before"
        )
        raise UnsupportedError(msg)


def complete_groups(groups: Iterable[ParameterGroup]) -> None:
    """Check that the gradients of parameter groups are complete; see `complete_gradients`."""
    units: dict[ShardedUnit, None] = {}
    for group in groups:
        unit = group.unit()
        if not isinstance(unit, ShardedUnit):
            raise without_model(group.members[0].fqn)
        units[unit] = None
    for unit in units:
        unit.context.check_backward_ended()
        unit.check_complete()
        unit.weights.await_gather()
        if unit.context.has_unwaited_reductions:
            unit.context.finish_grad_sync()


def of_other_rows(what: str, tensor: torch.Tensor, group: ParameterGroup, index: int) -> StateError:
    """Say that something of a parameter does not lie as the parameter does on this rank."""
    fqn = group.full_name(group.members[index].fqn)
    rows = group.main_weight.get_tensor_view(index).shape
    local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    msg = (
        f"{what} of parameter {fqn!r} must be a DTensor of the rows that this rank holds, "
        f"{tuple(rows)}, got a {type(tensor).__name__} of {tuple(local.shape)} here; make it with "
        f"torch.zeros_like(parameter), say"
    )
    unit = group.unit()
    assert isinstance(unit, ShardedUnit)
    return unit.context.located(StateError(msg, fqn=fqn))


class FsdpModule:
    """What `fully_shard` adds to a module's class."""

    fsdp_unit: ShardedUnit

    @property
    def context(self) -> FsdpContext:
        """The context that the unit belongs to."""
        return self.fsdp_unit.context

    @property
    def phase(self) -> Phase:
        """What the unit is doing."""
        return self.fsdp_unit.phase

    def unshard(self, prefetch: Direction = "none", *, recurse: bool = False) -> None:
        """Have the full weights in the module, readable on the current stream.

        Args:
            prefetch: also gather the units early that follow in this direction.
            recurse: also those of all units below, without prefetches.

        Ordering:
            Waits for the gather on the current stream, not on the host. Units that are gathered
            early are waited for when they are used, so nobody may write their weights before that.
        """
        for unit in self._units_below(recurse=recurse):
            unit.unshard()
        if prefetch != "none":
            assert isinstance(self, nn.Module)
            self.fsdp_unit.prefetch_successors(self, Phase(prefetch))

    def reshard(self, *, recurse: bool = False) -> None:
        """Free the full weights, if nobody uses them.

        Args:
            recurse: also those of all units below.

        Raises:
            StateError: the unit's forward or backward is running.
        """
        for unit in self._units_below(recurse=recurse):
            unit.reshard()

    def _units_below(self, *, recurse: bool) -> list[ShardedUnit]:
        if not recurse:
            return [self.fsdp_unit]
        assert isinstance(self, nn.Module)
        return units_in(self)

    def register_post_backward_hook(self, callback: Callable[[nn.Module], None]) -> None:
        """Have `callback` called with the unit's first module when a backward of it is over."""
        unit = self.fsdp_unit
        if unit.policy.register_hooks or any(group.is_trainable for group in unit.groups):
            unit.callbacks.append(callback)
            return
        # Nothing of the unit takes part in backward, so its module has to tell.
        assert isinstance(self, nn.Module)
        self.register_full_backward_hook(lambda module, _inputs, _outputs: callback(module))

    def register_forward_hook(self, *args: Any, **options: Any) -> Any:
        """Register a hook, as `nn.Module` does; it finds the full weights in the module."""
        handle = super().register_forward_hook(*args, **options)  # type: ignore[misc]
        assert isinstance(self, nn.Module)
        keep_marked_last(self)
        return handle

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:  # noqa: FBT001, FBT002 - the signature of nn.Module
        """Move or convert what is not sharded; sharded parameters must stay as they are.

        Raises:
            StateError: the change would give sharded parameters another device or dtype.
        """
        with self.fsdp_unit.weights.hidden(fn):
            return super()._apply(fn, recurse)  # type: ignore[misc]

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Refuse: a copy would share streams and buffers with the original.

        Raises:
            StateError: always.
        """
        msg = (
            f"a sharded module must not be copied or pickled, got a {type(self).__name__}, unit "
            f"{self.fsdp_unit.name!r}; build a second model, shard it and load_state_dict the first "
            f"one's state, or copy the model before sharding"
        )
        raise self.context.located(StateError(msg, fqn=self.fsdp_unit.fqn))


def units_in(module: nn.Module) -> list[ShardedUnit]:
    """Return the units of a module and of those below it, outer ones first."""
    units = [each.fsdp_unit for each in module.modules() if isinstance(each, FsdpModule)]
    return list(dict.fromkeys(units))


def require_whole_model(model: nn.Module, what: str) -> None:
    """Check that something that has one weight of each name finds one, and sharded.

    Raises:
        UnsupportedError: a unit is on some ranks only.
        StateError: the full weights of a unit are in use.
    """
    world_size = dist.get_world_size()
    for name, module in model.named_modules():
        if not isinstance(module, FsdpModule):
            continue
        unit = module.fsdp_unit
        ranks = unit.axes.mesh.size()
        if ranks != world_size:
            msg = (
                f"{what} has one weight of each name, got unit {name!r} on {ranks} of {world_size} ranks, "
                f"where others may have another (such as an expert); use torch.distributed.checkpoint "
                f"with names of each rank's own"
            )
            raise UnsupportedError(msg, fqn=name)
        unit.require_sharded(what)
