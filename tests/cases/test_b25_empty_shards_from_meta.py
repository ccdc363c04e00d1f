"""B25: fewer rows than ranks, built on the meta device."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fsdp_sim
from fsdp_core import ConfigError
from fsdp_core.dbuffer import DBuffer
from fsdp_core.uneven import Rows
from fsdp_sim.program.model import fold
from tests.cases.programs import Training, check_parity, integers, loss_of, shard


class Cube(nn.Module):
    """A weight [rows, 4, 4] of integers, which it writes itself."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, 4, 4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Write the integers."""
        with torch.no_grad():
            self.weight.copy_(integers(*self.weight.shape, start=3))

    def forward(self, x: Tensor) -> Tensor:
        """Return what the sum of all rows makes of `x` [1, 4], added to it."""
        return fold(x + x @ self.weight.sum(0))


def on_meta(rows: int, world_size: int) -> Training:
    """One unit, which a sharded run builds on the meta device."""

    def build() -> nn.Module:
        if torch.distributed.is_initialized():
            with torch.device("meta"):
                return Cube(rows)
        return Cube(rows)

    def step(model: nn.Module, rank: int, number: int) -> None:
        loss_of(model(integers(1, 4, start=rank + number)), rank).backward()

    return Training(build, step, ("",), steps=2, mesh=(world_size,))


def held(_rank: int) -> tuple[tuple[int, ...], bool]:
    """The shape of this rank's shard of one row, and whether anything of it is on the meta device."""
    with torch.device("meta"):
        model = Cube(1)
    shard(model, "")
    (parameter,) = model.parameters()
    local = parameter.to_local()  # type: ignore[attr-defined]
    return tuple(local.shape), any(each.is_meta for each in (parameter, local))


def test_the_rank_without_rows_trains_along() -> None:
    """pytorch#164554: it holds an empty shard, and nothing is left on the meta device."""
    check_parity(on_meta(1, 2))

    assert fsdp_sim.simulate(held, 2).results == [((1, 4, 4), False), ((0, 4, 4), False)]


@given(st.integers(1, 5).flatmap(lambda w: st.tuples(st.integers(0, 2 * w + 1), st.just(w))))
@settings(max_examples=10)
def test_any_number_of_rows_on_any_number_of_ranks_has_parity(sizes: tuple[int, int]) -> None:
    """From none to two for each rank and one more; sums over five are exact, and divided by five."""
    check_parity(on_meta(*sizes))


def test_rows_without_elements_are_refused_by_name() -> None:
    """A shape of (0,) is an empty tensor like any other; rows of nothing cannot be told apart."""

    def program(rank: int) -> str:
        layers = nn.ModuleDict({"layer": Cube(3)})
        layers["layer"].weight = nn.Parameter(torch.empty(3, 0))
        with pytest.raises(ConfigError) as caught:
            shard(layers, "")
        return str(caught.value)

    message = (
        "parameter 'layer.weight' must have rows with elements, got shape (3, 0); use a shape of (0,), "
        "or leave it out"
    )
    assert fsdp_sim.simulate(program, 2).results == [message] * 2


def test_an_empty_shard_that_stays_on_the_meta_device_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The defect planted: what has no elements is not made real."""
    get_rows = DBuffer.get_rows

    def empty_on_meta(buffer: DBuffer, *args: Any) -> Rows:
        rows = get_rows(buffer, *args)
        return rows if rows.local.numel() else replace(rows, local=rows.local.to("meta"))

    monkeypatch.setattr(DBuffer, "get_rows", empty_on_meta)

    assert fsdp_sim.simulate(held, 2).results == [((1, 4, 4), False), ((0, 4, 4), True)]
