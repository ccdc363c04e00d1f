"""B04: backward enters units in an order that is not the forward order reversed."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fsdp_sim
from fsdp_core import Phase, SchedulePolicy
from fsdp_sim.program.model import fold
from tests.cases.programs import (
    Training,
    batch,
    check_parity,
    entered,
    fill,
    gathered,
    loss_of,
    ops_by_step,
    shard,
    train_shards,
)

Shape = dict[str, Any]


class Tree(nn.Module):
    """Calls its children in order, then uses its own weight, if it has one."""

    def __init__(self, *, owns: bool = True, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)
        self.own = nn.Parameter(torch.ones(2, 2)) if owns else None

    def forward(self, x: Tensor) -> Tensor:
        """Return what the children and the own weight made of `x`."""
        for child in self.children():
            x = child(x)
        return x if self.own is None else fold(x @ self.own)


def nested() -> nn.Module:
    """A root with A{a1, a2} and B; its own weight is used last."""
    return fill(Tree(A=Tree(a1=Tree(), a2=Tree()), B=Tree()))


def one_step(model: nn.Module, rank: int, number: int) -> None:
    """Forward and backward."""
    loss_of(model(batch(rank, number)), rank).backward()


NESTED = Training(nested, one_step, ("A.a1", "A.a2", "A", "B", ""), steps=2)
FORWARD = ["<root>", "A", "A.a1", "A.a2", "B"]
BACKWARD = ["<root>", "B", "A", "A.a2", "A.a1"]


def test_hooks_run_parents_first_in_both_directions_and_children_reversed_in_backward() -> None:
    """NVIDIA/Megatron-LM#5719; pytorch#84600, #84085, #107058."""
    for ops in ops_by_step(check_parity(NESTED)):
        assert list(entered(ops, "forward")) == FORWARD
        assert list(entered(ops, "backward")) == BACKWARD


def test_gathers_follow_the_two_orders_and_each_unit_is_gathered_once_in_each() -> None:
    """Prefetches aim at the next unit of the direction; the last one aims at nothing."""
    report = check_parity(NESTED)

    for ops in ops_by_step(report):
        assert gathered(ops) == [*FORWARD, *BACKWARD]
    for rank in report.results:
        assert rank[-1].stats["prefetches"] == rank[-1].stats["used_prefetches"] == 2 * 8


def test_the_orders_are_known_before_the_first_pass() -> None:
    """They are derived from the tree of modules when the construction scope ends."""

    def program(rank: int) -> dict[Phase, list[str]]:
        model = nested()
        context = shard(model, *NESTED.units)
        return {
            phase: [
                context.module_name(event.module) or "<root>"
                for event in context.execution_order
                if event.phase is phase
            ]
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        }

    report = fsdp_sim.simulate(program, 2)

    assert report.results == [{Phase.FORWARD: FORWARD, Phase.BACKWARD: BACKWARD}] * 2


def test_replaying_prints_the_same_orders() -> None:
    """The digests of two runs are equal, and so is the replay of the schedule line."""
    first = check_parity(NESTED)
    again = fsdp_sim.replay(train_shards, first.schedule, args=(NESTED,), trace=True)

    assert again.trace.digest == first.trace.digest


TREES = st.recursive(
    st.booleans().map(lambda owns: {"owns": owns}),
    lambda children: st.lists(children, min_size=1, max_size=2).map(
        lambda each: {"owns": len(each) == 1, "children": each}
    ),
    max_leaves=4,
)


def build(shape: Shape) -> Tree:
    """Return the tree of this shape; children are called c0, c1."""
    children = {f"c{i}": build(each) for i, each in enumerate(shape.get("children", ()))}
    return Tree(owns=shape["owns"], **children)


def preorder(shape: Shape, name: str = "", *, backward: bool = False) -> list[str]:
    """Parents before children, which are reversed in backward."""
    children = list(enumerate(shape.get("children", ())))
    if backward:
        children.reverse()
    prefix = f"{name}." if name else ""
    return [
        name or "<root>",
        *(n for i, each in children for n in preorder(each, f"{prefix}c{i}", backward=backward)),
    ]


def owners(shape: Shape, name: str = "") -> set[str]:
    """The units that own a parameter."""
    prefix = f"{name}." if name else ""
    below = [owners(e, f"{prefix}c{i}") for i, e in enumerate(shape.get("children", ()))]
    return set().union(*below, {name or "<root>"} if shape["owns"] else ())


@given(TREES)
@settings(max_examples=8)
def test_any_tree_runs_in_the_orders_of_its_walks(shape: Shape) -> None:
    """Any shape and depth, units without parameters included."""
    shape = {"owns": True, "children": [shape]}
    names = preorder(shape)
    units = [name.replace("<root>", "") for name in reversed(names)]
    training = Training(lambda: fill(build(shape)), one_step, units)

    (ops,) = ops_by_step(check_parity(training))

    assert list(entered(ops, "forward")) == names
    owning = owners(shape)
    backward = [n for n in preorder(shape, backward=True) if n in owning]
    assert [n for n in entered(ops, "backward") if n in owning] == backward
    assert gathered(ops) == [*(n for n in names if n in owning), *backward]


def test_no_prefetch_without_a_budget() -> None:
    """With budgets of 0 every unit is gathered when it is needed, in the same orders."""
    policy = SchedulePolicy(forward_prefetch_size=0, backward_prefetch_size=0)
    training = Training(nested, one_step, NESTED.units, options={"schedule_policy": policy})

    report = check_parity(training)

    (ops,) = ops_by_step(report)
    assert gathered(ops) == [*FORWARD, *BACKWARD]
    assert report.results[0][0].stats["prefetches"] == 0
