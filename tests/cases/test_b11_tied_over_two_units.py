"""B11: a weight that two units claim is refused by the second call, which says what to do."""

import re

import pytest
from torch import nn

import fsdp_core
import fsdp_sim
from fsdp_core import ConfigError
from tests.cases.programs import (
    SHARDED,
    Row,
    Tensors,
    Training,
    assert_equal,
    check_values,
    integers,
    local_rows,
    mesh_of,
    put_together,
    train_shards,
)
from tests.cases.test_b10_tied_in_one_unit import Tied, build, step

MESSAGE = (
    "a parameter belongs to one unit, got {name!r} of {unit}, which is 'weight' of the unit "
    "FsdpEmbedding already; shard the modules that share it in one call: "
    "fully_shard([first, second], ...)"
)


@pytest.mark.parametrize(
    ("second", "name", "unit"), [("head", "weight", "Linear"), ("", "head.weight", "Tied")]
)
def test_the_second_call_raises_and_names_both(second: str, name: str, unit: str) -> None:
    """huggingface/accelerate#4171, NVIDIA/Model-Optimizer#2059, saforem2/ezpz#237."""

    def program(rank: int) -> str:
        model = build()
        with fsdp_core.fully_shard_context():
            fsdp_core.fully_shard(model.get_submodule("emb"), mesh_of(2), SHARDED)
            with pytest.raises(ConfigError) as caught:
                fsdp_core.fully_shard(model.get_submodule(second), mesh_of(2), SHARDED)
        return str(caught.value)

    report = fsdp_sim.simulate(program, 2)

    assert report.results == [MESSAGE.format(name=name, unit=unit)] * 2


def state_of(module: nn.Module) -> dict[str, object]:
    """What a module holds: its parameter by identity, all else by value."""
    held = {name: value for name, value in vars(module).items() if name != "_parameters"}
    return {**held, "weight": id(module.weight), "hooks": str(held)}


def test_the_refused_module_is_as_it_was() -> None:
    """No hook, no other class, no buffer, and no place in the orders."""

    def program(rank: int) -> tuple[object, ...]:
        model = build()
        assert isinstance(model, Tied)
        with fsdp_core.fully_shard_context() as context:
            fsdp_core.fully_shard(model.emb, mesh_of(2), SHARDED)
            before = state_of(model.head)
            with pytest.raises(ConfigError, match=re.escape("[first, second]")):
                fsdp_core.fully_shard(model.head, mesh_of(2), SHARDED)
        after = state_of(model.head)
        names = [context.module_name(event.module) for event in context.execution_order]
        return type(model.head), after == before, names

    assert fsdp_sim.simulate(program, 2).results == [(nn.Linear, True, ["", ""])] * 2


@pytest.mark.everywhere
def test_sharding_both_in_one_call_has_parity() -> None:
    """The remedy that the message names."""
    check_values(Training(build, step, (("emb", "head"),), steps=2))


def test_a_refused_call_does_not_spoil_a_later_one() -> None:
    """The same model class, sharded right in a second scope."""

    def program(rank: int) -> None:
        model = build()
        with fsdp_core.fully_shard_context():
            fsdp_core.fully_shard(model.get_submodule("emb"), mesh_of(2), SHARDED)
            with pytest.raises(ConfigError):
                fsdp_core.fully_shard(model, mesh_of(2), SHARDED)
        train_shards(rank, Training(build, step, (("emb", "head"),)))

    fsdp_sim.simulate(program, 2)


def test_the_refused_module_can_be_sharded_once_it_is_untied() -> None:
    """In the same scope: it trains beside the unit that kept the weight."""

    def untie(model: nn.Module) -> None:
        model.get_submodule("head").weight = nn.Parameter(integers(5, 4, start=2))

    def program(rank: int) -> Tensors:
        model = build()
        with fsdp_core.fully_shard_context():
            fsdp_core.fully_shard(model.get_submodule("emb"), mesh_of(2), SHARDED)
            with pytest.raises(ConfigError):
                fsdp_core.fully_shard(model.get_submodule("head"), mesh_of(2), SHARDED)
            untie(model)
            fsdp_core.fully_shard(model.get_submodule("head"), mesh_of(2), SHARDED)
        step(model, rank, 0)
        return local_rows(model, grads=True)

    report = fsdp_sim.simulate(program, 2)

    model = build()
    untie(model)
    for rank in range(2):
        step(model, rank, 0)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= 2
    assert_equal(put_together(report.results), local_rows(model, grads=True))


def test_an_inner_module_that_comes_too_late_is_told_the_order() -> None:
    """No weight is tied here: the unit around it has taken the parameter."""

    def program(rank: int) -> str:
        model = Row("first", "second")
        with fsdp_core.fully_shard_context():
            fsdp_core.fully_shard(model, mesh_of(2), SHARDED)
            with pytest.raises(ConfigError) as caught:
                fsdp_core.fully_shard(model.get_submodule("first"), mesh_of(2), SHARDED)
        return str(caught.value)

    for message in fsdp_sim.simulate(program, 2).results:
        assert "got 'weight' of Linear, which is 'first.weight' of the unit FsdpRow" in message
        assert message.endswith("shard inner modules before those around them")
