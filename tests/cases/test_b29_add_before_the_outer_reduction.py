"""B29: with hybrid sharding, microbatches are added before the outer reduction, not after it."""

from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor

import fsdp_sim
from fsdp_core.parameter_group import ParameterGroup
from tests.cases.programs import put_together
from tests.cases.test_b28_no_sync import accumulate, reductions

MICROBATCHES = (False, True)
"""Whether each is the last one."""


def test_the_share_of_earlier_microbatches_crosses_the_replicas() -> None:
    """pytorch#125484, #126166: 1.5 + 11.5 on all four ranks, and the same bits on both replicas."""
    report = fsdp_sim.simulate(accumulate, 4, args=(MICROBATCHES,), trace=True)

    assert all(torch.equal(gradient, torch.full((2, 2), 13.0)) for gradient in report.results)
    assert reductions(report) == [(2, 1)] * 4


def add_after_the_outer_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant the defect: what earlier microbatches left is put aside, and added at the end."""
    aside: WeakKeyDictionary[ParameterGroup, Tensor] = WeakKeyDictionary()
    prepare, finish = ParameterGroup._prepare_window, ParameterGroup.finish_window

    def prepare_without_earlier(group: ParameterGroup) -> bool:
        if prepare(group):
            assert group._main_grad is not None
            aside[group] = group._main_grad.flat.clone()
        return False

    def finish_and_add(group: ParameterGroup) -> None:
        finish(group)
        group.final_grad.flat.add_(aside[group])

    monkeypatch.setattr(ParameterGroup, "_prepare_window", prepare_without_earlier)
    monkeypatch.setattr(ParameterGroup, "finish_window", finish_and_add)


def test_adding_after_the_outer_reduction_is_found_by_replicas_that_drift_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each replica has added its own share of the first microbatch: 0.5 and 2.5, not 1.5."""
    add_after_the_outer_reduction(monkeypatch)

    report = fsdp_sim.simulate(accumulate, 4, args=(MICROBATCHES,))

    assert [gradient.unique().tolist() for gradient in report.results] == [[12], [12], [14], [14]]
    with pytest.raises(AssertionError, match=r"^weight: tensor"):
        put_together([{"weight": gradient} for gradient in report.results], (2, 2))
