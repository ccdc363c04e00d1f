"""B47: what would part a unit from its buffers, such as loading with assign=True, is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_core import StateError, hooks
from tests.cases.programs import (
    Row,
    assert_equal,
    assert_resting,
    batch,
    fill,
    linear,
    local_rows,
    shard,
    sharded_parameters,
)
from tests.core.worlds import on_ranks


def twos(model: nn.Module) -> dict[str, torch.Tensor]:
    """A checkpoint of twos, as this rank sees it."""
    return {name: torch.full_like(value, 2.0) for name, value in model.state_dict().items()}


@pytest.mark.everywhere
@pytest.mark.parametrize("root", ["whole", "container"])
def test_it_raises_before_anything_is_replaced(root: str) -> None:
    """NVIDIA/Megatron-LM#6087, #6203: on all ranks, naming the unit and the in-place way."""

    def program(rank: int) -> str:
        model: nn.Module = fill(Row("a", "b"))
        shard(model, "a", "b", *([""] if root == "whole" else []))
        before = sharded_parameters(model)
        state = twos(model)
        with pytest.raises(StateError) as caught:
            model.load_state_dict(state, assign=True)
        assert all(old is new for old, new in zip(before, sharded_parameters(model), strict=True))
        model.load_state_dict(state)
        output = model(batch(rank))
        expected = batch(rank)
        for _ in range(2):
            expected = _folded(expected)
        assert torch.equal(output, expected)
        return str(caught.value)

    unit = {"whole": "<root>", "container": "<root> (root 0)"}[root]
    message = (
        f"load_state_dict must copy into the parameters of a unit, got assign=True for unit "
        f"{unit!r}; use assign=False"
    )
    assert on_ranks(program, 2) == [message] * 2


def assign(model: nn.Module, _state: dict[str, torch.Tensor], rank: int) -> None:
    """Put a parameter of one's own in, and run."""
    a: Any = model.get_submodule("a")
    a.weight = nn.Parameter(torch.ones(2, 2))
    model(batch(rank))


def call_functionally(model: nn.Module, state: dict[str, torch.Tensor], rank: int) -> None:
    """Run with other parameters, without changing the model."""
    torch.func.functional_call(model, state, (batch(rank),))


@pytest.mark.everywhere
@pytest.mark.parametrize("replace", [assign, call_functionally])
def test_a_replaced_parameter_is_refused_by_the_forward_that_would_ignore_it(
    replace: Callable[[nn.Module, dict[str, torch.Tensor], int], None],
) -> None:
    """The unit would go on with what its buffers hold; the message says how to write those."""

    def program(rank: int) -> str:
        model = fill(Row("a", "b"))
        shard(model, "a", "b", "")
        with pytest.raises(StateError) as caught:
            replace(model, twos(model), rank)
        assert_resting(model.get_submodule("b"))
        return str(caught.value)

    message = (
        "the parameters of unit 'a' must be those that fully_shard put there, got another object for "
        "'weight' (by assignment, or torch.func.functional_call); copy values into the sharded "
        "parameter, under torch.no_grad()"
    )
    assert on_ranks(program, 2) == [message] * 2


def test_a_model_that_was_called_functionally_is_as_it_was() -> None:
    """PyTorch puts the sharded parameters back, and the next forward uses them."""

    def program(rank: int) -> torch.Tensor:
        model = fill(Row("a", "b"))
        shard(model, "a", "b", "")
        with pytest.raises(StateError):
            call_functionally(model, twos(model), rank)
        return model(batch(rank))

    for rank, output in enumerate(on_ranks(program, 2)):
        assert torch.equal(output, fill(Row("a", "b"))(batch(rank)))


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """What an unsharded model saves."""
    return {name: torch.ones(value.shape) for name, value in model.state_dict().items()}


def evenly(model: nn.Module) -> dict[str, torch.Tensor]:
    """What PyTorch's own sharding makes of it."""
    entries: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        assert isinstance(value, DTensor)
        entries[name] = distribute_tensor(torch.ones(value.shape), value.device_mesh, [Shard(0)])
    return entries


WHOLE = (
    "load_state_dict must be given sharded entries, got a whole one for 'a.weight'; use "
    "fsdp_core.full_state.load_full_state_dict"
)
OTHER_ROWS = (
    "load_state_dict must be given the rows that the unit holds, {} of 'b.weight' on this rank, got "
    "(1, 1); use fsdp_core.full_state.load_full_state_dict, or load_checkpoint"
)


@pytest.mark.everywhere
@pytest.mark.parametrize(
    ("make", "messages"),
    [(whole, [WHOLE, WHOLE]), (evenly, [OTHER_ROWS.format((0, 1)), OTHER_ROWS.format((2, 1))])],
)
def test_entries_of_other_rows_are_refused_before_anything_is_loaded(
    make: Callable[[nn.Module], dict[str, torch.Tensor]], messages: list[str]
) -> None:
    """One row would be copied to two without a word; the message names what loads whole entries."""

    def program(rank: int) -> str:
        model = fill(Row(a=linear(1, 2), b=linear(2, 1)))
        shard(model, ("a", "b"))
        state = make(model)
        before = local_rows(model)
        with pytest.raises(StateError) as caught:
            model.load_state_dict(state)
        assert_equal(local_rows(model), before)
        return str(caught.value)

    assert on_ranks(program, 2) == messages


def _folded(x: torch.Tensor) -> torch.Tensor:
    from fsdp_sim.program.model import fold

    return fold(x @ torch.full((2, 2), 2.0))


def test_a_load_that_replaces_parameters_is_found_by_the_next_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The defect planted: assign=True is let through."""
    monkeypatch.setattr(hooks, "is_assigning_load", lambda _metadata: False)

    def program(rank: int) -> str:
        model = fill(Row("a", "b"))
        shard(model, "a", "b", "")
        before = sharded_parameters(model)
        model.load_state_dict(twos(model), assign=True)
        after = sharded_parameters(model)
        assert not any(old is new for old, new in zip(before, after, strict=True))
        with pytest.raises(StateError, match="got another object for 'weight'") as caught:
            model(batch(rank))
        return caught.value.fqn or ""

    assert on_ranks(program, 2) == ["a", "a"]
