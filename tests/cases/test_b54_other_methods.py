"""B54: a method other than forward gathers the weights if it is registered, and is refused if not."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_core
import fsdp_sim
from fsdp_core import ConfigError, StateError
from fsdp_core.errors import UnsupportedError
from fsdp_sim.program.model import fold
from tests.cases.programs import (
    Training,
    assert_resting,
    batch,
    check_parity,
    check_values,
    fill,
    gathered,
    integers,
    linear,
    loss_of,
    ops_by_step,
    shard,
)


class Encoder(nn.Module):
    """Has two entry points."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.scale = nn.Parameter(integers(2))

    def forward(self, x: Tensor) -> Tensor:
        """Encode twice."""
        return self.encode(self.encode(x))

    def encode(self, x: Tensor, *, shift: int = 0) -> Tensor:
        """Use both weights."""
        return fold(self.inner(x) * self.scale + shift)

    def looked_up(self, ids: Tensor) -> Tensor:
        """Rows of a weight."""
        return self.inner.weight[ids]


def build() -> nn.Module:
    """A model around the encoder."""
    return fill(nn.ModuleDict({"encoder": Encoder(), "head": linear()}))


def by_encode(model: nn.Module, rank: int, number: int) -> None:
    """Enter through `encode`, a method of the unit."""
    encoder, head = model.get_submodule("encoder"), model.get_submodule("head")
    if hasattr(encoder, "context") and number == 0:
        fsdp_core.register_forward_method(encoder, "encode")
    y = head(encoder.encode(batch(rank, number), shift=1))  # type: ignore[operator]
    loss_of(y, rank).backward()


def test_a_registered_method_gathers_once_rests_and_trains() -> None:
    """pytorch#125394, #100069: as forward does."""
    report = check_parity(Training(build, by_encode, ("encoder", "head"), steps=2))

    for ops in ops_by_step(report):
        assert [name for name in gathered(ops) if "encoder" in name or "root 0" in name] == [
            "<root> (root 0)"
        ] * 2


def by_forward(model: nn.Module, rank: int, number: int) -> None:
    """Enter through `forward`, which calls a method that was registered."""
    encoder, head = model.get_submodule("encoder"), model.get_submodule("head")
    if hasattr(encoder, "context") and number == 0:
        fsdp_core.register_forward_method(encoder, "encode")
    loss_of(head(encoder(batch(rank, number))), rank).backward()


@pytest.mark.everywhere
def test_a_forward_may_call_a_registered_method_of_its_own_module() -> None:
    """It finds the weights as they are: no second entry."""
    check_values(Training(build, by_forward, ("encoder", "head"), steps=2))


def test_a_registered_method_leaves_the_unit_resting() -> None:
    """Without gradients at once."""

    def program(rank: int) -> Tensor:
        model = build()
        shard(model, "encoder", "head", "")
        encoder = model.get_submodule("encoder")
        fsdp_core.register_forward_method(encoder, "encode")
        with torch.no_grad():
            y = encoder.encode(batch(0))  # type: ignore[operator]
        assert_resting(model)
        return y

    expected = build().get_submodule("encoder").encode(batch(0))  # type: ignore[operator]
    assert all(torch.equal(y, expected) for y in fsdp_sim.simulate(program, 2).results)


@pytest.mark.parametrize(
    ("method", "argument"), [("encode", batch(0)), ("looked_up", torch.tensor([0, 1]))]
)
def test_an_unregistered_method_is_refused_by_name(method: str, argument: Tensor) -> None:
    """pytorch#109385, #123962: never numbers from a shard."""

    def program(rank: int) -> None:
        model = build()
        shard(model, "encoder", "head", "")
        message = (
            f"a method that uses sharded parameters must be registered, got FsdpEncoder.{method} "
            f"of unit 'encoder'; call register_forward_method(module, {method!r}) once"
        )
        with pytest.raises(StateError) as caught:
            getattr(model.get_submodule("encoder"), method)(argument)
        assert str(caught.value) == message

    fsdp_sim.simulate(program, 2)


class Borrowing(nn.Module):
    """Uses the weight of a layer without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        """Multiply twice."""
        y: Tensor = self.layer(x) @ self.layer.weight.T
        return y


def test_a_forward_that_borrows_the_weight_of_another_unit_is_told_what_to_do() -> None:
    """PyTorch's error speaks of operators; a note says which unit is meant, and two ways out."""

    def program(rank: int) -> list[str]:
        model = nn.ModuleDict({"borrowing": Borrowing()})
        shard(model, "borrowing.layer", "borrowing", "")
        with pytest.raises(RuntimeError, match="mixed") as caught:
            model["borrowing"](batch(rank))
        return caught.value.__notes__

    note = (
        "the forward of unit 'borrowing' must use full weights, got sharded ones: those of another "
        "unit, which has them full in its own forward alone; shard both modules in one call, "
        "fully_shard([first, second], ...), or call the other one"
    )
    assert fsdp_sim.simulate(program, 2).results == [[note]] * 2


