"""B45: units on the meta device are initialised once each, with the shapes they were written for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fsdp_sim
from fsdp_core import meta
from tests.cases.programs import assert_equal, local_rows, put_together, shard
from tests.core.worlds import on_ranks

Shapes = list[tuple[int, ...]]


class Layer(nn.Module):
    """Has a weight, a buffer and perhaps a layer inside it; notes how it was reset."""

    def __init__(self, rows: int, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.resets: list[Shapes] = []
        self.weight = nn.Parameter(torch.empty(rows, 2))
        self.register_buffer("scale", torch.empty(rows))
        if not self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill what is the layer's own with random numbers."""
        own = [*self._parameters.values(), *self._buffers.values()]
        self.resets.append([tuple(each.shape) for each in own if each is not None])
        nn.init.normal_(self.weight)
        nn.init.normal_(self.get_buffer("scale"))


def build(rows: int = 3) -> nn.Module:
    """outer{inner}."""
    return Layer(rows, Layer(2))


def values(model: nn.Module) -> dict[str, Tensor | None]:
    """This rank's rows and buffers."""
    return {**local_rows(model), **{name: each.clone() for name, each in model.named_buffers()}}


def initialise(rank: int, build: Callable[[], nn.Module], units: tuple[str, ...]) -> Any:
    """Build on the meta device, shard; return what was reset, the rows and the buffers."""
    with torch.device("meta"):
        model = build()
    torch.manual_seed(7)
    shard(model, *units)
    assert not any(each.is_meta for each in [*model.parameters(), *model.buffers()])
    resets = [layer.resets for layer in model.modules() if isinstance(layer, Layer)]
    return resets, values(model)


UNITS = [("inner", ""), ("",)]


@pytest.mark.everywhere
@pytest.mark.parametrize("units", UNITS, ids=["nested units", "one unit"])
def test_each_layer_is_reset_once_and_sees_its_own_whole_tensors(units: tuple[str, ...]) -> None:
    """pytorch#90465, #104187, #104189: also where both layers are one unit."""
    results = on_ranks(lambda rank: initialise(rank, build, units), 2)

    for resets, _ in results:
        assert resets == [[[(3, 2), (3,)]], [[(2, 2), (2,)]]]


def test_a_reset_of_all_that_lies_below_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect planted: the outer layer's reset goes over the inner one's values once more."""

    def recursive(module: nn.Module) -> Callable[[], None]:
        def reset() -> None:
            for layer in reversed(list(module.modules())):
                if isinstance(layer, Layer):
                    layer.reset_parameters()

        return reset

    monkeypatch.setattr(meta, "_reset_of", recursive)

    report = fsdp_sim.simulate(initialise, 2, args=(build, ("",)))

    for resets, _ in report.results:
        assert [len(each) for each in resets] == [1, 2]


@given(st.integers(1, 5), st.sampled_from(UNITS))
@settings(max_examples=6)
def test_a_seed_gives_what_it_gives_without_the_meta_device(
    rows: int, units: tuple[str, ...]
) -> None:
    """Sharded values are those of the model that was built whole."""
    report = fsdp_sim.simulate(initialise, 2, args=(lambda: build(rows), units))

    torch.manual_seed(7)
    model = build(rows)
    names = [name for name, _ in model.named_parameters()]
    got = put_together([{name: each[name] for name in names} for _, each in report.results])
    assert_equal(got, {name: each.detach() for name, each in model.named_parameters()})
    for _, each in report.results:
        assert_equal({n: each[n] for n, _ in model.named_buffers()}, dict(model.named_buffers()))
