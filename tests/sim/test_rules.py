"""The rules that were tried on a GPU: the simulator says of each what CUDA and NCCL promise."""

import pytest
import torch

import fsdp_sim
from ci.gpu.rules import RULES, Bench


@pytest.mark.parametrize("name", RULES)
def test_the_simulator_finds_something_where_a_rule_orders_nothing(name: str) -> None:
    """And nothing where it orders the ops; `ci.gpu litmus` says the same of the hardware."""
    is_ordered, body = RULES[name]

    def program(rank: int) -> None:
        body(Bench(torch.cpu, torch.device("cpu")))

    report = fsdp_sim.simulate(program, 1, strict=False)

    assert (report.findings == ()) is is_ordered
