"""B37: units of unequal sizes take turns in the same memory, and none sees the other's."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fsdp_sim
from fsdp_sim.program.model import fold
from tests.cases.programs import Training, batch, check_parity, fill, linear, loss_of, shard


class Uneven(nn.Module):
    """Square layers of different widths, each on as much of the input as it takes."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        for number, width in enumerate(widths):
            self.add_module(f"u{number}", linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Let each layer rewrite the first columns."""
        for layer in self.children():
            width = layer.in_features
            assert isinstance(width, int)
            x = torch.cat([fold(layer(x[:, :width])), x[:, width:]], 1)
        return x


def training(widths: tuple[int, ...], steps: int = 2, **options: Any) -> Training:
    """Every layer is a unit."""

    def step(model: nn.Module, rank: int, number: int) -> None:
        loss_of(model(batch(rank, number, width=4)), rank).backward()

    names = [f"u{number}" for number in range(len(widths))]
    return Training(lambda: fill(Uneven(widths)), step, [*names, ""], steps, options=options)


def test_units_of_4_and_9_elements_alternate_with_parity() -> None:
    """NVIDIA/Megatron-LM#4810, #6316: no pool of slots that an odd unit would not fit in."""
    report = check_parity(training((2, 3, 2, 3)), poison=True)

    assert report.notices == ()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple))
@settings(max_examples=6)
def test_any_sizes_have_parity(widths: tuple[int, ...]) -> None:
    """Every order of sizes, with memory that holds no value filled with NaN."""
    check_parity(training(widths, steps=1), poison=True)


def test_memory_of_a_released_unit_is_reused_only_behind_its_last_reader() -> None:
    """The release waits for the readers; where that wait is missing the reuse is reported."""

    def program(rank: int, *, waits: bool) -> None:
        one = training((2, 3, 2, 3), steps=1)
        model = one.build()
        context = shard(model, *one.units)
        if not waits:
            context.allgather_stream.wait_stream = lambda _other: None
        one.step(model, rank, 0)

    assert fsdp_sim.simulate(lambda rank: program(rank, waits=True), 2).findings == ()

    report = fsdp_sim.simulate(lambda rank: program(rank, waits=False), 2, strict=False)
    assert "UseAfterFree" in {finding.kind for finding in report.findings}


def test_a_saved_view_whose_memory_was_given_back_is_reported() -> None:
    """A user keeps a view of the full weights beyond the unit's forward, and reads it."""

    def program(rank: int) -> None:
        model = fill(nn.ModuleDict({"layer": linear()}))
        shard(model, "layer", "")
        layer = model.get_submodule("layer")
        kept: list[Tensor] = []
        layer.register_forward_hook(
            lambda each, _args, _output: kept.append(each.weight.view(-1)), prepend=True
        )
        layer(batch(rank))
        kept[0].neg()

    with pytest.raises(fsdp_sim.UseAfterFree) as caught:
        fsdp_sim.simulate(program, 2)

    finding = caught.value.finding
    assert finding is not None
    assert "'neg' on stream 0 (default) reads a tensor whose memory was given" in finding.message
    assert "[fsdp_core::reshard layer]" in finding.message
    assert finding.ops[0].source is not None
    assert finding.ops[0].source.file == __file__


def test_the_shape_of_released_memory_may_be_looked_at() -> None:
    """Only what touches bytes is reported."""

    def program(rank: int) -> list[float]:
        tensor = torch.ones(3)
        tensor.untyped_storage().resize_(0)
        zeros = torch.zeros_like(tensor).tolist()
        del tensor
        return zeros

    assert fsdp_sim.simulate(program, 1).results == [[0, 0, 0]]


def test_released_memory_can_be_shown_when_the_run_is_over() -> None:
    """Such as by pytest, which shows what the frames of an exception hold."""
    held = []

    def program(rank: int) -> None:
        held.append(torch.ones(3))
        held[0].untyped_storage().resize_(0)

    fsdp_sim.simulate(program, 1)

    assert repr(held[0]) == "tensor([nan, nan, nan])"