@pytest.mark.everywhere
def test_borrowing_inside_one_unit_of_both_has_parity() -> None:
    """As the note says."""

    def step(model: nn.Module, rank: int, number: int) -> None:
        loss_of(model(batch(rank, number)), rank).backward()

    check_values(Training(lambda: fill(Borrowing()), step, (("", "layer"),), steps=2))


def of_the_shards(parameter: Any) -> Tensor:
    """A term of the loss from a sharded parameter, by DTensor's own operators."""
    return (parameter * parameter).sum().full_tensor()


def of_the_whole(parameter: Any) -> Tensor:
    """The same, from the whole parameter."""
    return parameter.full_tensor().square().sum()


@pytest.mark.parametrize("term", [of_the_shards, of_the_whole])
def test_a_loss_of_sharded_parameters_is_refused_by_name(term: Callable[[Any], Tensor]) -> None:
    """Its gradient would be lost, or written under the reduction; the message has two ways out."""

    def program(rank: int) -> str:
        model = build()
        context = shard(model, "encoder")
        encoder = model.get_submodule("encoder")
        loss = loss_of(encoder(batch(rank)), rank)
        with pytest.raises(UnsupportedError) as caught:
            (loss + term(encoder.get_submodule("inner").weight)).backward()
        context.reset()
        # PyTorch lets go of the graph of a backward that raised when the next one runs.
        loss_of(encoder(batch(rank)), rank).backward()
        return str(caught.value)

    of_unit = " of unit '<root>'" if term is of_the_shards else ""
    message = (
        f"a loss must be computed from full parameters, got a gradient for the sharded "
        f"'inner.weight'{of_unit}; compute its term inside the unit's forward, or use the "
        f"optimizer's weight_decay"
    )
    assert fsdp_sim.simulate(program, 2).results == [message] * 2


def test_a_norm_of_sharded_parameters_may_be_looked_at() -> None:
    """Nothing is refused where no backward comes through."""

    def program(rank: int) -> tuple[float, float]:
        model = build()
        shard(model, "encoder", "head", "")
        weight = model.get_submodule("encoder.inner").weight
        return of_the_shards(weight).item(), of_the_whole(weight).item()

    weight: Any = build().get_submodule("encoder.inner").weight
    expected = weight.square().sum().item()
    assert fsdp_sim.simulate(program, 2).results == [(expected, expected)] * 2


def test_registering_what_does_not_exist_is_refused() -> None:
    """With the class and the name."""

    def program(rank: int) -> None:
        model = build()
        shard(model, "encoder")
        with pytest.raises(ConfigError, match="got FsdpEncoder and 'generate'"):
            fsdp_core.register_forward_method(model.get_submodule("encoder"), "generate")

    fsdp_sim.simulate(program, 2)


def test_a_generator_cannot_gather_for_its_body() -> None:
    """It returns before its body runs, when the weights are sharded again."""

    class Sampler(nn.Linear):
        def sample(self, x: Tensor) -> Iterator[Tensor]:
            """Yield one result after the other."""
            yield self(x)

    def program(_rank: int) -> str:
        model = Sampler(2, 2)
        shard(model, "")
        with pytest.raises(ConfigError) as caught:
            fsdp_core.register_forward_method(model, "sample")
        return str(caught.value)

    message = (
        "a method that gathers weights must have used them when it returns, got the generator or "
        "coroutine 'sample'; register the method that it calls for each of its results"
    )
    assert fsdp_sim.simulate(program, 2).results == [message] * 2


def test_what_is_no_method_of_the_class_is_refused() -> None:
    """Functions of one module, static and class methods: nothing would be gathered for the module."""

    class Kinds(nn.Linear):
        @staticmethod
        def static(x: Tensor) -> Tensor:
            """Take no module."""
            return x

        @classmethod
        def of_class(cls, x: Tensor) -> Tensor:
            """Take the class."""
            return x

        def replaced(self, x: Tensor) -> Tensor:
            """Be hidden by a function of one module."""
            return x

    names = ("static", "of_class", "replaced", "own", "child")

    def program(_rank: int) -> list[str]:
        model: Any = Kinds(2, 2)
        model.replaced = model.own = lambda x: x @ model.weight
        model.child = nn.Identity()
        shard(model, "")
        messages = []
        for name in names:
            with pytest.raises(ConfigError) as caught:
                fsdp_core.register_forward_method(model, name)
            messages.append(str(caught.value))
        return messages

    expected = [
        f"register_forward_method needs a method that the module's class defines with `def` and that "
        f"takes self, got {name!r} of FsdpKinds, which is another kind of attribute; register one that "
        f"calls it"
        for name in names
    ]
    assert fsdp_sim.simulate(program, 2).results == [expected] * 2


def test_a_method_may_be_registered_twice() -> None:
    """The second call changes nothing."""

    def program(_rank: int) -> float:
        model: Any = build().get_submodule("encoder")
        shard(model, "")
        for _ in range(2):
            fsdp_core.register_forward_method(model, "encode")
        y: Tensor = model.encode(torch.ones(1, 2))
        return y.sum().item()

    assert len(set(fsdp_sim.simulate(program, 2).results)) == 1
