"""fully_shard_optimizer: the bits of the unsharded step; what users see; what is refused."""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import fsdp_core
import fsdp_sim
from fsdp_core import ConfigError, MixedPrecisionPolicy, StateError
from tests.cases.programs import (
    ZERO_1,
    Row,
    assert_equal,
    batch,
    fill,
    integers,
    linear,
    local_rows,
    loss_of,
    put_together,
    shard,
)
from tests.core.strategies import mesh_shape, placements_of, reference, whole_by_name, width_of
from tests.core.worlds import device_type, on_ranks, unsharded, world_size

Make = Callable[[Iterable[Any]], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
}


def build() -> nn.Module:
    """Two layers with biases, of which the second has fewer rows than ranks."""
    return fill(nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 1)))


def step(model: nn.Module, rank: int, number: int) -> None:
    """One forward and backward."""
    loss_of(model(batch(rank, number)), rank).backward()


def parts(model: nn.Module) -> list[Any]:
    """Weights and biases as two groups, of which the second has another learning rate."""
    named = list(model.named_parameters())
    return [
        {"params": [each for name, each in named if name.endswith("weight")]},
        {"params": [each for name, each in named if name.endswith("bias")], "lr": 0.5},
    ]


def train(
    make: Make,
    body: Callable[[nn.Module, Optimizer, int, int], Optimizer],
    *,
    steps: int = 3,
    **options: Any,
) -> None:
    """Train sharded and unsharded by the same body, and compare all weights.

    Args:
        make: makes the optimizer from what `parts` gives.
        body: one step of (model, optimizer, rank or -1 for all, number); returns the optimizer.
        steps: how many.
        options: of `shard`.
    """

    def sharded(rank: int) -> dict[str, Tensor | None]:
        model = build()
        shard(model, "0", "1", mesh=(world_size(2),), **options)
        optimizer = fsdp_core.fully_shard_optimizer(make(parts(model)))
        for number in range(steps):
            optimizer = body(model, optimizer, rank, number)
        return local_rows(model)

    def whole() -> dict[str, Tensor | None]:
        model = build()
        optimizer = make(parts(model))
        for number in range(steps):
            optimizer = body(model, optimizer, -1, number)
        return local_rows(model)

    ranks = world_size(2)
    assert_equal(put_together(on_ranks(sharded, ranks), (ranks,)), unsharded(whole))


def backwards(model: nn.Module, rank: int, number: int) -> None:
    """One rank's backward, or those of all, averaged."""
    if rank >= 0:
        step(model, rank, number)
        return
    for each in range(world_size(2)):
        (loss_of(model(batch(each, number)), each) / world_size(2)).backward()


def plain_step(model: nn.Module, optimizer: Optimizer, rank: int, number: int) -> Optimizer:
    """Backward, step, zero_grad."""
    backwards(model, rank, number)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@pytest.mark.everywhere
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_elementwise_optimizer_gives_the_bits_of_the_unsharded_one(name: str) -> None:
    """Two groups with other learning rates, uneven and empty shards, three steps."""
    train(OPTIMIZERS[name], plain_step)


def check_strategy(
    strategy: str, optimizers: Mapping[str, Make], build: Callable[[], nn.Module]
) -> None:
    """Two steps of each optimizer, one after the other, on two ranks for each axis: the same bits."""
    mesh = mesh_shape(strategy)
    mesh = mesh if len(mesh) > 1 else (world_size(2),)
    ranks = torch.Size(mesh).numel()

    def body(rank: int) -> dict[str, dict[str, Tensor | None]]:
        trained = {}
        for name, make in optimizers.items():
            model = build()
            shard(model, "", mesh=mesh, placements=placements_of(strategy))
            optimizer = fsdp_core.fully_shard_optimizer(make(model.parameters()))
            for number in range(2):
                loss_of(model(batch(rank, number, width=width_of(model))), rank).backward()
                optimizer.step()
                optimizer.zero_grad()
            trained[name] = whole_by_name(model)
        return trained

    results = on_ranks(body, ranks)

    for name, make in optimizers.items():
        expected = unsharded(partial(reference, build, ranks, 2, 1, make))
        for trained in results:
            assert_equal({name: None, **trained[name]}, {name: None, **expected})


