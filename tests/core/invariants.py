"""What holds in every test, whoever runs the model: watched from outside, asserted as soon as it breaks.

The simulator's checkers see to the order of streams, memory and collectives. These see to what a
context promises at each completion of a backward pass, behind each outermost forward, and when its
model is gone.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import pytest
from torch import nn

from fsdp_core import FsdpContext, Phase
from fsdp_core.module_tree import living
from fsdp_core.parameter_group import ParameterGroup
from fsdp_core.torch_private import in_graph_task, versions_of
from fsdp_core.unit import ShardedUnit
from fsdp_core.weights import Weights
from tests.cases.programs import units_in


class Watch:
    """Counts what units do, and checks them.

    Attributes:
        counts: what each context's units did since its last completion: (what, group or unit, weakly).
        total: gathers and demands of each context since it was made.
        gathered: which writes of a group's main weights its full weights have.
        counts_of_writes: by what moves no version counter.
    """

    def __init__(self) -> None:
        self.counts: WeakKeyDictionary[FsdpContext, Counter[Any]] = WeakKeyDictionary()
        self.total: WeakKeyDictionary[FsdpContext, Counter[str]] = WeakKeyDictionary()
        self.gathered: WeakKeyDictionary[ParameterGroup, tuple[int, int]] = WeakKeyDictionary()
        self.counts_of_writes: WeakKeyDictionary[ParameterGroup, int] = WeakKeyDictionary()

    def note(self, context: FsdpContext, what: str, subject: ShardedUnit | ParameterGroup) -> None:
        """Count something that a context's unit did in this pass; nothing is kept alive by it."""
        self.counts.setdefault(context, Counter())[what, ref(subject)] += 1

    def forget(self, context: FsdpContext) -> None:
        """Begin a pass anew that broke."""
        self.counts.pop(context, None)

    def add(self, context: FsdpContext, what: str) -> None:
        """Count a gather, or a demand for weights."""
        self.total.setdefault(context, Counter())[what] += 1

    def check_completion(self, context: FsdpContext) -> None:
        """Check that a backward pass left nothing behind, and exchanged nothing twice or in vain."""
        counts = self.counts.pop(context, Counter())
        for unit in units_of(context):
            if not unit.policy.register_hooks or unit._calls:
                continue  # whoever drives it by hand, or a forward, is still at it
            check_rest(unit)
            is_whole = not (unit.gradients.window.declared or unit.gradients.has_delayed)
            for group in unit.groups:
                reductions = counts["reduce", ref(group)]
                assert reductions <= 1, f"{unit.name} was reduced {reductions} times"
                if is_whole and group.is_trainable and counts["enter", unit.ref]:
                    assert reductions == 1, f"{unit.name} was entered, and not reduced"
                assert counts["finish", ref(group)] <= 1, f"{unit.name} ended a window twice"
        stats, total = context.stats, self.total.get(context, Counter())
        early = stats.prefetches - stats.used_prefetches - stats.unused_prefetches
        assert not early, f"{early} prefetches are neither used nor unused"
        gathers, uses = total["gather"], total["demand"] + stats.unused_prefetches
        assert gathers <= uses, f"{gathers} gathers for {uses} uses"

    def renew(self, group: ParameterGroup) -> None:
        """Remember which writes of the main weights those have that compute reads from now on."""
        self.gathered[group] = self.written(group)

    def written(self, group: ParameterGroup) -> tuple[int, int]:
        """How often the main weights were written, by what counts its writes and by what does not."""
        return versions_of(group._written), self.counts_of_writes.get(group, 0)

    def accept_weights(self, model: nn.Module) -> None:
        """Take the full weights of a model for current: a test has asked that they stay."""
        for module in units_in(model):
            for group in module.fsdp_unit.groups:
                self.renew(group)

    def check_weights(self, unit: ShardedUnit) -> None:
        """Check that a forward finds what the last step of the optimizer has left."""
        for group in unit.groups:
            if group.stores or not group.keeps_full:
                found = self.gathered[group]
                assert found == self.written(group), (
                    f"{unit.name} runs on weights of an earlier step"
                )


def units_of(context: FsdpContext) -> list[Any]:
    """The units of a context that still live."""
    return living(context._tree.units)


def unit_of(group: ParameterGroup) -> ShardedUnit:
    """The unit of a group."""
    unit = group.unit()
    assert isinstance(unit, ShardedUnit)
    return unit


def check_rest(unit: ShardedUnit) -> None:
    """Check that a unit is at rest: sharded, without full gradients, unless delayed ones are to come."""
    assert not unit.is_unsharded, f"{unit.name} is unsharded"
    for group in unit.groups:
        assert group.keeps_full or group.full_weight.is_released, f"{unit.name} keeps memory"
    if unit.gradients.has_delayed and unit.phase is Phase.BACKWARD:
        return
    assert unit.phase is Phase.RESTING, f"{unit.name} is {unit.phase.name}"
    if not unit.gradients.window.declared:
        assert all(member.full.grad is None for member in unit.members), (
            f"{unit.name} has gradients"
        )


def check_behind_forward(context: FsdpContext) -> None:
    """Check that behind an outermost forward no more is gathered than what was gathered early."""
    for unit in units_of(context):
        policy = unit.policy
        if policy.register_hooks and policy.reshard_after_forward and unit.phase is Phase.RESTING:
            assert not unit.is_unsharded or unit.weights.is_unused, f"{unit.name} is unsharded"


def watch_units(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Watch all units from now on, until the patches are undone."""
    watch = Watch()

    def patch(owner: type, name: str, note: Callable[..., None]) -> None:
        """Have `note(self)` called behind a method that did not raise."""
        inner = getattr(owner, name)

        def outer(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = inner(self, *args, **kwargs)
            note(self)
            return result

        monkeypatch.setattr(owner, name, outer)

    def noted(what: str) -> Callable[[ParameterGroup], None]:
        return lambda group: watch.note(unit_of(group).context, what, group)

    def gathered(group: ParameterGroup) -> None:
        if not group.stores:  # what is kept from one use to the next is renewed by itself
            watch.renew(group)

    def written(group: ParameterGroup) -> None:
        watch.counts_of_writes[group] = watch.counts_of_writes.get(group, 0) + 1

    def left(unit: ShardedUnit) -> None:
        if not unit.context.calls and not in_graph_task():
            check_behind_forward(unit.context)

    patch(ParameterGroup, "reduce", noted("reduce"))
    patch(ParameterGroup, "finish_window", noted("finish"))
    patch(ParameterGroup, "unshard", gathered)
    patch(ParameterGroup, "_refresh", watch.renew)
    patch(ParameterGroup, "mark_written", written)
    patch(ShardedUnit, "pre_forward", watch.check_weights)
    patch(ShardedUnit, "post_forward", left)
    patch(ShardedUnit, "pre_backward", lambda unit: watch.note(unit.context, "enter", unit))
    patch(Weights, "demand", lambda weights: watch.add(weights._context, "demand"))
    patch(Weights, "_gather", lambda weights: watch.add(weights._context, "gather"))
    patch(FsdpContext, "reset", watch.forget)
    patch(FsdpContext, "post_backward", watch.check_completion)
    return watch
