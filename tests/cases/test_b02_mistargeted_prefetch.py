"""B02: a mis-aimed backward prefetch does not make the next step use old weights."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fsdp_sim
from fsdp_core.unit import ShardedUnit
from fsdp_sim.program.model import fold
from tests.cases.programs import (
    Row,
    Training,
    assert_resting,
    batch,
    check_parity,
    check_values,
    fill,
    loss_of,
    shard,
    train_unsharded,
)

NAMES = ("a", "x", "b")


class Dropping(Row):
    """Calls layers in any order; what those in `dropped` return is thrown away."""

    def forward(self, x: Tensor, calls: object = None, dropped: object = ()) -> Tensor:
        """Return what the layers made of `x` that were not dropped."""
        assert isinstance(dropped, tuple)
        for name in calls if isinstance(calls, tuple) else self.names:
            y = fold(self.get_submodule(name)(x))
            x = x if name in dropped else y
        return x


def dropping(*steps: tuple[tuple[str, ...], tuple[str, ...]]) -> Training:
    """Each step calls the layers in its own order and drops some outputs; then X is changed."""

    def step(model: nn.Module, rank: int, number: int) -> float:
        calls, dropped = steps[number]
        loss = loss_of(model(batch(rank, number), calls, dropped), rank)
        loss.backward()
        return loss.item()

    def change_x(model: nn.Module, _number: int) -> None:
        x = model.get_submodule("x").weight
        assert isinstance(x, Tensor)
        x.add_(1)

    return Training(lambda: fill(Dropping(*NAMES)), step, NAMES, len(steps), after=change_x)


@pytest.mark.filterwarnings("ignore:step")
def test_a_changed_weight_reaches_the_next_step_of_a_unit_whose_output_was_dropped() -> None:
    """pytorch#137348, #137349: X is gathered as a prefetch of backward, which never enters it."""
    training = dropping((NAMES, ("x",)), (NAMES, ()))

    report = check_parity(training)

    for number, expected in enumerate(train_unsharded(training)):
        assert [rank[number].returned for rank in report.results] == expected.returned


@pytest.mark.everywhere
@pytest.mark.filterwarnings("ignore:step")
@given(
    st.permutations(NAMES).map(tuple),
    st.sets(st.sampled_from(NAMES), max_size=2).map(lambda names: tuple(sorted(names))),
)
@settings(max_examples=8)
def test_any_order_and_any_dropped_outputs_have_parity(
    calls: tuple[str, ...], dropped: tuple[str, ...]
) -> None:
    """Forward order unlike registration order; whatever reaches the loss."""
    check_values(dropping((calls, dropped), (NAMES, ())))


@pytest.mark.filterwarnings("ignore:step")
def test_a_gather_that_nobody_completes_is_reported_when_the_step_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The defect planted: what was gathered early is not brought to rest at completion."""
    monkeypatch.setattr(ShardedUnit, "come_to_rest", lambda _: None)

    def program(rank: int) -> None:
        model = fill(Dropping(*NAMES))
        shard(model, *NAMES)
        loss_of(model(batch(rank), NAMES, ("x",)), rank).backward()

    with pytest.raises(fsdp_sim.NotAtRest, match="left in flight") as caught:
        fsdp_sim.simulate(program, 2)

    assert caught.value.finding is not None
    assert caught.value.finding.ranks == (0, 1)


@pytest.mark.filterwarnings("ignore:step")
def test_a_unit_whose_output_was_dropped_rests_after_the_step() -> None:
    """The state that the next step begins in."""

    def program(rank: int) -> None:
        model = fill(Dropping(*NAMES))
        shard(model, *NAMES)
        loss_of(model(batch(rank), NAMES, ("x",)), rank).backward()
        assert_resting(model)

    fsdp_sim.simulate(program, 2)