@pytest.mark.everywhere
@pytest.mark.parametrize("strategy", ["no_shard", "zero_1", "zero_2", "hsdp"])
def test_every_elementwise_optimizer_steps_every_strategy(strategy: str) -> None:
    """Whole weights, shards, and replicas of shards."""
    check_strategy(strategy, OPTIMIZERS, lambda: fill(Row(a=nn.Linear(2, 5), b=nn.Linear(5, 1))))


FUSED: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}


@pytest.mark.everywhere
@pytest.mark.parametrize("strategy", ["no_shard", "zero_1", "zero_2", "zero_3", "hsdp"])
def test_fused_optimizers_give_the_bits_of_the_unsharded_ones(strategy: str) -> None:
    """Where shards are whole vectors: on a CPU fused kernels round what is left of a tensor otherwise."""
    make = dict(FUSED)
    if device_type() == "cuda":
        del make["Adagrad"]  # PyTorch has no fused kernel of it there
    check_strategy(strategy, make, lambda: fill(Row(a=nn.Linear(16, 32), b=nn.Linear(32, 16))))


@pytest.mark.everywhere
@pytest.mark.parametrize("name", ["SGD foreach", "AdamW foreach", "Adagrad"])
def test_whole_weights_follow_updates_that_move_no_version_counter(name: str) -> None:
    """Under ZeRO-1 the weights are gathered once a step, also behind fused and foreach updates."""
    train(OPTIMIZERS[name], plain_step, placements=ZERO_1)


