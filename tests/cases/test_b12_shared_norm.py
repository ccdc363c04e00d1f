"""B12: a parameter that two heads share is reduced after its last use."""

import pytest
import torch
from torch import Tensor, nn

import fsdp_core
import fsdp_sim
from fsdp_core import FsdpModule, SchedulePolicy, StateError
from fsdp_core.uses import Uses
from fsdp_sim.program.model import fold
from tests.cases.programs import (
    SHARDED,
    Row,
    Tensors,
    Training,
    assert_equal,
    batch,
    check_parity,
    fill,
    linear,
    local_rows,
    loss_of,
    mesh_of,
    ops_by_step,
    put_together,
    reduced,
    shard,
)


class TwoHeads(nn.Module):
    """A norm that the main path and an extra head use."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.extra, self.norm = linear(), linear(), linear()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the main path and the extra head make of `x`."""
        hidden = fold(self.body(x))
        return fold(self.norm(hidden)), fold(self.norm(fold(self.extra(hidden))))


def build() -> nn.Module:
    """Return the model with small integers."""
    return fill(TwoHeads())


def step(model: nn.Module, rank: int, number: int) -> None:
    """The backward of both losses together."""
    main, extra = model(batch(rank, number))
    (loss_of(main, rank) + loss_of(extra, rank + 1)).backward()


@pytest.mark.filterwarnings("ignore:step")
def test_the_norm_is_reduced_once_behind_both_uses() -> None:
    """NVIDIA/Megatron-LM#7166: the gradient is the sum over the main path and the extra head."""
    report = check_parity(Training(build, step, ("body", "extra", "norm", ""), steps=2))

    for ops in ops_by_step(report):
        assert reduced(ops).count("norm") == 1
        assert reduced(ops).index("norm") == 1


GRADIENTS = {"body": 2, "extra": 1, "norm": 2}
"""How many gradients complete each unit, where each loss has a backward of its own."""


def expected_gradients() -> Tensors:
    """The unsharded gradients of two ranks, each loss by itself: folded gradients do not add up."""
    model = build()
    for rank in range(2):
        main, extra = model(batch(rank))
        loss_of(main, rank).backward(retain_graph=True)
        loss_of(extra, rank + 1).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= 2
    return local_rows(model, grads=True)


def drive(rank: int) -> tuple[Tensors, str]:
    """Backward of each loss by itself; an optimizer that steps in between is refused."""
    model = build()
    mesh = mesh_of(2)
    with fsdp_core.fully_shard_context() as context:
        for name, count in GRADIENTS.items():
            policy = SchedulePolicy(register_hooks=False, grad_accumulation_count=count)
            unit = model.get_submodule(name)
            fsdp_core.fully_shard(unit, mesh, SHARDED, schedule_policy=policy)
    optimizer = fsdp_core.fully_shard_optimizer(torch.optim.SGD(model.parameters()))
    units = [each for each in model.modules() if isinstance(each, FsdpModule)]
    for unit in units:
        unit.unshard()
    main, extra = model(batch(rank))
    main_loss, extra_loss = loss_of(main, rank), loss_of(extra, rank + 1)
    main_loss.backward(retain_graph=True)
    with pytest.raises(StateError) as caught:
        optimizer.step()
    extra_loss.backward()
    context.post_backward()
    for unit in units:
        unit.reshard()
    return local_rows(model, grads=True), str(caught.value)


def test_a_schedule_that_asks_too_early_is_told_what_is_still_open() -> None:
    """Driven by hand, one loss after the other; the state stays usable, and the sum is right."""
    report = fsdp_sim.simulate(drive, 2)

    gradients = [gradients for gradients, _ in report.results]
    assert_equal(put_together(gradients), expected_gradients())
    for _, message in report.results:
        assert (
            "got unit '<root> (root 0)' mid-flight with 1/2 gradients of ['weight']; run the "
            "backwards that are missing"
        ) in message


def test_parameters_without_any_gradient_yet_are_the_ones_that_are_named() -> None:
    """One backward of two uses one of two layers of a unit that waits for four gradients."""

    def program(rank: int) -> str:
        model = fill(Row("first", "second"))
        shard(model, "", schedule_policy=SchedulePolicy(grad_accumulation_count=4))
        optimizer = fsdp_core.fully_shard_optimizer(torch.optim.SGD(model.parameters()))
        loss_of(model(batch(rank), ("first",)), rank).backward()
        with pytest.raises(StateError) as caught:
            optimizer.step()
        return str(caught.value)

    for message in fsdp_sim.simulate(program, 2, strict=False).results:
        assert (
            "got unit '<root>' mid-flight with 1/4 gradients, none yet for ['second.weight'];"
            in message
        )


@pytest.mark.filterwarnings("ignore:step")
def test_a_reduction_behind_each_use_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect planted: nobody knows of the uses that are still to come."""
    monkeypatch.setattr(Uses, "outstanding", lambda _uses: 0)

    for ops in ops_by_step(check_parity(Training(build, step, ("body", "extra", "norm", "")))):
        assert reduced(ops).count("norm") == 2
