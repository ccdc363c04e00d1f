"""The meta device: what is there is made real, once, by its module; or all is as it was."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_sim
from fsdp_core import (
    BlockAtomic,
    ConfigError,
    FsdpModule,
    MixedPrecisionPolicy,
    Placements,
    TensorAtomic,
)
from fsdp_sim.analysis import analyse
from fsdp_sim.checkers import make as make_checkers
from fsdp_sim.checkers.memory_peak import MemoryPeak
from tests.cases.programs import begin_step, linear, local_rows, ops_by_step, shard
from tests.core.strategies import whole_by_name
from tests.core.worlds import device_type, on_ranks


class Filled(nn.Module):
    """A weight, a frozen one of another dtype, a buffer that no state dict has, and nothing."""

    def __init__(self, rows: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, 2))
        self.frozen = nn.Parameter(torch.empty(2, dtype=torch.bfloat16), requires_grad=False)
        self.register_parameter("bias", None)
        self.register_buffer("scale", torch.empty(rows), persistent=False)
        self.register_buffer("missing", None)
        self.resets = 0

    def reset_parameters(self) -> None:
        """Fill all of it with the number of this reset."""
        self.resets += 1
        for each in (self.weight, self.frozen, self.get_buffer("scale")):
            nn.init.constant_(each, self.resets)


def on_meta(*layers: type[nn.Module]) -> Any:
    """Layers in a row, on the meta device."""
    with torch.device("meta"):
        return nn.Sequential(*(layer() for layer in layers))


def own_tensors(model: nn.Module) -> list[Tensor]:
    """Every parameter and buffer."""
    return [*model.parameters(), *model.buffers()]


@pytest.mark.everywhere
def test_all_of_a_module_is_made_real_and_filled_once() -> None:
    """With its dtypes, its flags and its gaps, on the device of the context."""

    def body(_rank: int) -> None:
        own = MixedPrecisionPolicy(main_params_dtype=None)
        shard(model := on_meta(Filled, Filled), "0", "1", mixed_precision_policy=own)
        for layer in model:
            assert layer.resets == 1
            assert (layer.weight.dtype, layer.frozen.dtype) == (torch.float32, torch.bfloat16)
            assert (layer.weight.requires_grad, layer.frozen.requires_grad) == (True, False)
            assert (layer.bias, layer.missing) == (None, None)
            assert torch.equal(layer.scale, torch.ones(3))
            assert list(layer.state_dict()) == ["weight", "frozen"]
        assert {each.device.type for each in own_tensors(model)} == {device_type()}
        for weights in whole_by_name(model).values():
            assert weights is not None
            assert torch.equal(weights, torch.ones_like(weights))

    on_ranks(body, 2)


@pytest.mark.everywhere
def test_what_is_real_already_stays_as_it_is() -> None:
    """Its module is not reset, though it is in the same unit."""

    def body(_rank: int) -> Tensor | None:
        model = on_meta(Filled)
        model.append(linear())
        nn.init.constant_(model[1].weight, 5)
        shard(model, "")
        assert model[0].resets == 1
        return whole_by_name(model)["1.weight"]

    for weight in on_ranks(body, 2):
        assert torch.equal(weight, torch.full((2, 2), 5.0))


class Tied(nn.Module):
    """Two layers of one weight, which each of them resets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Filled(), Filled()
        self.second.weight = self.first.weight


@pytest.mark.everywhere
def test_a_tied_weight_stays_one() -> None:
    """Each module's reset runs once, and both see the same weight."""

    def body(_rank: int) -> None:
        shard(model := on_meta(Tied)[0], "")
        assert (model.first.resets, model.second.resets) == (1, 1)
        assert model.first.weight is model.second.weight

    on_ranks(body, 2)


