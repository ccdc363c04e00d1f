"""B19: a recomputed forward is told from a real one, also where the unit's phase does not say it."""

import re
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_sim
from fsdp_core import Phase, StateError
from fsdp_core.phase import check_phase_change
from fsdp_sim.op import Kind, Op
from tests.cases.programs import (
    Row,
    assert_resting,
    batch,
    begin_step,
    fill,
    linear,
    loss_of,
    ops_by_step,
    shard,
)


class Parent(nn.Module):
    """Two children behind one checkpoint, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.row = Row("c1", "c2")

    def forward(self, x: Tensor, how: str) -> Tensor:
        """Return what the children make of `x`."""
        if how == "plain":
            return self.row(x)
        y: Tensor = checkpoint(self.row, x, use_reentrant=how == "reentrant")
        return y


def what_happens(how: str) -> list[list[str]]:
    """Gathers and reshards in a recomputed step, then in an ordinary one, then without gradients."""

    def program(rank: int) -> None:
        model = fill(Parent())
        shard(model, "row.c1", "row.c2", "")
        for number, each in enumerate((how, "plain")):
            begin_step(number)
            loss_of(model(batch(rank).requires_grad_(), each), rank).backward()
            assert_resting(model)
        begin_step(2)
        with torch.no_grad():
            model(batch(rank), "plain")
        assert_resting(model)

    report = fsdp_sim.simulate(program, 2, trace=True)
    labels = ("fsdp_core::unshard row.", "fsdp_core::reshard row.")
    return [
        [op.name.removeprefix("fsdp_core::") for op in ops if is_range(op.kind, op.name, labels)]
        for ops in ops_by_step(report)
    ]


def is_range(kind: Kind, name: str, labels: tuple[str, ...]) -> bool:
    """Whether an op opens one of these ranges."""
    return kind is Kind.RANGE_PUSH and name.startswith(labels)


FORWARD = ["unshard row.c1", "unshard row.c2", "reshard row.c1", "reshard row.c2"]
BACKWARD = ["unshard row.c2", "unshard row.c1", "reshard row.c2", "reshard row.c1"]


@pytest.mark.parametrize("how", ["reentrant", "non_reentrant"])
def test_recomputation_keeps_the_weights_until_the_backward_of_their_unit_is_over(how: str) -> None:
    """NVIDIA/Megatron-LM#6309, #6323, #6359: an ordinary forward gives them back at its end."""
    recomputed, ordinary, evaluated = what_happens(how)

    assert recomputed[:4] == FORWARD
    backward = recomputed[4:]
    assert sorted(backward) == sorted(FORWARD)
    assert backward.index("reshard row.c2") < backward.index("reshard row.c1")
    assert ordinary[:4] == FORWARD
    assert ordinary[4:] == BACKWARD
    assert evaluated == FORWARD


@pytest.mark.parametrize("how", ["reentrant", "non_reentrant"])
def test_a_recomputed_forward_prefetches_nothing(how: str) -> None:
    """Without a unit around both, whose backward would have gathered them before."""

    def program(rank: int) -> None:
        model = fill(Parent())
        shard(model, "row.c1", "row.c2")
        for number, each in enumerate((how, "plain")):
            begin_step(number)
            loss_of(model(batch(rank).requires_grad_(), each), rank).backward()

    first, second = "<root> (root 0)", "<root> (root 1)"
    recomputed, ordinary = ops_by_step(fsdp_sim.simulate(program, 2, trace=True))

    assert f"unshard {second}" not in gathers_inside(recomputed, f"recompute {first}")
    assert gathers_inside(ordinary, f"forward {first}") == [f"unshard {first}", f"unshard {second}"]


def gathers_inside(ops: Sequence[Op], label: str) -> list[str]:
    """The ranges of gathers that are opened inside the first range of this label."""
    names = [(op.kind, op.name.removeprefix("fsdp_core::")) for op in ops]
    begin, end = (names.index((kind, label)) for kind in (Kind.RANGE_PUSH, Kind.RANGE_POP))
    return [
        name
        for kind, name in names[begin:end]
        if kind is Kind.RANGE_PUSH and name.startswith("unshard")
    ]


LEGAL = {
    (Phase.RESTING, Phase.FORWARD),
    (Phase.FORWARD, Phase.RESTING),
    (Phase.RESTING, Phase.BACKWARD),
    (Phase.BACKWARD, Phase.RESTING),
}


@pytest.mark.parametrize("old", list(Phase))
@pytest.mark.parametrize("new", list(Phase))
def test_a_phase_changes_only_from_and_to_rest(old: Phase, new: Phase) -> None:
    """Any other change is an error that names the unit and both phases."""
    if (old, new) in LEGAL:
        check_phase_change("block.fc1", old, new)
        return
    with pytest.raises(StateError, match=f"{old.name} to {new.name} for 'block.fc1'"):
        check_phase_change("block.fc1", old, new)


class Recursive(nn.Module):
    """Calls itself once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = linear().weight

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        """Return `x` times the weight, twice."""
        x = x @ self.weight
        return self(x, again=False) if again else x


def test_a_unit_that_enters_its_own_forward_is_refused_by_name() -> None:
    """And rests afterwards, so that the program can go on."""

    def program(rank: int) -> str:
        model = nn.Sequential(linear(), Recursive())
        fill(model)
        shard(model, "0", "1", "")
        with pytest.raises(StateError) as caught:
            model(batch(rank))
        assert_resting(model)
        return str(caught.value)

    for message in fsdp_sim.simulate(program, 2).results:
        assert re.search(r"inside its own forward, got FsdpRecursive of unit '1' again;", message)


def test_recomputation_that_is_taken_for_a_forward_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The defect planted: nothing tells the two apart, so backward gathers a third time."""
    monkeypatch.setattr("fsdp_core.unit.in_graph_task", lambda: False)

    recomputed, _, _ = what_happens("reentrant")

    assert Counter(recomputed) == dict.fromkeys(FORWARD, 3)


def test_recomputation_in_a_backward_that_is_taken_for_a_forward_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same defect, where the unit has entered its backward before."""
    monkeypatch.setattr("fsdp_core.unit.in_graph_task", lambda: False)

    with pytest.raises(StateError, match=r"got BACKWARD to FORWARD for 'row\.c2'"):
        what_happens("non_reentrant")
