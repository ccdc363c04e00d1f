"""B64: an optimizer that needs whole matrices gathers each on one owner, and scatters the update."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Partial, Replicate

import fsdp_core
import fsdp_sim
from fsdp_core import FsdpMuon, Placements, muon
from fsdp_core.errors import UnsupportedError
from fsdp_core.torch_private import orthogonalize
from fsdp_sim.op import Kind
from tests.cases.programs import (
    Tensors,
    assert_equal,
    fill,
    integers,
    local_rows,
    put_together,
    shard,
)

STEPS = 2
Shapes = tuple[tuple[int, ...], ...]
SHAPES: Shapes = ((5, 4), (1, 4), (3,))


class Weights(nn.Module):
    """Parameters whose gradients are given."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        for number, shape in enumerate(shapes):
            self.register_parameter(f"p{number}", nn.Parameter(torch.empty(shape)))

    def forward(self, step: int) -> torch.Tensor:
        """A loss whose gradients are small integers, the same on all ranks."""
        terms = [
            (parameter * integers(*parameter.shape, start=step + number)).sum()
            for number, parameter in enumerate(self.parameters())
        ]
        return torch.stack(terms).sum()


def optimizers_of(model: nn.Module, muon: Any) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, SGD for the vectors."""
    matrices = [each for each in model.parameters() if each.dim() == 2]
    vectors = [each for each in model.parameters() if each.dim() != 2]
    optimizers: list[torch.optim.Optimizer] = [muon(matrices, lr=0.5, weight_decay=0.25)]
    if vectors:
        optimizers.append(torch.optim.SGD(vectors, lr=0.5))
    return optimizers


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Tensors:
    """A few steps."""
    for number in range(STEPS):
        model(number).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return local_rows(model)


def sharded(rank: int, shapes: Shapes, world_size: int) -> tuple[Tensors, dict[int, int]]:
    """Train on shards; return this rank's rows and who owns which matrix."""
    model = fill(Weights(shapes))
    shard(model, "", mesh=(world_size,))
    muon, *others = optimizers_of(model, FsdpMuon)
    assert isinstance(muon, FsdpMuon)
    for other in others:
        fsdp_core.fully_shard_optimizer(other)
    rows = train(model, [muon, *others])
    return rows, {index: owner for each in muon.buffers for index, owner in each.owners.items()}


def check(shapes: Shapes, world_size: int) -> fsdp_sim.Report:
    """The shards' weights have the unsharded ones' bits, and owners are as they must be."""
    report = fsdp_sim.simulate(sharded, world_size, args=(shapes, world_size), trace=True)
    rows = [each for each, _ in report.results]
    owners = [each for _, each in report.results]

    model = fill(Weights(shapes))
    assert_equal(
        put_together(rows, (world_size,)), train(model, optimizers_of(model, torch.optim.Muon))
    )
    assert owners == [owners[0]] * world_size
    assert sorted(owners[0]) == [n for n, shape in enumerate(shapes) if len(shape) == 2]
    for index, owner in owners[0].items():
        held = rows[owner][f"p{index}"]
        assert held is not None
        assert held.numel() > 0
    return report


def messages(report: fsdp_sim.Report) -> list[str]:
    """Names of the messages between two ranks."""
    return [
        op.name
        for op in report.trace.all_ops()
        if op.kind is Kind.COLLECTIVE and op.name in ("send", "recv")
    ]


def test_matrices_have_the_bits_of_the_unsharded_step_and_one_owner_each() -> None:
    """NVIDIA/Megatron-LM#5533, #6425: rows (5, 4) and (1, 4) and a vector over 3 ranks."""
    assert messages(check(SHAPES, 3))


def test_a_matrix_that_lies_on_one_rank_is_not_sent() -> None:
    """And ranks that hold nothing take part in all the rest."""
    assert messages(check(((1, 4), (3,)), 3)) == []


ROWS = st.integers(1, 6)


@given(st.lists(st.tuples(ROWS, st.sampled_from([2, 4])), min_size=1, max_size=3).map(tuple))
@settings(max_examples=4)
def test_any_matrices_have_the_bits_of_the_unsharded_step(shapes: Shapes) -> None:
    """Also more ranks than rows."""
    check(shapes, 3)


@pytest.mark.parametrize(
    ("plain", "advice"), [(torch.optim.Muon, "FsdpMuon"), (torch.optim.Adafactor, "AdamW")]
)
def test_a_plain_optimizer_of_whole_tensors_is_refused_at_its_step(plain: Any, advice: str) -> None:
    """On uneven rows its results would be wrong, and nothing would say so."""

    def program(_rank: int) -> str:
        model = fill(Weights(SHAPES[:1]))
        shard(model, "")
        optimizer = plain(model.parameters(), lr=0.5)
        model(0).backward()
        with pytest.raises(UnsupportedError) as caught:
            optimizer.step()
        return str(caught.value)

    start = f"an optimizer of shards must update each element by itself, got {plain.__name__}: "
    for message in fsdp_sim.simulate(program, 2).results:
        assert message.startswith(start)
        assert message.endswith(f"; use {advice}")


@pytest.mark.parametrize("plain", [torch.optim.Muon, torch.optim.Adafactor])
def test_a_plain_optimizer_of_whole_tensors_works_where_placements_keep_them_whole(
    plain: Any,
) -> None:
    """No rank holds a part, so there is nothing to refuse."""

    def program(_rank: int) -> Tensors:
        model = fill(Weights(SHAPES[:1]))
        whole = (Replicate(),)
        shard(model, "", placements=Placements((0,), whole, (Partial("avg"),), whole))
        return train(model, [plain(model.parameters(), lr=0.5)])

    model = fill(Weights(SHAPES[:1]))
    expected = train(model, [plain(model.parameters(), lr=0.5)])
    for result in fsdp_sim.simulate(program, 2).results:
        assert_equal(result, expected)


def test_a_matrix_whose_rows_are_orthogonalised_apart_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The defect planted: each rank's rows, 3 and 2, are taken for a matrix."""

    def apart(whole: torch.Tensor, *args: Any) -> torch.Tensor:
        return torch.cat([orthogonalize(rows, *args) for rows in whole.split(3)])

    monkeypatch.setattr(muon, "orthogonalize", apart)

    with pytest.raises(AssertionError, match=r"p0: tensor(?s:.*) instead of"):
        check(((5, 4),), 2)