@pytest.mark.everywhere
def test_the_older_name_of_a_reset_is_taken() -> None:
    """PyTorch's attention has `_reset_parameters`, and biases of zeros."""

    def body(_rank: int) -> None:
        with torch.device("meta"):
            model = nn.Sequential(nn.MultiheadAttention(4, 2))
        shard(model, "")
        weights = whole_by_name(model)
        assert torch.equal(weights["0.in_proj_bias"], torch.zeros(12))  # type: ignore[arg-type]
        bound = (6 / (12 + 4)) ** 0.5  # Xavier's, of a matrix [12, 4]
        drawn = weights["0.in_proj_weight"]
        assert drawn is not None
        assert 0 < drawn.abs().max().item() <= bound

    on_ranks(body, 2)


@pytest.mark.everywhere
def test_owners_may_be_said_of_parameters_on_the_meta_device() -> None:
    """They stay the same objects when they are made real."""
    whole = Placements((0,), *((TensorAtomic(),),) * 3)

    def body(_rank: int) -> list[int]:
        model = on_meta(Filled)
        owners = {model[0].weight: 1, model[0].frozen: 0}
        shard(model, "", placements=whole, parameter_to_owner=owners)
        return [each.numel() for each in local_rows(model).values() if each is not None]

    assert on_ranks(body, 2) == [[0, 2], [6, 0]]


class Fails(Filled):
    """A layer whose reset raises, as long as it is told to."""

    raises = True

    def reset_parameters(self) -> None:
        """Fill half, and raise."""
        super().reset_parameters()
        if self.raises and not self.weight.is_meta:
            raise ArithmeticError("no numbers")


@pytest.mark.everywhere
def test_a_reset_that_raises_leaves_all_on_the_meta_device() -> None:
    """The same parameters, with what was noted on them; when it is mended, the model is sharded."""

    def body(_rank: int) -> None:
        model = on_meta(Filled, Fails)
        before = own_tensors(model)
        model[0].weight.note = "kept"
        with pytest.raises(ArithmeticError, match=r"^no numbers$"):
            shard(model, "")
        assert all(old is new for old, new in zip(before, own_tensors(model), strict=True))
        assert all(each.is_meta for each in own_tensors(model))
        assert model[0].weight.note == "kept"
        assert not isinstance(model, FsdpModule)
        model[1].raises = False
        shard(model, "")
        assert not any(each.is_meta for each in own_tensors(model))

    on_ranks(body, 2)


@pytest.mark.everywhere
def test_a_unit_that_cannot_be_sharded_leaves_all_on_the_meta_device() -> None:
    """What is wrong may be found behind the resets."""
    blocks = Placements((0,), *((BlockAtomic(2),),) * 3)

    def body(_rank: int) -> None:
        model = on_meta(Filled)
        with pytest.raises(ConfigError, match=r"must have a number of rows divisible by 2"):
            shard(model, "", placements=blocks)
        assert all(each.is_meta for each in own_tensors(model))
        shard(model, "")
        assert not any(each.is_meta for each in own_tensors(model))

    on_ranks(body, 2)


WIDTH = 32
LAYER_NBYTES = 4 * WIDTH * WIDTH


def most_held(layers: int) -> float:
    """What a rank of four holds at most, in layers, when as many are made real and sharded."""

    def body(_rank: int) -> None:
        begin_step(0)
        with torch.device("meta"):
            model = nn.Sequential(*(linear(WIDTH, WIDTH) for _ in range(layers)))
        shard(model, *map(str, range(layers)), "", mesh=(4,))

    report = fsdp_sim.simulate(body, 4, trace=True, checkers=())
    (ops,) = ops_by_step(report)
    checker = analyse(ops, make_checkers(("memory_peak",)), 4).checker(MemoryPeak)
    assert checker is not None
    return checker.peaks(0).requested / LAYER_NBYTES


def test_no_more_than_one_unit_is_whole_at_a_time() -> None:
    """Each layer more is a shard more, a quarter of one."""
    peaks = {layers: most_held(layers) for layers in (4, 12)}

    assert peaks[12] - peaks[4] == 8 / 4
