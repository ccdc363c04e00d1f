"""B39: no iteration over a set decides the order of collectives."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fsdp_sim
from tests.cases.programs import (
    Training,
    batch,
    check_parity,
    fill,
    gathered,
    loss_of,
    ops_by_step,
    reduced,
)

Hashes = tuple[int, ...]


class Bucket:
    """Something whose place in a set differs between processes, as that of an object does."""

    def __init__(self, size: int, place: int) -> None:
        self.size = size
        self.place = place

    def __hash__(self) -> int:
        return self.place


def reduce_a_set(rank: int, places: Sequence[Hashes], is_sorted: bool = False) -> None:
    """Reduce buckets of unequal sizes in the order that a set gives them."""
    buckets = {Bucket(size, place) for size, place in zip((2, 3, 5), places[rank], strict=True)}
    order = sorted(buckets, key=lambda each: each.size) if is_sorted else list(buckets)
    for bucket in order:
        dist.all_reduce(torch.ones(bucket.size))


def test_the_first_collective_that_differs_is_reported() -> None:
    """NVIDIA/Megatron-LM#2218, #2252: on hardware this hung, on some models and some days."""
    with pytest.raises(fsdp_sim.CollectiveMismatch) as caught:
        fsdp_sim.simulate(reduce_a_set, 2, args=([(0, 1, 2), (0, 2, 1)],))

    finding = caught.value.finding
    assert finding is not None
    assert "operation 1 of group" in finding.message
    assert "of [3] float32" in finding.message
    assert "of [5] float32" in finding.message


def test_an_order_of_its_own_makes_the_places_irrelevant() -> None:
    """The mended program."""
    fsdp_sim.simulate(reduce_a_set, 2, args=([(0, 1, 2), (2, 1, 0)], True))


class Shuffled(nn.Linear):
    """A layer whose place in sets and dicts is chosen."""

    place = 0

    def __hash__(self) -> int:
        return self.place


class Forked(nn.Module):
    """Layers of 2, 3 and 5 rows on the same input."""

    def __init__(self) -> None:
        super().__init__()
        for name, rows in zip("abc", (2, 3, 5), strict=True):
            self.add_module(name, Shuffled(2, rows, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what all layers made of `x`, side by side."""
        return torch.cat([layer(x) for layer in self.children()], 1)


def shuffled(places: Sequence[Hashes]) -> Training:
    """On each rank the layers lie differently in sets."""

    def build() -> nn.Module:
        model = fill(Forked())
        if dist.is_initialized():
            for layer, place in zip(model.children(), places[dist.get_rank()], strict=True):
                assert isinstance(layer, Shuffled)
                layer.place = place
        return model

    def step(model: nn.Module, rank: int, number: int) -> None:
        loss_of(model(batch(rank, number)), rank).backward()

    return Training(build, step, ("a", "b", "c", ""))


@given(
    st.lists(st.permutations(range(3)).map(tuple), min_size=2, max_size=2),
)
@settings(max_examples=4)
def test_units_run_in_one_order_wherever_they_lie_in_sets(places: list[Hashes]) -> None:
    """Gathers and reductions come in the order of the program, on every rank."""
    report = check_parity(shuffled(places))

    for rank in range(2):
        for ops in ops_by_step(report, rank):
            assert gathered(ops) == ["a", "b", "c", "c", "b", "a"]
            assert reduced(ops) == ["c", "b", "a"]
