"""B18: a reentrant checkpoint does not end the gradient of a weight that is used outside too."""

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_core.window import Window
from fsdp_sim.program.model import fold
from tests.cases.programs import (
    Training,
    batch,
    check_parity,
    fill,
    linear,
    loss_of,
    ops_by_step,
    reduced,
)


class Outside(nn.Module):
    """A checkpointed layer whose weight is used again, in front of it and behind it."""

    def __init__(self, before: bool, behind: bool) -> None:
        super().__init__()
        self.c1, self.c2 = linear(), linear()
        self.before, self.behind = before, behind

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layers make of `x`."""
        if self.before:
            x = fold(x @ self.c1.weight)
        x = fold(checkpoint(self.c1, x, use_reentrant=True))
        x = fold(self.c2(x))
        return fold(x @ self.c1.weight) if self.behind else x


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("behind", [True, False])
def test_the_unit_is_reduced_once_behind_all_uses_of_its_weight(before: bool, behind: bool) -> None:
    """pytorch#89781, #89791, #24005: the inner backward pass ends, but the gradient is not whole."""

    def step(model: nn.Module, rank: int, number: int) -> None:
        loss_of(model(batch(rank, number).requires_grad_()), rank).backward()

    report = check_parity(Training(lambda: fill(Outside(before, behind)), step, ("",), steps=2))

    for ops in ops_by_step(report):
        assert reduced(ops) == ["<root>"]


@pytest.mark.parametrize("units", [("front", "back"), ("front", "back", "")])
def test_units_around_it_are_reduced_once_too(units: tuple[str, ...]) -> None:
    """Two such units in a row, whose inner passes nest in one outer backward."""

    def step(model: nn.Module, rank: int, number: int) -> None:
        loss_of(model(batch(rank, number).requires_grad_()), rank).backward()

    def build() -> nn.Module:
        pair = nn.Sequential()
        pair.add_module("front", Outside(before=True, behind=False))
        pair.add_module("back", Outside(before=False, behind=True))
        return fill(pair)

    for ops in ops_by_step(check_parity(Training(build, step, units, steps=2))):
        assert len(reduced(ops)) == 2


def test_a_unit_that_the_inner_pass_completes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect planted: the first gradients complete it, whichever pass they come in."""
    monkeypatch.setattr(Window, "is_due", property(lambda window: window.is_full))

    def step(model: nn.Module, rank: int, number: int) -> None:
        loss_of(model(batch(rank, number).requires_grad_()), rank).backward()

    with pytest.raises(RuntimeError, match="storage of size 0"):
        check_parity(Training(lambda: fill(Outside(before=True, behind=True)), step, ("",)))
