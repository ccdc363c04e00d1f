"""B47: loading with assign=True would part a unit from its buffers, and is refused."""

import pytest
import torch
from torch import nn

import fsdp_sim
from fsdp_core import StateError
from tests.cases.programs import Row, batch, fill, shard, sharded_parameters


def twos(model: nn.Module) -> dict[str, torch.Tensor]:
    """A checkpoint of twos, as this rank sees it."""
    return {name: torch.full_like(value, 2.0) for name, value in model.state_dict().items()}


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

    name = "Row" if root == "whole" else "a"
    message = (
        f"load_state_dict must copy into the parameters of a unit, got assign=True for "
        f"{'FsdpRow' if root == 'whole' else name!r}"
    )
    for result in fsdp_sim.simulate(program, 2).results:
        assert message.split(" for ")[0] in result
        assert "use assign=False" in result


def _folded(x: torch.Tensor) -> torch.Tensor:
    from fsdp_sim.program.model import fold

    return fold(x @ torch.full((2, 2), 2.0))
