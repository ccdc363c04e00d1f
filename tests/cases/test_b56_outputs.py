"""B56: whatever a unit returns its gradients are right, and it comes out as it went in."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fsdp_core import SchedulePolicy, StateError, hooks
from fsdp_core.hooks import CONTAINER_PARTS_MAX
from fsdp_sim.program.model import fold
from tests.cases.programs import (
    ZERO_1,
    Row,
    Training,
    assert_resting,
    batch,
    check_parity,
    check_values,
    fill,
    linear,
    loss_of,
    shard,
)
from tests.core.worlds import on_ranks, world_size


@dataclass
class Plain:
    y: Tensor
    note: str = "kept"


@dataclass(frozen=True)
class Frozen:
    y: Tensor
    more: tuple[Any, ...] = (None, 3)


class Named(NamedTuple):
    y: Tensor
    number: int


class Custom:
    """A class that no walk over containers knows."""

    def __init__(self, y: Tensor) -> None:
        self.inside = {"deep": [y]}


class Attributed(dict[str, int]):
    """A dict that has something else beside its items."""

    def __init__(self, y: Tensor) -> None:
        super().__init__(number=3)
        self.y = y


class Cyclic:
    """Refers to itself in many ways."""

    def __init__(self, y: Tensor) -> None:
        self.others: list[Any] = [self] * 50 + [y]


class Slotted:
    """The same, without a dict of its own."""

    __slots__ = ("y",)

    def __init__(self, y: Tensor) -> None:
        self.y = y


WRAPS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dataclass": (Plain, lambda out: out.y),
    "frozen dataclass": (Frozen, lambda out: out.y),
    "namedtuple": (lambda y: Named(y, 3), lambda out: out.y),
    "dict in dict": (lambda y: {"a": {"b": y, "c": None}}, lambda out: out["a"]["b"]),
    "list": (lambda y: [y, y * 2], lambda out: out[0] + out[1]),
    "tuple with None and 3": (lambda y: (y, None, 3), lambda out: out[0]),
    "set": (lambda y: {y}, lambda out: next(iter(out))),
    "deque": (lambda y: deque([None, y]), lambda out: out[1]),
    "mapping": (lambda y: MappingProxyType({"y": y}), lambda out: out["y"]),
    "dict with attributes": (Attributed, lambda out: out.y),
    "object with a cycle": (Cyclic, lambda out: out.others[1].others[-1]),
    "custom class": (Custom, lambda out: out.inside["deep"][0]),
    "class with slots": (Slotted, lambda out: out.y),
    "dataclass in a tuple": (lambda y: (Plain(y), 1), lambda out: out[0].y),
}


class Wrapping(nn.Module):
    """A layer that wraps what it returns."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = linear()
        self.wrap = wrap
        self.returned: Any = None

    def forward(self, x: Tensor) -> Any:
        """Return the layer's output, wrapped."""
        self.returned = self.wrap(self.layer(x))
        return self.returned


def wrapped(kind: str) -> Training:
    """A layer behind another, its output in a container of this kind."""
    wrap, unwrap = WRAPS[kind]

    def step(model: nn.Module, rank: int, number: int) -> None:
        front: Any
        wrapping: Any
        front, wrapping = model.children()
        output = wrapping(front(batch(rank, number)))
        assert output is wrapping.returned
        loss_of(unwrap(output), rank).backward()
        wrapping.returned = None

    def build() -> nn.Module:
        return fill(nn.Sequential(linear(), Wrapping(wrap)))

    return Training(build, step, ("0", "1", ""))


@pytest.mark.everywhere
@pytest.mark.parametrize("kind", list(WRAPS))
def test_every_container_has_parity_and_comes_out_as_the_same_object(kind: str) -> None:
    """pytorch#77812, #173415; xtuner#1677; fairscale#967; DeepSpeed#2127."""
    check_values(wrapped(kind))


@pytest.mark.parametrize("returned", [None, 3, "text", (), {}, (None, 3)], ids=repr)
@pytest.mark.filterwarnings("ignore:step 0. unit '1' was expected to enter its backward next")
def test_an_output_without_tensors_passes_through(returned: Any) -> None:
    """And its unit rests, without a gradient."""

    def step(model: nn.Module, rank: int, number: int) -> None:
        front: Any
        wrapping: Any
        front, wrapping = model.children()
        y = front(batch(rank, number))
        assert wrapping(y) is returned
        loss_of(y, rank).backward()
        wrapping.returned = None

    def build() -> nn.Module:
        return fill(nn.Sequential(linear(), Wrapping(lambda _y: returned)))

    report = check_parity(Training(build, step, ("0", "1", "")))

    for (trained,) in report.results:
        assert trained.gradients["1.layer.weight"] is None