@pytest.mark.everywhere
def test_a_scheduler_made_behind_the_adapter_drives_the_learning_rate() -> None:
    """PyTorch's schedulers wrap `step`; the groups they write are the ones that are stepped."""

    def body(model: nn.Module, optimizer: Optimizer, rank: int, number: int) -> Optimizer:
        if number == 0:
            vars(model)["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        plain_step(model, optimizer, rank, number)
        vars(model)["scheduler"].step()
        return optimizer

    train(OPTIMIZERS["AdamW"], body)


@pytest.mark.everywhere
def test_a_parameter_without_gradient_is_skipped_alone() -> None:
    """Dropping one parameter's gradient splits its run; states go on from where they were."""

    def body(model: nn.Module, optimizer: Optimizer, rank: int, number: int) -> Optimizer:
        backwards(model, rank, number)
        if number == 1:
            model.get_parameter("0.bias").grad = None
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    train(lambda p: torch.optim.AdamW(joined(p), lr=0.1), body, steps=4)


def joined(groups: Iterable[dict[str, Any]]) -> list[nn.Parameter]:
    """All parameters of several groups."""
    return [parameter for group in groups for parameter in group["params"]]


@pytest.mark.everywhere
def test_a_gradient_that_was_replaced_is_the_one_that_counts() -> None:
    """Whoever assigns another tensor means it."""

    def body(model: nn.Module, optimizer: Optimizer, rank: int, number: int) -> Optimizer:
        backwards(model, rank, number)
        weight = model.get_parameter("0.weight")
        assert weight.grad is not None
        weight.grad = weight.grad * 2
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    train(OPTIMIZERS["SGD"], body)


@pytest.mark.everywhere
def test_states_survive_a_round_trip_into_a_new_optimizer() -> None:
    """Loading replaces the whole state; the next step goes on from it."""

    def body(model: nn.Module, optimizer: Optimizer, rank: int, number: int) -> Optimizer:
        plain_step(model, optimizer, rank, number)
        state = deepcopy(optimizer.state_dict())
        fresh = OPTIMIZERS["AdamW"](parts(model))
        if rank >= 0:
            fsdp_core.fully_shard_optimizer(fresh)
        fresh.load_state_dict(state)
        return fresh

    train(OPTIMIZERS["AdamW"], body)


Edit = Callable[[Optimizer, nn.Module], None]


def replace_one(optimizer: Optimizer, model: nn.Module) -> None:
    """Begin the momentum of one of several parameters anew, by another tensor."""
    state = optimizer.state[model.get_parameter("0.weight")]
    state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def count_one_anew(optimizer: Optimizer, model: nn.Module) -> None:
    """Give one parameter a step counter of its own."""
    optimizer.state[model.get_parameter("1.bias")]["step"] = torch.tensor(7.0)


def remove_one(optimizer: Optimizer, model: nn.Module) -> None:
    """Let one of several parameters begin anew."""
    del optimizer.state[model.get_parameter("1.weight")]


EDITS: dict[str, Edit] = {
    "clear": lambda optimizer, model: optimizer.state.clear(),
    "replace": replace_one,
    "count": count_one_anew,
    "remove": remove_one,
    "empty": lambda optimizer, model: optimizer.state[model.get_parameter("0.bias")].clear(),
}


@pytest.mark.everywhere
@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("at", [0, 1])
def test_state_that_users_write_is_what_counts(name: str, at: int) -> None:
    """As without sharding, and from the next step on: what was written, replaced or removed."""

    def body(model: nn.Module, optimizer: Optimizer, rank: int, number: int) -> Optimizer:
        plain_step(model, optimizer, rank, number)
        if number == at:
            EDITS[name](optimizer, model)
        elif number > at:
            assert all(len(optimizer.state[each]) == 3 for each in model.parameters())
        return optimizer

    train(OPTIMIZERS["AdamW"], body, steps=4)


@pytest.mark.everywhere
def test_a_count_of_steps_that_parameters_share_is_not_written_in_place() -> None:
    """Nobody knows for which of them; another tensor for one counts for that one."""

    def body(rank: int) -> tuple[str, list[float]]:
        model = fill(nn.Linear(4, 4))
        shard(model, "")
        optimizer = fsdp_core.fully_shard_optimizer(torch.optim.Adam(model.parameters(), lr=1.0))
        weight, bias = model.parameters()
        for number in range(2):
            loss_of(model(batch(rank, number, width=4)), rank).backward()
            optimizer.step()
        optimizer.state[weight]["step"].zero_()
        before = local_rows(model)
        with pytest.raises(StateError) as caught:
            optimizer.step()
        assert_equal(local_rows(model), before)
        optimizer.state[weight]["step"] = torch.tensor(0.0)
        optimizer.state[bias]["step"] = torch.tensor(2.0)
        optimizer.step()
        optimizer.state[weight]["step"].zero_()  # its own by now
        optimizer.step()
        return str(caught.value), [optimizer.state[each]["step"].item() for each in (weight, bias)]

    message = (
        "the state 'step' that parameters share must not be written in place, got a write of that of "
        "['weight', 'bias']; assign another tensor to optimizer.state[parameter]['step'] of each that "
        "you mean"
    )
    assert on_ranks(body, 2) == [(message, [1.0, 4.0])] * 2


@pytest.mark.everywhere
def test_state_written_before_the_first_step_counts() -> None:
    """A warm start of the momentum."""

    def body(model: nn.Module, optimizer: Optimizer, rank: int, number: int) -> Optimizer:
        if number == 0:
            for each in model.parameters():
                optimizer.state[each]["momentum_buffer"] = torch.ones_like(each.detach())
        return plain_step(model, optimizer, rank, number)

    train(OPTIMIZERS["SGD"], body)


def test_state_of_other_rows_is_refused_and_leaves_everything_as_it_was() -> None:
    """A whole tensor, which would be taken for something that is not spread over elements."""

    def program(rank: int) -> str:
        model = build()
        shard(model, "0", "1")
        optimizer = fsdp_core.fully_shard_optimizer(OPTIMIZERS["AdamW"](model.parameters()))
        step(model, rank, 0)
        optimizer.step()
        state = optimizer.state[model.get_parameter("0.weight")]
        right = state["exp_avg"]
        state["exp_avg"] = torch.zeros(5, 2)
        before = local_rows(model)
        with pytest.raises(StateError) as caught:
            optimizer.step()
        assert_equal(local_rows(model), before)
        state["exp_avg"] = right
        optimizer.step()
        return str(caught.value)

    rows = [4, 1]
    assert fsdp_sim.simulate(program, 2).results == [
        "the state 'exp_avg' of parameter 'weight' must be a DTensor of the rows that this rank "
        f"holds, ({each}, 2), got a Tensor of (5, 2) here; make it with "
        "torch.zeros_like(parameter), say"
        for each in rows
    ]


@pytest.mark.everywhere
def test_state_that_was_there_before_the_first_step_becomes_whole_where_a_rank_has_no_rows() -> (
    None
):
    """Adagrad makes its own when it is built; every rank must ask the same of the others."""

    def body(rank: int) -> Tensor:
        model = linear(1, 2)
        shard(model, "", mesh=(2,))
        adagrad = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=2.0)
        optimizer = fsdp_core.fully_shard_optimizer(adagrad)
        model(torch.tensor([[1.0, 3.0]])).sum().backward()
        optimizer.step()
        whole: Tensor = optimizer.state[model.weight]["sum"].full_tensor()
        return whole

    for whole in on_ranks(body, 2):
        assert torch.equal(whole, torch.tensor([[3.0, 11.0]]))


