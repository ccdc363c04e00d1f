"""B16: `module.weight` is one of two objects, by the state of its unit."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp_sim
from fsdp_core import SchedulePolicy
from fsdp_core.weights import Weights
from tests.cases.programs import batch, fill, linear, loss_of, shard

Look = tuple[str, tuple[int, ...], int, list[str]]


def look(module: nn.Module) -> Look:
    """Kind, shape and identity of the registered weight, and the names of the parameters."""
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    kind = "sharded" if isinstance(weight, DTensor) else "full"
    return kind, tuple(weight.shape), id(weight), [name for name, _ in module.named_parameters()]


def looks(rank: int, reshard: bool) -> list[list[Look]]:
    """What is registered before, in and after the forward, and after the backward, in three steps."""
    module = fill(linear(4, 2))
    shard(module, "", schedule_policy=SchedulePolicy(reshard_after_forward=reshard))
    inside: list[Look] = []
    module.register_forward_pre_hook(lambda each, _args: inside.append(look(each)))
    steps = []
    for number in range(3):
        inside.clear()
        before = look(module)
        loss = loss_of(module(batch(rank, number)), rank)
        after_forward = look(module)
        loss.backward()
        steps.append([before, inside[0], after_forward, look(module)])
    return steps


@pytest.mark.parametrize(
    ("reshard", "kinds"),
    [
        (True, ["sharded", "full", "sharded", "sharded"]),
        (False, ["sharded", "full", "full", "sharded"]),
    ],
)
def test_the_registered_weight_follows_the_state_of_its_unit(
    reshard: bool, kinds: list[str]
) -> None:
    """pytorch#144289, #131965: the table of docs/cases.md."""
    for steps in fsdp_sim.simulate(looks, 2, args=(reshard,)).results:
        for step in steps:
            assert [kind for kind, _, _, _ in step] == kinds


@pytest.mark.parametrize("reshard", [True, False])
def test_there_are_two_objects_ever_of_one_shape_and_under_one_name(reshard: bool) -> None:
    """The same two in each step, so that whoever holds one sees every change."""
    for steps in fsdp_sim.simulate(looks, 2, args=(reshard,)).results:
        seen = [each for step in steps for each in step]
        identities = {kind: identity for kind, _, identity, _ in seen}
        assert all(identities[kind] == identity for kind, _, identity, _ in seen)
        assert identities["sharded"] != identities["full"]
        assert {shape for _, shape, _, _ in seen} == {(4, 2)}
        assert all(names == ["weight"] for _, _, _, names in seen)


def test_backward_registers_the_full_weight_that_forward_used() -> None:
    """Seen by a hook of the unit's output, at which backward enters it."""

    def program(rank: int) -> tuple[list[Look], Look]:
        module = fill(linear(4, 2))
        shard(module, "")
        seen: list[Look] = []
        module.register_forward_pre_hook(lambda each, _args: seen.append(look(each)))
        y = module(batch(rank))
        y.grad_fn.register_hook(lambda *_: seen.append(look(module)))
        loss_of(y, rank).backward()
        return seen, look(module)

    for (in_forward, in_backward), after in fsdp_sim.simulate(program, 2).results:
        assert in_forward == in_backward
        assert [in_backward[0], after[0]] == ["full", "sharded"]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_that_lists_its_weights_a_second_time_uses_the_full_ones(device: str) -> None:
    """Recurrent modules do, also behind a conversion of the model that changes nothing."""

    def build(device: str) -> nn.LSTM:
        torch.manual_seed(0)
        return nn.LSTM(2, 2, device=device)

    def program(rank: int) -> list[torch.Tensor]:
        module = build(device)
        torch.manual_seed(0)
        shard(module, "")
        outputs = []
        for _ in range(2):
            y = module(batch(rank))[0]
            y.sum().backward()
            outputs.append(y.detach())
            module.to("cpu").float()
        return outputs

    for rank, outputs in enumerate(fsdp_sim.simulate(program, 2).results):
        expected = build("cpu")(batch(rank))[0]
        assert all(torch.equal(each, expected) for each in outputs)


def test_a_full_weight_that_stays_registered_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect planted: resharding frees the full weight and leaves it in the module."""
    monkeypatch.setattr(Weights, "_register_sharded", lambda _: None)

    for steps in fsdp_sim.simulate(looks, 2, args=(True,)).results:
        kinds = [kind for step in steps for kind, _, _, _ in step]
        assert kinds == ["sharded"] + ["full"] * 11
