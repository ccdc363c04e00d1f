"""B06: a parameter that gets a gradient on one rank only counts as zeros on the others."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.profiler import record_function

import fsdp_sim
from fsdp_core.torch_private import reduce_scatter_single
from tests.cases.programs import (
    Training,
    check_parity,
    check_values,
    integers,
    linear,
    ops_by_step,
    reduced,
    shard,
)

Mask = tuple[bool, bool]


class Choosy(nn.Module):
    """A unit that uses p, q, both or none of them; `front` gives it an input that requires grad."""

    def __init__(self, frozen: Mask = (False, False)) -> None:
        super().__init__()
        self.front = linear(4, 4)
        self.choice = nn.Module()
        self.choice.p = nn.Parameter(integers(4), requires_grad=not frozen[0])
        self.choice.q = nn.Parameter(integers(4, start=1), requires_grad=not frozen[1])
        self.choice.forward = self.choose
        with torch.no_grad():
            self.front.weight.copy_(integers(4, 4, start=2))

    def choose(self, x: Tensor, mask: Mask) -> Tensor:
        """Multiply by those parameters that the mask names."""
        x = x * 2
        for parameter, used in zip(self.choice.parameters(), mask, strict=True):
            x = x * parameter if used else x
        return x

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        """Return what the front layer and the choice made of `x`."""
        y: Tensor = self.choice(self.front(x), mask)
        return y


def choosing(masks: tuple[Mask, ...], frozen: Mask = (False, False)) -> Training:
    """One step in which each rank uses its own choice of p and q."""

    def step(model: nn.Module, rank: int, _number: int) -> None:
        x = integers(4, start=rank).requires_grad_()
        (model(x, masks[rank]) * integers(4, start=rank + 1)).sum().backward()

    return Training(lambda: Choosy(frozen), step, ("front", "choice"), entered=("choice",))


def test_the_gradient_of_one_rank_is_averaged_on_all() -> None:
    """pytorch#158719, torchtitan#2747: q gets (0 + g1) / 2 everywhere, in reductions of one size."""
    report = check_parity(choosing(((True, False), (True, True))))

    (ops,) = ops_by_step(report)
    assert reduced(ops) == ["<root> (root 1)", "<root> (root 0)"]


def test_frozen_parameters_cause_no_traffic_whoever_uses_them() -> None:
    """Adapters: zeros are sent for what one rank trains, and nothing for what nobody trains."""
    report = check_parity(choosing(((True, False), (True, True)), frozen=(True, True)))

    (ops,) = ops_by_step(report)
    assert reduced(ops) == ["<root> (root 0)"]


@pytest.mark.everywhere
@given(
    masks=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=2).map(tuple),
    frozen=st.tuples(st.booleans(), st.booleans()),
)
@settings(max_examples=12)
def test_any_use_on_any_rank_has_parity(masks: tuple[Mask, ...], frozen: Mask) -> None:
    """Also where a rank uses neither of them: backward enters the unit there all the same."""
    check_values(choosing(masks, frozen))


def test_a_runtime_that_reduces_only_what_it_has_is_found() -> None:
    """The defect planted: the sizes differ, and the report says on which ranks, and by which unit."""

    def program(rank: int) -> None:
        choice = Choosy().choice
        used = list(choice.parameters())[: 1 + rank]
        gradients = torch.cat([torch.ones_like(parameter) for parameter in used])
        with record_function("fsdp_core::reduce_gradients choice"):
            reduce_scatter_single(gradients.new_empty(2 * len(used)), gradients, dist.group.WORLD)  # type: ignore[arg-type]

    with pytest.raises(fsdp_sim.CollectiveMismatch) as caught:
        fsdp_sim.simulate(program, 2)

    message = str(caught.value)
    assert "rank 0 issued reduce_scatter SUM [fsdp_core::reduce_gradients choice] of [2]" in message
    assert "rank 1 reduce_scatter SUM [fsdp_core::reduce_gradients choice] of [4]" in message


def freeze_on_rank_0(rank: int, *, before_sharding: bool) -> None:
    """A step of a choice that uses q alone, which rank 0 has frozen."""
    choice: Any = Choosy(frozen=(True, False)).choice
    if before_sharding:
        choice.q.requires_grad_(rank == 1)
    shard(choice, "")
    if not before_sharding:
        choice.q.requires_grad_(rank == 1)
    choice(integers(4).requires_grad_(), (False, True)).sum().backward()


def test_a_parameter_that_is_frozen_before_sharding_on_one_rank_only_is_found() -> None:
    """Frozen and trainable parameters are gathered apart, so the ranks gather other sizes."""
    with pytest.raises(fsdp_sim.CollectiveMismatch) as caught:
        fsdp_sim.simulate(partial(freeze_on_rank_0, before_sharding=True), 2)

    message = str(caught.value)
    assert "rank 0 issued all_gather [fsdp_core::unshard <root>] of [4]" in message
    assert "rank 1 all_gather [fsdp_core::unshard <root>] of [2]" in message


def test_a_parameter_that_is_frozen_later_on_one_rank_only_is_found() -> None:
    """The other rank waits for a reduction that this one has no reason to issue."""
    with pytest.raises(fsdp_sim.Deadlock) as caught:
        fsdp_sim.simulate(partial(freeze_on_rank_0, before_sharding=False), 2)

    message = str(caught.value)
    assert message.startswith("no rank can go on; missing: rank 0")
    assert "for reduce_scatter [fsdp_core::reduce_gradients <root>]" in message


def freeze_beside_another(rank: int, *, on_ranks: tuple[int, ...]) -> list[bool]:
    """Two steps; some ranks freeze q before the second. Whether p and q have a gradient then."""
    choice: Any = Choosy().choice
    shard(choice, "")
    for step in range(2):
        choice.zero_grad()
        choice.q.requires_grad_(step == 0 or rank not in on_ranks)
        choice(integers(4).requires_grad_(), (True, True)).sum().backward()
    return [parameter.grad is not None for parameter in (choice.p, choice.q)]


def test_a_parameter_that_is_frozen_beside_a_trainable_one_on_one_rank_only_is_found() -> None:
    """It is reduced for the other parameter's sake; the reduction says what it leaves out."""
    with pytest.raises(fsdp_sim.CollectiveMismatch) as caught:
        fsdp_sim.simulate(partial(freeze_beside_another, on_ranks=(0,)), 2)

    message = str(caught.value)
    assert "reduce_scatter SUM [fsdp_core::reduce_gradients <root> without q] of [4]" in message
    assert "reduce_scatter SUM [fsdp_core::reduce_gradients <root>] of [4]" in message


def test_a_parameter_that_is_frozen_beside_a_trainable_one_on_all_ranks_has_no_gradient() -> None:
    """The same program without the mistake."""
    report = fsdp_sim.simulate(partial(freeze_beside_another, on_ranks=(0, 1)), 2)

    assert report.results == [[True, False]] * 2
