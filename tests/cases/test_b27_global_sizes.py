"""B27: the global size of a sharded tensor is known, never guessed from a local one."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp_core
import fsdp_sim
from fsdp_core import ConfigError
from fsdp_core.torch_private import all_gather_single
from tests.cases.programs import integers, shard


class Weights(nn.Module):
    """Weights of given numbers of rows, whose sum is the output."""

    def __init__(self, *rows: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            [nn.Parameter(integers(each, 2, start=each + 1)) for each in rows]
        )

    def forward(self) -> Tensor:
        """Return the sum of squares, so that each gradient is twice its element."""
        return torch.stack([(each * each).sum() for each in self.weights]).sum()


def wholes(tensors: list[Tensor]) -> list[Tensor]:
    """Each tensor, put together from all ranks."""
    assert all(isinstance(each, DTensor) for each in tensors)
    return [each.full_tensor().clone() for each in tensors]  # type: ignore[attr-defined]


def everywhere(rank: int, rows: tuple[int, ...], mesh: tuple[int, ...]) -> dict[str, Any]:
    """What a rank sees of the parameters, their gradients and their optimizer state."""
    model = Weights(*rows)
    shard(model, "", mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    fsdp_core.fully_shard_optimizer(optimizer)
    before = wholes(list(model.parameters()))
    shapes = [tuple(each.shape) for each in model.parameters()]
    model().backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    optimizer.step()
    return {
        "shapes": shapes,
        "before": before,
        "gradients": wholes(gradients),
        "after": wholes(list(model.state_dict().values())),
        "detached": wholes([each.detach() for each in model.parameters()]),
        "momentum": wholes([optimizer.state[p]["momentum_buffer"] for p in model.parameters()]),
    }


def check_whole(rows: tuple[int, ...], mesh: tuple[int, ...]) -> None:
    """Every tensor comes back whole on every rank, padding nowhere."""
    report = fsdp_sim.simulate(everywhere, torch.Size(mesh).numel(), args=(rows, mesh))

    original = [each.detach() for each in Weights(*rows).weights]
    for result in report.results:
        assert result["shapes"] == [(each, 2) for each in rows]
        for index, weight in enumerate(original):
            assert torch.equal(result["before"][index], weight)
            for name, factor in (("gradients", 2), ("momentum", 2), ("after", -1)):
                assert torch.equal(result[name][index], factor * weight), name
            assert torch.equal(result["detached"][index], -weight)


def test_ten_rows_on_four_ranks_are_ten_rows_on_each() -> None:
    """pytorch#110762, #110781, torchtitan#4593, #3549, miles-credit#416: 3, 3, 3 and 1."""
    check_whole((10,), (4,))


@given(
    st.lists(st.integers(0, 11), min_size=1, max_size=3).map(tuple),
    st.sampled_from([(1,), (2,), (3,), (4,), (2, 2)]),
)
@settings(max_examples=10)
def test_any_rows_beside_any_others_come_back_whole(
    rows: tuple[int, ...], mesh: tuple[int, ...]
) -> None:
    """Weights of one unit share a buffer, so their rows lie where DTensor would not look."""
    check_whole(rows, mesh)


def test_what_cannot_be_told_from_uneven_rows_is_refused_by_name() -> None:
    """Another placement than Replicate, and a gradient that is not reduced yet."""

    def program(rank: int) -> list[str]:
        model = Weights(3, 5)
        context = shard(model, "", mesh=(2, 2))
        messages = []
        first = next(model.parameters())
        assert isinstance(first, DTensor)
        replicated = first.redistribute(placements=[Replicate(), Replicate()])
        assert torch.equal(replicated.to_local(), first.full_tensor())
        with pytest.raises(ConfigError) as caught:
            first.redistribute(placements=[Replicate(), Shard(1)])
        messages.append(str(caught.value))
        with fsdp_core.microbatch(context, is_last=False):
            model().backward()
        assert isinstance(first.grad, DTensor)
        with pytest.raises(ConfigError) as caught:
            first.grad.full_tensor()
        model().backward()
        messages.append(str(caught.value))
        return messages

    for moved, unfinished in fsdp_sim.simulate(program, 4).results:
        assert moved.startswith("the rows of 'weights.0' can be redistributed to Replicate()")
        assert unfinished.startswith("full_tensor of 'weights.0.grad' needs reduced rows")


