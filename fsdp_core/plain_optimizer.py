"""Optimizers that nobody handed to `fully_shard_optimizer`: what they must not do in silence.

They work on sharded parameters too, slower, if they were built after sharding. One that was built
before, or while a unit was unsharded, holds full parameters: their gradients are taken away when
they are reduced, so its steps would change nothing.
"""

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Adafactor, Muon, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp_core.errors import ConfigError, UnsupportedError
from fsdp_core.module import complete_groups
from fsdp_core.parameter_group import (
    Owner,
    ParameterGroup,
    describe_state,
    owner_of,
    parameters_held,
)
from fsdp_core.placement import is_sharded
from fsdp_core.torch_private import optimizer_step_pre_hooks

# Whose update of an element depends on others, and what to use instead.
WHOLE_TENSORS: dict[type[Optimizer], tuple[str, str]] = {
    Adafactor: ("its update of an element depends on the whole tensor", "AdamW"),
    Muon: ("its update of an element depends on the whole matrix", "FsdpMuon"),
}


def watch_optimizers() -> None:
    """Have every optimizer of the process checked at its steps, from the first unit on.

    Why PyTorch is asked whether they are: hooks can be taken away, and ranks that are threads may
    have their own.
    """
    if _before_step in optimizer_step_pre_hooks():
        return
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Have all gradients complete and readable.

    Raises:
        ConfigError: the optimizer holds a full parameter, or one that was added to a sharded model.
        UnsupportedError: it needs whole tensors, and holds shards.
        StateError: some gradient is still to come.
    """
    groups: dict[ParameterGroup, None] = {}
    for parameter, owner, group in _owned(optimizer):
        if not isinstance(parameter, DTensor):
            raise _foreign(owner, group)
        groups[group] = None
    _check_added(optimizer, groups)
    if type(optimizer) in WHOLE_TENSORS and any(map(_holds_shards, groups)):
        raise not_elementwise(type(optimizer).__name__, *WHOLE_TENSORS[type(optimizer)])
    complete_groups(groups)


def _after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Note that weights were written: fused and foreach updates move no version counter.

    And which rows the optimizer's state holds, so that it can be made whole and saved.
    """
    for parameter, _, group in _owned(optimizer):
        group.mark_written()
        describe_state(parameter, optimizer.state.get(parameter, {}))


def _owned(optimizer: Optimizer) -> Iterator[tuple[Tensor, Owner, ParameterGroup]]:
    """Yield the parameters of living units that an optimizer holds."""
    for parameter in parameters_held(optimizer):
        owner = owner_of(parameter)
        if owner is not None and (group := owner.group()) is not None:
            yield parameter, owner, group


def _check_added(optimizer: Optimizer, groups: Collection[ParameterGroup]) -> None:
    """Check that no gradient is one rank's own: parameters added to a sharded model are in no unit.

    Raises:
        ConfigError: there is such a parameter, with a gradient.
    """
    if not groups:
        return
    strangers = dict.fromkeys(
        parameter
        for parameter in parameters_held(optimizer)
        if parameter.grad is not None and owner_of(parameter) is None
    )
    if not strangers:
        return
    units: list[Any] = [unit for group in groups if (unit := group.unit()) is not None]
    for root in dict.fromkeys(root for unit in units for root in unit.context.roots):
        for fqn, parameter in root.named_parameters():
            if parameter in strangers:
                msg = (
                    f"a parameter of a sharded model must be there when it is sharded, got a gradient "
                    f"for {fqn!r}, which was added later, so ranks do not reduce it; add it before "
                    f"fully_shard"
                )
                raise ConfigError(msg, fqn=fqn)


def _holds_shards(group: ParameterGroup) -> bool:
    return any(map(is_sharded, group.main_weight.placements))


def not_elementwise(name: str, reason: str, other: str) -> UnsupportedError:
    """Say why a class of optimizers cannot work on shards, and which one can."""
    msg = (
        f"an optimizer of shards must update each element by itself, got {name}: {reason}; use "
        f"{other}"
    )
    return UnsupportedError(msg)


def _foreign(owner: Owner, group: ParameterGroup) -> ConfigError:
    unit: Any = group.unit()
    msg = (
        f"an optimizer must hold the sharded parameters, got the full {owner.fqn!r} of unit "
        f"{unit.name!r}, whose gradient is taken away when it is reduced; build the optimizer "
        f"after fully_shard and outside any forward"
    )
    return ConfigError(msg, fqn=owner.fqn)