class InPlace(nn.Module):
    """A layer that adds to its input, and returns that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        """Write `x`, whose earlier node the layer's own backward does not need."""
        return x.add_(self.layer(x.clone()))


def in_place(*units: str) -> Training:
    """The layer between two others."""

    def step(model: nn.Module, rank: int, number: int) -> None:
        loss_of(model(batch(rank, number)), rank).backward()

    return Training(lambda: fill(nn.Sequential(linear(), InPlace(), linear())), step, units)


@pytest.mark.everywhere
@pytest.mark.parametrize("units", [("0", "1", "2", ""), ("0", "1", "2")], ids=["root", "no root"])
@pytest.mark.filterwarnings("ignore:step 0. unit .* was expected to enter its backward next")
def test_an_input_that_is_returned_with_other_values_is_an_output(units: tuple[str, ...]) -> None:
    """It is the same object, but backward has to pass through the unit."""
    check_values(in_place(*units))


class Sliced(nn.Module):
    """A layer that returns a view of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return two parts of the layer's output."""
        y = self.layer(x)
        return y[:, :2], y[:, 2:]


def written_view() -> Training:
    """The layer between two others, its first output written by who reads it."""

    def step(model: nn.Module, rank: int, number: int) -> None:
        front, sliced, back = model.children()
        first, second = sliced(front(batch(rank, number)))
        first.mul_(2)
        loss_of(back(first.add_(second)), rank).backward()

    def build() -> nn.Module:
        return fill(nn.Sequential(linear(), Sliced(), linear()))

    return Training(build, step, ("0", "1", "2"))


@pytest.mark.everywhere
def test_an_output_that_its_reader_writes_in_place_still_leads_backward_to_the_unit() -> None:
    """PyTorch gives a view that was written another node; the unit's hook must not go with it."""
    check_values(written_view())


class Gated(nn.Module):
    """Leaves a term of the loss in one of several places, and returns something older."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.layer, self.gate, self.place = linear(), linear(), place
        self.term: Any = None

    def forward(self, x: Tensor, terms: list[Tensor], *, named: dict[str, Tensor]) -> Tensor:
        """Return the layer's output; the gate's goes elsewhere, behind it."""
        y: Tensor = self.layer(x)
        term = (self.gate(y) * self.gate(x)).sum()
        match self.place:
            case "attribute":
                self.term = term
            case "attribute of a module inside":
                self.gate.term = term
            case "list":
                terms.append(term)
            case _:
                named["term"] = term
        return fold(y)


class WithTerms(nn.Module):
    """Two such units; adds up what they left."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.first, self.last = Gated(place), Gated(place)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output and the sum of the terms."""
        terms: list[Tensor] = []
        for layer in (self.first, self.last):
            named: dict[str, Tensor] = {}
            x = layer(x, terms, named=named)
            left = [layer.term, getattr(layer.gate, "term", None), *named.values()]
            terms += [term for term in left if isinstance(term, Tensor)]
            layer.term = layer.gate.term = None  # type: ignore[assignment]
        return x, torch.stack(terms).sum()


PLACES = ["attribute", "attribute of a module inside", "list", "keyword"]


@pytest.mark.everywhere
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "with the output"])
def test_a_loss_that_a_unit_leaves_beside_its_output_has_parity(place: str, alone: bool) -> None:
    """Its gradient comes first, before backward has entered the unit through the output."""

    def step(model: nn.Module, rank: int, number: int) -> None:
        y, terms = model(batch(rank, number))
        loss = terms if alone else loss_of(y, rank) + terms
        loss.backward()

    check_values(Training(lambda: fill(WithTerms(place)), step, ("first", "last", ""), steps=2))


@pytest.mark.everywhere
@pytest.mark.filterwarnings("ignore:step 0")
def test_an_output_that_a_hook_has_kept_has_parity() -> None:
    """A hook of a module inside a unit, which captures features."""

    def build() -> nn.Module:
        model = Row(a=Row("inner", "outer"), b=linear())
        inner = model.get_submodule("a.inner")
        inner.register_forward_hook(lambda module, _args, y: setattr(module, "kept", y))
        return fill(model)

    def step(model: nn.Module, rank: int, number: int) -> None:
        model(batch(rank, number))
        inner: Any = model.get_submodule("a.inner")
        loss_of(inner.kept, rank).backward()
        del inner.kept

    check_values(Training(build, step, ("a", "b", ""), steps=2, entered=("a",)))


