"""B13: a child that was used before its parent is sharded is refused at the parent's call."""

import pytest
import torch
from torch import nn

import fsdp_core
import fsdp_sim
from fsdp_core import ConfigError, FsdpModule, StateError
from tests.cases.programs import (
    SHARDED,
    Row,
    Training,
    batch,
    check_values,
    fill,
    loss_of,
    mesh_of,
    shard,
)


def use(trunk: nn.Module, how: str) -> None:
    """Run the trunk once without gradients, or gather it once."""
    if how == "run":
        with torch.no_grad():
            trunk(batch(0))
    else:
        assert isinstance(trunk, FsdpModule)
        trunk.unshard()
        trunk.reshard()


@pytest.mark.parametrize("how", ["run", "gather"])
def test_a_child_of_another_context_is_refused_by_the_parents_call(how: str) -> None:
    """fairscale#490, litgpt#570: never at the first training forward; the child goes on as it is."""

    def program(rank: int) -> str:
        model = fill(Row("trunk", "head"))
        context = shard(model, "trunk")
        trunk = model.get_submodule("trunk")
        use(trunk, how)
        with fsdp_core.fully_shard_context(), pytest.raises(ConfigError) as caught:
            fsdp_core.fully_shard(model, mesh_of(2), SHARDED)
        assert isinstance(trunk, FsdpModule)
        assert trunk.context is context
        loss_of(trunk(batch(rank)), rank).backward()
        return str(caught.value)

    report = fsdp_sim.simulate(program, 2)

    expected = (
        "all units below a unit must be of its context, got 'trunk' of another one; shard the whole "
        "model inside one `with fully_shard_context()`"
    )
    assert report.results == [expected] * 2


@pytest.mark.parametrize("how", ["run", "gather"])
def test_a_child_must_not_be_used_while_the_scope_is_open(how: str) -> None:
    """Whether it is a root is not known yet; it says to leave the scope first."""

    def program(rank: int) -> None:
        model = fill(Row("trunk", "head"))
        trunk = model.get_submodule("trunk")
        with fsdp_core.fully_shard_context():
            fsdp_core.fully_shard(trunk, mesh_of(2), SHARDED)
            with pytest.raises(StateError, match=r"leave `with fully_shard_context\(\)` first"):
                use(trunk, how)
            fsdp_core.fully_shard(model, mesh_of(2), SHARDED)
        loss_of(model(batch(rank)), rank).backward()

    fsdp_sim.simulate(program, 2)


@pytest.mark.everywhere
def test_a_child_that_is_used_when_the_scope_has_ended_has_parity() -> None:
    """By itself first, then as a part of the whole."""

    def step(model: nn.Module, rank: int, number: int) -> None:
        with torch.no_grad():
            model.get_submodule("trunk")(batch(rank))
        loss_of(model(batch(rank, number)), rank).backward()

    check_values(Training(lambda: fill(Row("trunk", "head")), step, ("trunk", ""), steps=2))
