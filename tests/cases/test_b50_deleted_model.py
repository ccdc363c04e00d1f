"""B50: a model that was deleted leaves no memory behind, without a garbage collection."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_core
import fsdp_sim
from fsdp_core import FsdpContext, FsdpModule, StateError
from fsdp_sim.op import Kind
from tests.cases.programs import Row, batch, fill, loss_of, shard, units_in

KEPT: list[Any] = []
"""What a leaking program keeps."""


def trained() -> tuple[nn.Module, torch.optim.Optimizer, FsdpContext]:
    """A model after one step."""
    model = fill(Row("a", "b"))
    context = shard(model, "a", "b", "")
    optimizer = fsdp_core.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    loss_of(model(batch(0)), 0).backward()
    optimizer.step()
    return model, optimizer, context


def things_of(model: nn.Module) -> list[Any]:
    """Modules, units, parameter groups and their buffers."""
    units = [module.fsdp_unit for module in units_in(model)]
    groups = [group for unit in units for group in unit.groups]
    buffers = [group.main_weight.flat for group in groups]
    return [*model.modules(), *units, *groups, *buffers, *model.parameters()]


def test_everything_is_gone_at_once() -> None:
    """NVIDIA/Megatron-LM#6230, pytorch#182774: no cycle waits for a collection."""

    def program(rank: int) -> None:
        assert not gc.isenabled()
        model, optimizer, context = trained()
        things = [weakref.ref(each) for each in things_of(model)]
        del model, optimizer

        assert [each() for each in things if each() is not None] == []
        assert list(context._tree.roots) == []
        assert list(context._tree.names) == []
        assert list(context.execution_order) == []

    fsdp_sim.simulate(program, 2)


def test_all_device_memory_is_given_back() -> None:
    """Every block that the program took is freed before it ends, though the context lives."""

    def program(rank: int) -> FsdpContext:
        return trained()[2]

    report = fsdp_sim.simulate(program, 2, trace=True)

    live: dict[tuple[int, int], int] = {}
    for op in report.trace.all_ops():
        if op.kind is Kind.ALLOC:
            live[op.rank, op.other] = op.nbytes
        elif op.kind is Kind.FREE:
            del live[op.rank, op.other]
    assert live == {}


def test_an_optimizer_that_outlives_its_model_says_so_at_its_step() -> None:
    """With a parameter's name; its weights are used by nobody any more."""

    def program(rank: int) -> str:
        model, optimizer, _ = trained()
        del model
        with pytest.raises(StateError) as caught:
            optimizer.step()
        return str(caught.value)

    message = (
        "the model of parameter 'weight' must be alive, got one that was deleted; keep a reference "
        "to it, or build another optimizer"
    )
    assert fsdp_sim.simulate(program, 2).results == [message] * 2


@pytest.mark.parametrize("use", ["microbatch", "post_backward"])
def test_a_context_that_outlives_its_model_says_so(use: str) -> None:
    """Its calls would do nothing, and look as if they had."""

    def program(_rank: int) -> None:
        context = trained()[2]
        scope = fsdp_core.microbatch(context, is_last=True)
        call = scope.__enter__ if use == "microbatch" else context.post_backward
        with pytest.raises(StateError, match=r"^a context must not be used when its model is gone"):
            call()

    fsdp_sim.simulate(program, 2)


def test_a_parametrized_model_is_gone_when_garbage_is_collected() -> None:
    """PyTorch gives it a class of its own, which holds it; nothing else may hold that class."""

    def program(rank: int) -> None:
        model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
        shard(model, "0", "")

    fsdp_sim.simulate(program, 2)


def test_the_simulator_names_what_a_program_leaves_behind() -> None:
    """The check that all programs get: memory that outlives them and that no result holds."""

    def program(rank: int) -> None:
        model, _, _ = trained()
        module = model.get_submodule("a")
        assert isinstance(module, FsdpModule)
        KEPT.append(module.fsdp_unit.groups[0].main_weight.flat)

    with pytest.raises(fsdp_sim.Leak, match="still allocated though the program has ended"):
        fsdp_sim.simulate(program, 2)
    KEPT.clear()
