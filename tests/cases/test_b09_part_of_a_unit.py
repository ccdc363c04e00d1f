"""B09: of several modules in one unit, any subset may run, in any order."""

import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fsdp_core.unit import ShardedUnit
from fsdp_core.uses import Use
from fsdp_sim.program.model import fold
from tests.cases.programs import Training, batch, check_parity, check_values, fill, linear, loss_of

CHUNKS = 3


class Chunked(nn.Module):
    """A norm and a head that are one unit; the head is called by the loss, chunk by chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed hidden states of `x`."""
        return fold(self.norm(fold(self.body(x))))


def chunked_step(model: nn.Module, rank: int, number: int) -> None:
    """The backward of each chunk's loss comes right behind its forward, that of the body last."""
    hidden = model(batch(rank, number, rows=CHUNKS))
    cut = hidden.detach().requires_grad_()
    head = model.get_submodule("head")
    for index, chunk in enumerate(cut.split(1)):
        loss_of(fold(head(chunk)), rank + index).backward()
    hidden.backward(cut.grad)


def ordinary_step(model: nn.Module, rank: int, number: int) -> None:
    """One forward through everything, one backward."""
    loss_of(fold(model.get_submodule("head")(model(batch(rank, number)))), rank).backward()


def steps_of(model: nn.Module, rank: int, number: int) -> None:
    """A chunked step, then an ordinary one."""
    (chunked_step if number == 0 else ordinary_step)(model, rank, number)


@pytest.mark.everywhere
@pytest.mark.filterwarnings("ignore:step")
@pytest.mark.parametrize("units", [("body", ("norm", "head")), (("norm", "head"), "")])
def test_a_chunked_loss_has_parity_and_so_has_the_step_behind_it(units: tuple[object, ...]) -> None:
    """pytorch#180425, #180426, #180428: the norm alone, the head three times, the norm's backward."""
    check_values(Training(lambda: fill(Chunked()), steps_of, units, steps=2))  # type: ignore[arg-type]


CALLS = st.lists(st.sampled_from(["norm", "head", "body"]), min_size=1, max_size=4)


@pytest.mark.everywhere
@given(st.lists(CALLS, min_size=1, max_size=2))
@settings(max_examples=12)
@pytest.mark.filterwarnings("ignore:step")
def test_any_members_in_any_order_have_parity(steps: list[list[str]]) -> None:
    """Each call by itself: what is gathered is decided by what is there, not by who ran before."""

    def step(model: nn.Module, rank: int, number: int) -> None:
        x = batch(rank, number)
        for name in steps[number]:
            x = fold(model.get_submodule(name)(x))
        loss_of(x, rank).backward()

    check_values(
        Training(
            lambda: fill(Chunked()), step, (("norm", "head", "body"),), len(steps), entered=("",)
        )
    )


@pytest.mark.filterwarnings("ignore:step")
def test_a_unit_that_waits_for_all_its_modules_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect planted: the first module gathers, the last one frees, as if each ran once."""
    awaited: dict[weakref.ref[ShardedUnit], list[nn.Module | None]] = {}
    pre_forward, post_forward = ShardedUnit.pre_forward, ShardedUnit.post_forward

    def gather_for_the_first(unit: ShardedUnit, module: nn.Module) -> None:
        was_unsharded = unit.is_unsharded
        pre_forward(unit, module)
        if not awaited.get(unit.ref):
            awaited[unit.ref] = [ref() for ref in unit.modules]
        elif not was_unsharded:
            unit.weights.reshard()

    def tick_off(unit: ShardedUnit, module: nn.Module) -> Use | None:
        awaited[unit.ref] = [each for each in awaited[unit.ref] if each is not module]
        use = post_forward(unit, module)
        if awaited[unit.ref]:
            unit.weights.demand()
        return use

    monkeypatch.setattr(ShardedUnit, "pre_forward", gather_for_the_first)
    monkeypatch.setattr(ShardedUnit, "post_forward", tick_off)

    units = ("body", ("norm", "head"))

    # A step that calls each once does not show it.
    check_parity(Training(lambda: fill(Chunked()), ordinary_step, units))
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        check_parity(Training(lambda: fill(Chunked()), chunked_step, units))
