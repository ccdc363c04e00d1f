"""B22: every unit's pre-backward has its post-backward, frozen or not."""

from collections import Counter

import pytest
from torch import nn

import fsdp_sim
from fsdp_core import FsdpModule
from fsdp_core.unit import ShardedUnit
from fsdp_sim.op import Kind
from tests.cases.programs import (
    Row,
    assert_resting,
    batch,
    begin_step,
    fill,
    loss_of,
    ops_by_step,
    shard,
)

NAMES = ("front", "middle", "back")


def run(rank: int, input_grad: bool) -> dict[str, int]:
    """Two steps; returns how often each unit said that its backward is over."""
    model = fill(Row(*NAMES))
    for name in ("front", "back"):
        model.get_submodule(name).requires_grad_(False)
    shard(model, *NAMES)
    over: Counter[str] = Counter()
    for name in NAMES:
        unit = model.get_submodule(name)
        assert isinstance(unit, FsdpModule)

        def count(_module: nn.Module, name: str = name) -> None:
            over[name] += 1

        unit.register_post_backward_hook(count)
    for number in range(2):
        begin_step(number)
        loss_of(model(batch(rank, number).requires_grad_(input_grad)), rank).backward()
        assert_resting(model)
    return dict(over)


@pytest.mark.parametrize("input_grad", [True, False])
def test_each_unit_that_backward_goes_through_begins_and_ends_once(input_grad: bool) -> None:
    """NVIDIA/Megatron-LM#5710: a front without gradients is not entered, so it does not end either."""
    report = fsdp_sim.simulate(run, 2, args=(input_grad,), trace=True)

    entered = [NAMES.index(name) for name in NAMES if input_grad or name != "front"]
    names = {f"fsdp_core::backward <root> (root {number})": 1 for number in entered}
    for ops in ops_by_step(report):
        for kind in (Kind.RANGE_PUSH, Kind.RANGE_POP):
            ranges = [op.name for op in ops if op.kind is kind]
            assert Counter(n for n in ranges if n.startswith("fsdp_core::backward")) == names
    assert report.results == [{NAMES[number]: 2 for number in entered}] * 2


def test_a_frozen_unit_that_never_ends_its_backward_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The defect planted: only a unit with something to reduce is completed."""
    close = ShardedUnit._close

    def close_trained(unit: ShardedUnit) -> None:
        if any(group.is_trainable for group in unit.groups):
            close(unit)

    monkeypatch.setattr(ShardedUnit, "_close", close_trained)

    with pytest.raises(AssertionError, match=r"<root> \(root 0\)"):
        fsdp_sim.simulate(run, 2, args=(True,))
