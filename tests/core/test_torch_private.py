"""Private PyTorch names: each does here what fsdp_core relies on."""

import re

import pytest
import torch
from torch import nn
from torch.autograd.profiler import profile

from fsdp_core.torch_private import (
    check_torch_version,
    in_graph_task,
    is_assigning_load,
    preserve_version,
    profiler_is_enabled,
    queue_backward_callback,
)


def test_a_preserved_version_lets_backward_use_what_was_refilled() -> None:
    """Without it autograd refuses the backward of a saved tensor that was written."""
    storage = torch.tensor([2.0, 3.0])
    x = torch.tensor([5.0, 7.0], requires_grad=True)
    y = (x * storage).sum()

    with preserve_version(storage):
        storage.copy_(torch.tensor([2.0, 3.0]))
    y.backward()

    assert x.grad is not None
    assert x.grad.tolist() == [2, 3]


def test_a_hook_knows_that_backward_runs_and_queues_behind_it() -> None:
    """The callback comes after the last gradient, once."""
    seen = []
    x = torch.ones(1, requires_grad=True)

    def hook(gradient: torch.Tensor) -> None:
        seen.append(in_graph_task())
        queue_backward_callback(lambda: seen.append(x.grad is not None))

    (x * 2).register_hook(hook)
    y = x * 2
    y.register_hook(hook)
    y.sum().backward()

    assert seen == [True, True]
    assert not in_graph_task()


def test_a_profiler_is_noticed_while_it_listens() -> None:
    """Before and after it nobody does."""
    listening = [profiler_is_enabled()]
    with profile(use_cpu=True):
        listening.append(profiler_is_enabled())
    listening.append(profiler_is_enabled())

    assert listening == [False, True, False]


def test_an_assigning_load_is_recognised() -> None:
    """By what PyTorch hands to a pre-hook."""
    seen = []
    module = nn.Linear(1, 1)
    module.register_load_state_dict_pre_hook(
        lambda _module, _state, _prefix, metadata, *_rest: seen.append(is_assigning_load(metadata))
    )

    module.load_state_dict(module.state_dict(), assign=True)
    module.load_state_dict(module.state_dict())

    assert seen == [True, False]


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.13.1"])
def test_a_tested_version_of_torch_is_taken_in_silence(version: str) -> None:
    """No warning, no error."""
    check_torch_version(version)


@pytest.mark.parametrize("version", ["2.12.0", "2.14.1+cpu"])
def test_an_untested_version_of_torch_is_let_through_with_one_warning(version: str) -> None:
    """The warning names the version."""
    with pytest.warns(UserWarning, match=f"{re.escape(version)} is untested") as caught:
        check_torch_version(version)

    assert len(caught) == 1


@pytest.mark.parametrize("version", ["2.10.0", "2.15.0", "1.13", "3.0"])
def test_any_other_version_of_torch_is_refused(version: str) -> None:
    """The error says which will do."""
    with pytest.raises(ImportError, match=r"needs PyTorch 2\.11 or 2\.13"):
        check_torch_version(version)
