"""B46: what was built on the meta device is initialised, or refused; it never holds garbage."""

import pytest
import torch
from torch import nn

from fsdp_core import ConfigError, meta
from tests.cases.programs import Tensors, assert_equal, local_rows, put_together, shard
from tests.core.worlds import on_ranks


class Sevens(nn.Linear):
    """A layer that starts with sevens."""

    def reset_parameters(self) -> None:
        """Fill the weight."""
        nn.init.constant_(self.weight, 7)


class Bare(nn.Module):
    """A parameter that nobody initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(2, 2))


def made_real() -> torch.Tensor:
    """The weight of a layer that was built on the meta device; memory that nobody has written is NaN."""

    def program(rank: int) -> Tensors:
        with torch.device("meta"):
            model = nn.Sequential(Sevens(2, 3, bias=False))
        shard(model, "")
        return local_rows(model)

    whole = put_together(on_ranks(program, 2, poison=True))
    weight = whole["0.weight"]
    assert weight is not None
    return weight


@pytest.mark.everywhere
def test_a_layer_is_initialised_by_its_reset_on_every_rank() -> None:
    """NVIDIA/Megatron-LM#6799: whole, by its own reset; then it is sharded."""
    weight = made_real()

    assert torch.equal(weight, torch.full((3, 2), 7.0))


@pytest.mark.everywhere
def test_a_parameter_that_nobody_can_initialise_is_named_and_nothing_is_changed() -> None:
    """The unit is as it was, so that the model can be mended and sharded then."""

    def program(rank: int) -> str:
        with torch.device("meta"):
            model = nn.Sequential(nn.ModuleDict({"head": Bare()}))
        parameter = model.get_parameter("0.head.gate")
        with pytest.raises(ConfigError) as caught:
            shard(model, "")
        assert model.get_parameter("0.head.gate") is parameter
        assert parameter.is_meta
        assert type(model) is nn.Sequential
        return str(caught.value)

    message = (
        "parameters on the meta device need a reset_parameters of their module, got '0.head.gate' of "
        "a Bare, which has none; "
        "add one, or build it on a real device"
    )
    assert on_ranks(program, 2) == [message, message]


class Scales(nn.Module):
    """Holds parameters in a list and a dict, which have no reset of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([nn.Parameter(torch.empty(2)) for _ in range(2)])
        self.named = nn.ParameterDict({"one": nn.Parameter(torch.empty(2))})
        self.resets = 0

    def reset_parameters(self) -> None:
        """Fill all of them."""
        self.resets += 1
        for parameter in self.parameters():
            nn.init.constant_(parameter, 7)


@pytest.mark.everywhere
def test_parameters_in_a_list_are_initialised_by_the_module_that_holds_it() -> None:
    """Once, though it is responsible for a list and a dict."""

    def program(rank: int) -> Tensors:
        with torch.device("meta"):
            model = nn.Sequential(Scales())
        shard(model, "")
        assert model[0].resets == 1
        return local_rows(model)

    whole = put_together(on_ranks(program, 2, poison=True))

    assert_equal(
        whole,
        {name: torch.full((2,), 7.0) for name in ("0.listed.0", "0.listed.1", "0.named.one")},
    )


def test_a_layer_that_is_made_real_and_never_initialised_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The defect planted: no reset is called; memory that nobody has written is NaN."""
    monkeypatch.setattr(meta, "_reset_of", lambda _module: lambda: None)

    weight = made_real()

    assert weight.isnan().all()
