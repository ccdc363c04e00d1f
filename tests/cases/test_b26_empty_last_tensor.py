"""B26: an optimizer updates what a rank holds, also where the last tensor of a group is empty there."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_core
import fsdp_sim
from fsdp_sim.defects import SkippingSGD
from tests.cases.programs import Tensors, assert_equal, integers, local_rows, put_together, shard

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "plain": lambda params: torch.optim.SGD(params, lr=1.0, foreach=False),
    "foreach": lambda params: torch.optim.SGD(params, lr=1.0, foreach=True),
    "fused": lambda params: torch.optim.SGD(params, lr=1.0, fused=True),
    "skipping": SkippingSGD,
}


class Part(nn.Module):
    """A weight [rows, 2]; the forward returns its sum, so that every gradient is 1."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(integers(rows, 2, start=rows))

    def forward(self) -> Tensor:
        """Return the sum."""
        return self.weight.sum()


class Two(nn.Module):
    """p of three rows and q of two: the last of three ranks has no row of q."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = Part(3), Part(2)

    def forward(self) -> Tensor:
        """Return the sum of both."""
        total: Tensor = self.p() + self.q()
        return total


def step(rank: int, kind: str, order: Sequence[str], units: Sequence[str]) -> Tensors:
    """One step of an optimizer that has the parameters in this order; returns this rank's rows."""
    model = Two()
    shard(model, *units, mesh=(3,))
    parameters = [model.get_parameter(f"{name}.weight") for name in order]
    optimizer = fsdp_core.fully_shard_optimizer(OPTIMIZERS[kind](parameters), elementwise=True)
    model().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    return local_rows(model)


@pytest.mark.parametrize("units", [("p", "q"), ("",)], ids=["two units", "one unit"])
@pytest.mark.parametrize("order", [("p", "q"), ("q", "p")], ids=["empty last", "empty first"])
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_every_rank_updates_what_it_holds(
    kind: str, order: Sequence[str], units: Sequence[str]
) -> None:
    """NVIDIA/TransformerEngine#3207, #3212, Megatron-LM#7002, #7216, Automodel#2997.

    Even an optimizer with the defect does: it is never handed an empty tensor last.
    """
    report = fsdp_sim.simulate(step, 3, args=(kind, order, units))

    expected: Tensors = {name: each.detach() - 1 for name, each in Two().named_parameters()}
    assert_equal(put_together(report.results, (3,)), expected)


def test_the_defect_is_found_where_it_is_met() -> None:
    """On plain local shards, as a runtime without care would hand them out, p keeps old rows."""

    def program(rank: int) -> Tensors:
        model = Two()
        rows = {
            name: nn.Parameter(each.detach()[rank : rank + 1].clone())
            for name, each in model.named_parameters()
        }
        optimizer = SkippingSGD(rows.values())
        for each in rows.values():
            each.grad = torch.ones_like(each)
        optimizer.step()
        return {name: each.detach() for name, each in rows.items()}

    report = fsdp_sim.simulate(program, 3)

    got = put_together(report.results, (3,))
    expected: Tensors = {name: each.detach() - 1 for name, each in Two().named_parameters()}
    assert torch.equal(got["q.weight"], expected["q.weight"])  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=r"p\.weight"):
        assert_equal(got, expected)