@pytest.mark.everywhere
def test_state_that_is_there_before_the_first_step_is_whole_already() -> None:
    """A loop that skips its first step, or looks at the state before it."""

    def body(_rank: int) -> Tensor:
        model = nn.Linear(2, 3)
        shard(model, "", mesh=(2,))
        adagrad = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=2.0)
        optimizer = fsdp_core.fully_shard_optimizer(adagrad)
        state = [optimizer.state[each]["sum"] for each in (model.weight, model.bias)]
        return torch.cat([each.full_tensor().flatten() for each in state])

    for whole in on_ranks(body, 2):
        assert torch.equal(whole, torch.full((9,), 2.0))


@pytest.mark.everywhere
def test_groups_may_be_added_later() -> None:
    """Parameters of a new group are stepped from then on."""

    def body(model: nn.Module, optimizer: Optimizer, rank: int, number: int) -> Optimizer:
        if number == 1:
            optimizer.add_param_group({"params": list(model.get_submodule("1").parameters())})
        return plain_step(model, optimizer, rank, number)

    train(lambda p: torch.optim.AdamW(joined(p)[0::2][:1] + joined(p)[2:3], lr=0.1), body)


@pytest.mark.everywhere
@pytest.mark.parametrize("precision_aware", [True, False])
def test_gradients_of_another_dtype_are_cast_or_handed_on(*, precision_aware: bool) -> None:
    """An optimizer that is aware of precisions gets them as they are, so its momentum is bf16 too.

    Any other gets them in the weights' dtype. Both have the bits of the unsharded optimizer that is
    given the same; bf16 rounds the factor of 257, so the two differ.
    """
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16)
    handed = torch.bfloat16 if precision_aware else torch.float32
    ranks = world_size(2)

    def gradient(model: nn.Module, rank: int, number: int) -> None:
        (loss_of(model(batch(rank, number)), rank) * 257).backward()

    def make(parameters: Iterable[Any]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=1.0, momentum=0.75, foreach=False)

    def body(rank: int) -> tuple[torch.dtype, dict[str, Tensor | None]]:
        shard(model := fill(linear()), "", mesh=(ranks,), mixed_precision_policy=policy)
        optimizer = make(model.parameters())
        fsdp_core.fully_shard_optimizer(optimizer, precision_aware=precision_aware)
        for number in range(3):
            gradient(model, rank, number)
            optimizer.step()
            optimizer.zero_grad()
        momentum = optimizer.state[model.get_parameter("weight")]["momentum_buffer"]
        return momentum.dtype, local_rows(model)

    def whole() -> dict[str, Tensor | None]:
        model = fill(linear())
        weight = model.get_parameter("weight")
        optimizer = make([weight])
        for number in range(3):
            for rank in range(ranks):
                gradient(model, rank, number)
            assert weight.grad is not None
            main_grad = (weight.grad / ranks).bfloat16().to(handed)
            weight.grad = None
            weight.grad_dtype = handed
            weight.grad = main_grad
            optimizer.step()
            weight.grad = None
            weight.grad_dtype = torch.float32
        return local_rows(model)

    results = on_ranks(body, ranks)

    assert [dtype for dtype, _ in results] == [handed] * ranks
    assert_equal(put_together([rows for _, rows in results], (ranks,)), unsharded(whole))