class Vocabulary(dict[str, int]):
    """A dict whose parts nobody may ask for."""

    def values(self) -> Any:
        """Fail: it was walked."""
        raise AssertionError


@pytest.mark.everywhere
def test_a_large_container_in_an_attribute_is_not_walked_in_each_forward() -> None:
    """A vocabulary, say: it would cost more than the forward."""

    def build() -> nn.Module:
        model = Row("first")
        model.words = Vocabulary({str(word): word for word in range(CONTAINER_PARTS_MAX + 1)})  # type: ignore[assignment]
        return fill(model)

    def step(model: nn.Module, rank: int, number: int) -> None:
        loss_of(model(batch(rank, number)), rank).backward()

    check_values(Training(build, step, ("first", "")))


def test_an_output_that_is_not_looked_into_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect planted: only tensors in tuples and lists lead backward to their unit."""

    def tensors_of(output: Any) -> Iterator[Tensor]:
        if isinstance(output, Tensor):
            yield output
        elif isinstance(output, (tuple, list)):
            for each in output:
                yield from tensors_of(each)

    monkeypatch.setattr(hooks, "tensors_of", tensors_of)

    with pytest.raises(RuntimeError, match="storage of size 0"):
        check_parity(wrapped("dataclass"))


# ---------------------------------------------------------------------- weights, and what has still to run


class Holder(nn.Module):
    """Returns what `of` makes of its weight, beside an output."""

    def __init__(self, of: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.of = linear(), of

    def forward(self, x: Tensor) -> Any:
        """Return an output and the other."""
        return self.layer(x), self.of(self.layer.weight)


@pytest.mark.everywhere
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("of", [lambda w: w, lambda w: {"deep": [w.t()]}, lambda w: w.detach()[1:]])
def test_a_weight_that_is_freed_behind_the_forward_is_not_returned(
    of: Callable[[Tensor], Any], grad: bool
) -> None:
    """Nor a view of it: reading it would read nothing."""

    def body(rank: int) -> str:
        shard(model := nn.Sequential(linear(), Holder(of)), "1", "", mesh=(world_size(2),))
        with torch.set_grad_enabled(grad), pytest.raises(StateError) as caught:
            model(batch(rank))
        assert_resting(model)
        assert caught.value.fqn == "1.layer.weight"
        return str(caught.value)

    message = (
        "a forward must not return weights, which are freed behind it, got '1.layer.weight', or a "
        "view of it, from unit '1'; use parameter.clone(), or "
        "SchedulePolicy(reshard_after_forward=False)"
    )
    ranks = world_size(2)
    assert on_ranks(body, ranks) == [message] * ranks


@pytest.mark.everywhere
@pytest.mark.parametrize(
    ("of", "options"),
    [
        (Tensor.clone, {}),
        (lambda w: w, {"schedule_policy": SchedulePolicy(reshard_after_forward=False)}),
        (lambda w: w.t(), {"placements": ZERO_1}),
    ],
)
def test_a_copy_or_a_weight_that_stays_is_returned(
    of: Callable[[Tensor], Any], options: dict[str, Any]
) -> None:
    """What the refusal says to do has the gradients of the unsharded run."""

    def step(model: nn.Module, rank: int, _number: int) -> None:
        y, weight = model(batch(rank))
        loss_of(y @ weight, rank).backward()

    build = partial(Holder, of)
    check_values(Training(lambda: fill(build()), step, ("",), options=options))


class Lazy(nn.Module):
    """Begins when its output is read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        """Yield one output."""
        yield self.layer(x)


class Awaited(Lazy):
    """Begins when its output is awaited."""

    async def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return one output."""
        y: Tensor = self.layer(x)
        return y


@pytest.mark.everywhere
@pytest.mark.parametrize(("kind", "output"), [(Lazy, "generator"), (Awaited, "coroutine")])
def test_a_forward_that_has_still_to_run_is_refused(kind: type[nn.Module], output: str) -> None:
    """It would find the weights freed."""

    def body(rank: int) -> str:
        shard(model := kind(), "", mesh=(world_size(2),))
        with pytest.raises(StateError) as caught:
            model(batch(rank))
        assert_resting(model)
        return str(caught.value)

    message = (
        f"a forward must have used its weights when it returns, got a {output} from unit '<root>'; "
        f"have it return a list, or shard the modules that it calls"
    )
    ranks = world_size(2)
    assert on_ranks(body, ranks) == [message] * ranks
