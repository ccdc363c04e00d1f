"""B39: the order of collectives is that of no set, and of nothing else that a rank has for itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim import SGD

import fsdp_core
import fsdp_sim
from tests.cases.programs import (
    Row,
    Training,
    batch,
    check_parity,
    fill,
    gathered,
    linear,
    loss_of,
    ops_by_step,
    reduced,
    shard,
)

SIZES = (2, 3, 5)
SHUFFLED = "v1;w2;shuffle3"


def reduce_a_set(rank: int, is_sorted: bool = False) -> None:
    """Reduce gradients of unequal sizes in the order that a set gives them."""
    gradients = {torch.ones(size) for size in SIZES}
    for gradient in sorted(gradients, key=len) if is_sorted else gradients:
        dist.all_reduce(gradient)


def test_the_first_collective_that_differs_is_reported() -> None:
    """NVIDIA/Megatron-LM#2218, #2252: on hardware this hung, with some models, on some days."""
    with pytest.raises(fsdp_sim.CollectiveMismatch) as caught:
        fsdp_sim.simulate(reduce_a_set, 2, schedule=SHUFFLED)

    finding = caught.value.finding
    assert finding is not None
    first, second = finding.ops
    assert first.name == second.name == "all_reduce"
    assert {first.rank, second.rank} == {0, 1}
    hint = f"replay with: fsdp_sim.replay(reduce_a_set, {SHUFFLED!r})"
    assert hint in caught.value.__notes__


def test_an_order_of_its_own_makes_the_places_irrelevant() -> None:
    """The mended program."""
    fsdp_sim.simulate(reduce_a_set, 2, args=(True,), schedule=SHUFFLED)


class Forked(nn.Module):
    """Layers of 2, 3 and 5 rows on the same input."""

    def __init__(self) -> None:
        super().__init__()
        for name, rows in zip("abc", SIZES, strict=True):
            self.add_module(name, linear(rows, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what all layers made of `x`, side by side."""
        return torch.cat([layer(x) for layer in self.children()], 1)


def step(model: nn.Module, rank: int, number: int) -> None:
    """Forward and backward."""
    loss_of(model(batch(rank, number)), rank).backward()


@given(st.integers(1, 1000))
@settings(max_examples=4)
def test_units_run_in_one_order_wherever_things_lie_in_sets(shuffle: int) -> None:
    """Each rank's tensors, parameters and modules lie in its sets in an order of their own."""
    training = Training(lambda: fill(Forked()), step, ("a", "b", "c", ""))

    report = check_parity(training, schedule=f"v1;w2;shuffle{shuffle}")

    for rank in range(2):
        (ops,) = ops_by_step(report, rank)
        assert gathered(ops) == ["a", "b", "c", "c", "b", "a"]
        assert reduced(ops) == ["c", "b", "a"]


def by_value(model: nn.Module, optimizer: SGD) -> list[torch.Tensor]:
    """Each state in the order in which the optimizer holds them."""
    return [state["momentum_buffer"].full_tensor() for state in optimizer.state.values()]


def by_pytorch(model: nn.Module, optimizer: SGD) -> list[torch.Tensor]:
    """Each state by name, whole, as PyTorch's own checkpoints collect them."""
    whole: Any = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True)
    )
    return [whole["state"][name]["momentum_buffer"] for name, _ in model.named_parameters()]


Collect = Callable[[nn.Module, SGD], list[torch.Tensor]]


def uneven() -> nn.Module:
    """Two layers, of which each of two ranks holds one."""
    return fill(Row(first=linear(3, 2), second=linear(2, 3)))


def states(rank: int, collect: Collect) -> list[torch.Tensor]:
    """The momenta behind one step, made whole."""
    model = uneven()
    shard(model, "")
    optimizer = SGD(model.parameters(), lr=1.0, momentum=0.5)
    fsdp_core.fully_shard_optimizer(optimizer)
    step(model, rank, 0)
    optimizer.step()
    return collect(model, optimizer)


def expected_states() -> list[torch.Tensor]:
    """The mean gradient of two ranks, which is a first momentum."""
    model = uneven()
    for rank in range(2):
        step(model, rank, 0)
    return [each.grad / 2 for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("collect", [by_value, by_pytorch])
def test_states_of_an_optimizer_have_one_order_on_every_rank(collect: Collect) -> None:
    """Whatever each rank holds: whoever makes them whole one by one gathers the same on all."""
    for wholes in fsdp_sim.simulate(states, 2, args=(collect,)).results:
        assert all(map(torch.equal, wholes, expected_states()))