MIXED = MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16, compute_dtype=torch.bfloat16)


def test_adam_that_was_not_adapted_takes_no_gradients_of_another_dtype() -> None:
    """PyTorch refuses them; `fully_shard_optimizer` casts them."""

    def body(rank: int) -> None:
        shard(model := fill(linear()), "", mixed_precision_policy=MIXED)
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        loss_of(model(batch(rank).bfloat16()).float(), rank).backward()
        with pytest.raises(RuntimeError, match=r"same dtype|expected scalar type Float"):
            optimizer.step()
        fsdp_core.fully_shard_optimizer(optimizer)
        optimizer.step()

    on_ranks(body, 2)


@pytest.mark.everywhere
def test_adam_on_bf16_compute_follows_the_unsharded_run_in_fp32() -> None:
    """Ten steps of a regression: each loss within 3e-3 of that of the run without sharding."""
    ranks = world_size(2)

    def losses(model: nn.Module, rank: int, dtype: torch.dtype) -> list[float]:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        if dtype is torch.bfloat16:
            fsdp_core.fully_shard_optimizer(optimizer)
        x = torch.linspace(-1, 1, 32).view(8, 4)  # the same on all ranks
        seen = []
        for _ in range(10):
            loss = (model(x.to(dtype)).float() - x.mean(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    def network() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(integers(*parameter.shape) / 16)
        return model

    def body(rank: int) -> list[float]:
        model = network()
        policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
        shard(model, "0", "2", "", mesh=(ranks,), mixed_precision_policy=policy)
        return losses(model, rank, torch.bfloat16)

    expected = unsharded(lambda: losses(network(), 0, torch.float32))
    assert expected[-1] < expected[0] - 0.01
    for seen in on_ranks(body, ranks):
        assert seen == pytest.approx(expected, abs=3e-3, rel=0)


@pytest.mark.everywhere
def test_at_rest_groups_and_state_hold_sharded_parameters() -> None:
    """Before, between and behind steps: DTensors of the global shape; scalars as they are."""

    def body(rank: int) -> None:
        shard(model := build(), "0", "1")
        before = list(model.parameters())
        optimizer = torch.optim.AdamW(before)
        fsdp_core.fully_shard_optimizer(optimizer)
        shown: list[Any] = []
        for number in range(2):
            step(model, rank, number)
            optimizer.step()
            shown.append({id(p): optimizer.state[p]["exp_avg"] for p in before})
            optimizer.zero_grad()
        assert optimizer.param_groups[0]["params"] == before or all(
            mine is theirs
            for mine, theirs in zip(optimizer.param_groups[0]["params"], before, strict=True)
        )
        for parameter in before:
            state = optimizer.state[parameter]
            assert isinstance(state["exp_avg"], DTensor)
            assert state["exp_avg"].shape == parameter.shape
            assert state["step"].item() == 2
        assert all(shown[0][key] is shown[1][key] for key in shown[0])

    on_ranks(body, 2)


@pytest.mark.everywhere
def test_a_step_that_raises_leaves_everything_as_it_was() -> None:
    """Groups and state are put back, and the next step has parity."""

    class Fails(torch.optim.SGD):
        """Raises once."""

        fail = True

        def step(self, closure: Any = None) -> Any:
            """Raise, or step."""
            if self.fail:
                self.fail = False
                raise RuntimeError("planned")
            return super().step(closure)

    def body(rank: int) -> dict[str, Tensor | None]:
        shard(model := fill(linear()), "", mesh=(world_size(2),))
        optimizer = Fails(model.parameters(), lr=1.0)
        fsdp_core.fully_shard_optimizer(optimizer, elementwise=True)
        held = optimizer.param_groups[0]["params"]
        step(model, rank, 0)
        with pytest.raises(RuntimeError, match=r"^planned$"):
            optimizer.step()
        assert optimizer.param_groups[0]["params"] is held
        optimizer.step()
        return local_rows(model)

    check_one_step(on_ranks(body, world_size(2)), 0)


def check_one_step(ranks: list[dict[str, Tensor | None]], number: int) -> None:
    """Check the rows of one layer against an unsharded step of SGD on the batches of `number`."""

    def whole() -> dict[str, Tensor | None]:
        model = fill(linear())
        backwards(model, -1, number)
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        return local_rows(model)

    assert_equal(put_together(ranks, (len(ranks),)), unsharded(whole))


@pytest.mark.everywhere
def test_a_gradient_of_other_rows_is_refused_and_leaves_everything_as_it_was() -> None:
    """PyTorch lets a user assign the whole gradient; the step names the rows that it must have."""

    def body(rank: int) -> str:
        shard(model := fill(linear()), "")
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        fsdp_core.fully_shard_optimizer(optimizer)
        held = optimizer.param_groups[0]["params"]
        step(model, rank, 0)
        next(model.parameters()).grad = torch.ones(2, 2)
        with pytest.raises(StateError) as caught:
            optimizer.step()
        assert optimizer.param_groups[0]["params"] is held
        return str(caught.value)

    message = (
        "the gradient of parameter 'weight' must be a DTensor of the rows that this rank holds, "
        "(1, 2), got a Tensor of (2, 2) here; make it with torch.zeros_like(parameter), say"
    )
    assert on_ranks(body, 2) == [message] * 2


@pytest.mark.everywhere
def test_units_that_did_not_run_are_not_stepped() -> None:
    """No gradient, no state, no weight decay: as PyTorch does without sharding."""

    def body(model: nn.Module, optimizer: Optimizer, rank: int, number: int) -> Optimizer:
        ranks = (rank,) if rank >= 0 else range(world_size(2))
        for each in ranks:
            y = model.get_submodule("1")(integers(1, 5, start=each + number))
            (loss_of(y, each) / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    train(OPTIMIZERS["SGD"], body)


# ---------------------------------------------------------------------- refusals


def refused(make: Make, message: str, **options: Any) -> None:
    """Check that an optimizer is refused with a message that begins so."""

    def body() -> None:
        shard(model := fill(linear()), "", mesh=(1,))
        with pytest.raises(ConfigError) as caught:
            fsdp_core.fully_shard_optimizer(make(model.parameters()), **options)
        assert str(caught.value).startswith(message)

    on_ranks(lambda _rank: body(), 1)


class Unknown(torch.optim.SGD):
    """An optimizer that nobody vouches for."""


@pytest.mark.everywhere
@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (torch.optim.Adafactor, "Adafactor: its update of an element depends on the whole tensor"),
        (torch.optim.Muon, "Muon: its update of an element depends on the whole matrix; use F"),
        (torch.optim.LBFGS, "LBFGS: it calls the model back during a step; use AdamW"),
        (torch.optim.SparseAdam, "SparseAdam: it needs sparse gradients"),
        (Unknown, "Unknown; if it does, pass elementwise=True"),
    ],
)
def test_optimizers_that_look_at_more_than_an_element_are_refused(make: Make, advice: str) -> None:
    """By name, with what to use instead."""
    refused(make, f"an optimizer of shards must update each element by itself, got {advice}")


@pytest.mark.everywhere
def test_an_unknown_optimizer_may_be_vouched_for() -> None:
    """With elementwise=True its steps have parity."""

    def body(rank: int) -> dict[str, Tensor | None]:
        shard(model := fill(linear()), "", mesh=(world_size(2),))
        optimizer = Unknown(model.parameters(), lr=1.0)
        fsdp_core.fully_shard_optimizer(optimizer, elementwise=True)
        step(model, rank, 0)
        optimizer.step()
        return local_rows(model)

    check_one_step(on_ranks(body, world_size(2)), 0)


@pytest.mark.everywhere
def test_an_optimizer_is_adapted_once() -> None:
    """A second time would adapt the adapter."""

    def body() -> None:
        shard(model := fill(linear()), "", mesh=(1,))
        optimizer = torch.optim.SGD(model.parameters())
        fsdp_core.fully_shard_optimizer(optimizer)
        with pytest.raises(ConfigError, match=r"^an optimizer is made sharded once, got a SGD"):
            fsdp_core.fully_shard_optimizer(optimizer)

    on_ranks(lambda _rank: body(), 1)


@pytest.mark.everywhere
def test_a_closure_is_refused() -> None:
    """Its gradients would come inside the step."""

    def body() -> None:
        shard(model := fill(linear()), "", mesh=(1,))
        optimizer = torch.optim.SGD(model.parameters())
        fsdp_core.fully_shard_optimizer(optimizer)
        with pytest.raises(NotImplementedError, match=r"^step must be called without a closure"):
            optimizer.step(lambda: 0.0)

    on_ranks(lambda _rank: body(), 1)


@pytest.mark.everywhere
def test_parameters_of_no_unit_are_refused() -> None:
    """Nobody would reduce their gradients; the error says where the first one is."""

    def body() -> None:
        shard(model := fill(Row("a", "b")), "a", mesh=(1,))
        with pytest.raises(
            ConfigError, match=r"in param_groups\[0\], number 1, that belongs to no"
        ):
            fsdp_core.fully_shard_optimizer(torch.optim.SGD(model.parameters()))

    on_ranks(lambda _rank: body(), 1)


@pytest.mark.everywhere
def test_a_parameter_that_was_added_to_a_sharded_model_is_refused() -> None:
    """By an optimizer that nobody adapted, once it has a gradient that no rank reduces."""

    def body(rank: int) -> None:
        shard(model := fill(Row("a", "b")), "a", "")
        model.get_submodule("a").register_parameter("scale", nn.Parameter(torch.ones(2)))
        scale = model.get_parameter("a.scale")
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = local_rows(model)
        step(model, rank, 0)
        optimizer.step()
        assert not torch.equal(before["a.weight"], local_rows(model)["a.weight"])  # type: ignore[arg-type]

        scale.grad = torch.ones(2)
        with pytest.raises(ConfigError) as caught:
            optimizer.step()
        assert caught.value.fqn == "a.scale"
        assert str(caught.value) == (
            "a parameter of a sharded model must be there when it is sharded, got a gradient for "
            "'a.scale', which was added later, so ranks do not reduce it; add it before fully_shard"
        )
        assert torch.equal(scale, torch.ones(2))

    on_ranks(body, 2)


@pytest.mark.everywhere
def test_a_parameter_beside_the_sharded_model_is_the_callers() -> None:
    """Whoever leaves a module out of every unit reduces its gradients by other means."""

    def body(rank: int) -> None:
        shard(model := fill(Row("a", "b")), "a")
        # PyTorch's foreach kernels, its default on a GPU, take no DTensors beside tensors.
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)
        step(model, rank, 0)
        before = model.get_parameter("b.weight").detach().clone()
        optimizer.step()
        assert not torch.equal(model.get_parameter("b.weight"), before)

    on_ranks(body, 2)


@pytest.mark.everywhere
def test_a_step_before_the_last_microbatch_is_refused() -> None:
    """Under ZeRO-1 the gradients are not reduced yet."""

    def body(rank: int) -> None:
        context = shard(model := fill(linear()), "", placements=ZERO_1)
        optimizer = torch.optim.SGD(model.parameters())
        fsdp_core.fully_shard_optimizer(optimizer)
        with fsdp_core.microbatch(context, is_last=False):
            step(model, rank, 0)
        with pytest.raises(RuntimeError, match=r"got none from a last microbatch"):
            optimizer.step()

    on_ranks(body, 2)


@pytest.mark.everywhere
def test_a_step_waits_for_gathers_that_still_read_the_weights() -> None:
    """A forward whose backward never came leaves a prefetch that nobody used in flight."""

    def body(rank: int) -> None:
        shard(model := fill(Row("a", "b", "c")), "a", "b", "c", "")
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        fsdp_core.fully_shard_optimizer(optimizer)
        step(model, rank, 0)
        model(batch(rank), calls=("a", "b"))
        optimizer.step()

    on_ranks(body, 2)