def test_errors_of_rows_name_the_parameter_in_the_whole_model() -> None:
    """Names inside a unit, such as 'weight', are those of many parameters."""

    def program(rank: int) -> list[tuple[str, str | None]]:
        shard(model := nn.Sequential(nn.Linear(2, 3, bias=False)), "0", "")
        weight = model.get_parameter("0.weight")
        assert isinstance(weight, DTensor)
        state: dict[str, Any] = model.state_dict()
        calls: list[Callable[[], Any]] = [
            lambda: weight.redistribute(placements=[Shard(1)]),
            lambda: state["0.weight"].redistribute(placements=[Shard(1)]),
            lambda: weight.full_tensor(grad_placements=[Shard(0)]),
            lambda: weight.full_tensor().sum().backward(),
        ]
        errors = []
        for call in calls:
            with pytest.raises(ConfigError) as caught:
                call()
            errors.append((str(caught.value), caught.value.fqn))
        return errors

    for errors in fsdp_sim.simulate(program, 2).results:
        assert [fqn for _, fqn in errors] == ["0.weight"] * 4
        assert all("'0.weight'" in message for message, _ in errors)


def averaged(parameter: Tensor) -> Tensor:
    """An average of weights as it is usually kept: a copy that moves towards the parameter."""
    return parameter.detach().clone().lerp_(parameter.detach(), 0.5)


def in_fp64(parameter: Tensor) -> Tensor:
    """A copy in another dtype."""
    return parameter.detach().to(torch.float64)


@pytest.mark.parametrize("copy_of", [averaged, in_fp64])
def test_copies_of_uneven_rows_come_back_whole(
    copy_of: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    """And are saved whole by PyTorch's own checkpoints, which ask the same question."""

    def program(rank: int) -> tuple[list[Tensor], list[Tensor]]:
        model = Weights(3, 5, 1)
        shard(model, "")
        with torch.no_grad():
            copies = {name: copy_of(each) for name, each in model.named_parameters()}
        checkpoint.save(copies, checkpoint_id=tmp_path)
        loaded = {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in copies.items()}
        checkpoint.load(loaded, checkpoint_id=tmp_path)
        return wholes(list(copies.values())), list(loaded.values())

    for copies, loaded in fsdp_sim.simulate(program, 2).results:
        for weight, mine, saved in zip(Weights(3, 5, 1).weights, copies, loaded, strict=True):
            assert torch.equal(mine, weight.to(mine.dtype))
            assert torch.equal(saved, weight.to(saved.dtype))


def test_states_of_an_optimizer_that_was_not_made_sharded_come_back_whole() -> None:
    """It makes them itself, from the parameters, at its first step."""

    def program(rank: int) -> list[Tensor]:
        model = Weights(3, 5)
        shard(model, "")
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        model().backward()
        optimizer.step()
        return wholes([optimizer.state[each]["momentum_buffer"] for each in model.parameters()])

    for momenta in fsdp_sim.simulate(program, 2).results:
        for weight, momentum in zip(Weights(3, 5).weights, momenta, strict=True):
            assert torch.equal(momentum, 2 * weight)


def test_state_dicts_are_copied_and_pickled_as_ever() -> None:
    """What makes a tensor whole travels with copies, and stays out of files."""

    def program(rank: int) -> dict[str, Any]:
        model = Weights(3, 5)
        shard(model, "")
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.5)
        fsdp_core.fully_shard_optimizer(optimizer)
        model().backward()
        optimizer.step()
        state = model.state_dict()
        file = io.BytesIO()
        torch.save((state, optimizer.state_dict()), file)
        file.seek(0)
        loaded, _ = torch.load(file, weights_only=True)
        copied = copy.deepcopy(state)
        return {
            "copied": wholes(list(copied.values())),
            "state": wholes(list(state.values())),
            "same": all(
                torch.equal(loaded[name].to_local(), state[name].to_local()) for name in state
            ),
        }

    for result in fsdp_sim.simulate(program, 2).results:
        assert all(map(torch.equal, result["copied"], result["state"]))
        assert result["same"]


def test_gathers_of_guessed_sizes_are_found_with_both_sizes() -> None:
    """The defect planted: each rank takes its own rows times the ranks for the whole."""

    def program(rank: int) -> None:
        local = torch.ones(3 if rank < 3 else 1)
        assert dist.group.WORLD is not None
        all_gather_single(local.new_empty(4 * len(local)), local, dist.group.WORLD)

    with pytest.raises(fsdp_sim.CollectiveMismatch) as caught:
        fsdp_sim.simulate(program, 4)

    assert "issued all_gather of [3] float32" in str(caught.value)
    assert "rank 3 all_gather of [1] float32" in str(caught.value)
