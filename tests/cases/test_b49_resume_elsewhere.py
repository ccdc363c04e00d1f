"""B49: a checkpoint resumes at another world size, also where some ranks hold nothing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

import fsdp_core
import fsdp_sim
from fsdp_core.full_state import load_full_state_dict
from fsdp_sim.mutation.core_changes import changes
from tests.cases.programs import (
    assert_equal,
    fill,
    integers,
    linear,
    local_rows,
    put_together,
    shard,
)

ROWS = 5
STEPS_BEFORE, STEPS_AFTER = 2, 1


def build(world_size: int) -> tuple[nn.Module, Optimizer]:
    """A layer of 5 rows, and Adam."""
    model = fill(nn.Sequential(linear(ROWS, 2)))
    shard(model, "0", "", mesh=(world_size,))
    return model, fsdp_core.fully_shard_optimizer(Adam(model.parameters(), lr=0.1))


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    """Steps with the same batch on every rank, so that the number of ranks does not matter."""
    for number in steps:
        (model(integers(1, 2, start=number)) * integers(1, ROWS, start=number)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def counters(optimizer: Optimizer) -> list[float]:
    """How many steps each parameter's state has seen."""
    return [float(state["step"]) for state in optimizer.state_dict()["state"].values()]


def interrupted(rank: int, path: Path) -> None:
    """Two steps, then save."""
    model, optimizer = build(2)
    train(model, optimizer, range(STEPS_BEFORE))
    fsdp_core.save_checkpoint(model, optimizer, path)


def resumed(rank: int, path: Path, world_size: int) -> tuple[dict[str, Any], list[float]]:
    """Load into a model with other weights, and do one more step."""
    model, optimizer = build(world_size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    fsdp_core.load_checkpoint(model, optimizer, path)
    train(model, optimizer, range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER))
    return local_rows(model), counters(optimizer)


def uninterrupted() -> dict[str, Tensor | None]:
    """Three steps without a stop, unsharded."""
    model = fill(nn.Sequential(linear(ROWS, 2)))
    train(model, Adam(model.parameters(), lr=0.1), range(STEPS_BEFORE + STEPS_AFTER))
    return {name: each.detach() for name, each in model.named_parameters()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks saved after two steps."""
    path = tmp_path_factory.mktemp("checkpoint") / "after two steps"
    fsdp_sim.simulate(interrupted, 2, args=(path,))
    return path


@pytest.mark.parametrize("world_size", [1, 3, 5, 8])
def test_the_third_step_has_the_bits_of_a_run_that_never_stopped(
    checkpoint: Path, world_size: int
) -> None:
    """pytorch#102821, #91205; torchtitan#811: with 8 ranks, three hold nothing."""
    report = fsdp_sim.simulate(resumed, world_size, args=(checkpoint, world_size))

    whole = put_together([rows for rows, _ in report.results], mesh=(world_size,))
    assert_equal(whole, uninterrupted())
    assert [steps for _, steps in report.results] == [[3.0]] * world_size


def patterns() -> dict[str, Tensor]:
    """Weights of all over the range of 16 bits, with a subnormal, an infinity, a NaN with payload."""
    numbers = torch.arange(7 * 2 + 4 * 7, dtype=torch.int32).mul(1561).sub(32768)
    numbers[-3:] = torch.tensor([0x0001, 0x7F80, 0x7FA5])
    first, second = numbers.to(torch.int16).view(torch.bfloat16).split([7 * 2, 4 * 7])
    return {"0.weight": first.view(7, 2), "1.weight": second.view(4, 7)}


def bits(tensors: Mapping[str, Tensor | None]) -> dict[str, list[list[int]]]:
    """Tensors as integers, by which NaNs compare too."""
    return {
        name: each.view(torch.int16).tolist() for name, each in tensors.items() if each is not None
    }


def bfloat16_pair(*units: str, world_size: int) -> tuple[nn.Module, Optimizer]:
    """Layers of 7 and 4 rows."""
    model = fill(nn.Sequential(linear(7, 2), linear(4, 7))).bfloat16()
    own = fsdp_core.MixedPrecisionPolicy(main_params_dtype=None)
    shard(model, *units, mesh=(world_size,), mixed_precision_policy=own)
    return model, fsdp_core.fully_shard_optimizer(Adam(model.parameters(), lr=0.1))


def moments(optimizer: Optimizer) -> dict[str, Tensor]:
    """The whole moments of all parameters."""
    return {
        f"{number}.{key}": state[key].full_tensor()
        for number, state in enumerate(optimizer.state.values())
        for key in ("exp_avg", "exp_avg_sq")
    }


def test_bfloat16_weights_and_moments_of_three_ranks_keep_their_bits_on_five(
    tmp_path: Path,
) -> None:
    """Rows lie as 3, 3, 1 and 2, 2, 0; then both layers share a buffer, and two ranks hold nothing."""

    def saved(rank: int) -> dict[str, list[list[int]]]:
        model, optimizer = bfloat16_pair("0", "1", world_size=3)
        model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        load_full_state_dict(model, patterns() if rank == 0 else None)
        fsdp_core.save_checkpoint(model, optimizer, tmp_path / "saved")
        return bits(moments(optimizer))

    def loaded(_rank: int) -> tuple[dict[str, Tensor | None], dict[str, list[list[int]]]]:
        model, optimizer = bfloat16_pair("", world_size=5)
        fsdp_core.load_checkpoint(model, optimizer, tmp_path / "saved")
        return local_rows(model), bits(moments(optimizer))

    before = fsdp_sim.simulate(saved, 3).results
    after = fsdp_sim.simulate(loaded, 5).results

    weights = put_together([rows for rows, _ in after], mesh=(5,))
    assert bits(weights) == bits(patterns())
    assert len(before[0]) == 4
    assert [states for _, states in after] == before[:1] * 5


@pytest.mark.parametrize("names", [("",), ("0", "1")], ids=["same units", "other units"])
def test_an_optimizer_that_was_not_made_sharded_resumes_too(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    """Layers of 3 and 5 rows share a buffer, so that their rows lie unevenly."""

    def pair(*units: str) -> tuple[nn.Module, Optimizer]:
        model = fill(nn.Sequential(linear(3, 2), linear(ROWS, 3)))
        if units:
            shard(model, *units)
        return model, Adam(model.parameters(), lr=0.1)

    def program(rank: int) -> dict[str, Tensor | None]:
        model, optimizer = pair("")
        train(model, optimizer, range(STEPS_BEFORE))
        fsdp_core.save_checkpoint(model, optimizer, tmp_path / "saved")
        model, optimizer = pair(*names)
        fsdp_core.load_checkpoint(model, optimizer, tmp_path / "saved")
        train(model, optimizer, range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER))
        return local_rows(model)

    model, optimizer = pair()
    train(model, optimizer, range(STEPS_BEFORE + STEPS_AFTER))
    whole = put_together(fsdp_sim.simulate(program, 2).results)
    assert_equal(whole, {name: each.detach() for name, each in model.named_parameters()})


def test_rows_that_are_described_as_even_ones_are_found(tmp_path: Path) -> None:
    """The defect planted: a checkpoint says that each rank holds as many rows as any other."""
    (even,) = [each for each in changes() if each.name == "describe even shards"]

    def program(_rank: int) -> None:
        model = fill(nn.Sequential(linear(3, 2), linear(ROWS, 3)))
        shard(model, "")
        optimizer = fsdp_core.fully_shard_optimizer(Adam(model.parameters()))
        fsdp_core.save_checkpoint(model, optimizer, tmp_path / "saved")

    # Rows lie as 3, 0 and 2, 3: what the second rank says it holds ends behind the fifth row.
    with (
        even.in_force(),
        pytest.raises(ValueError, match=r"^Failed to validate global plan"),
    ):
        fsdp_sim.simulate(program, 2)
