"""A unit's phases against a small model: forwards, backwards, evaluations, exceptions, hands on its weights.

The machine draws a life as data; a simulated run lives it and says what it saw.
"""

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp_core
import fsdp_sim
from fsdp_core import FsdpModule, Phase

Seen = tuple[str, bool]
"""Phase of the unit, and whether its full weights are in the module."""
RESTING, FULL = (Phase.RESTING.name, False), (Phase.RESTING.name, True)
ACTIONS_MAX = 12


class Watched(nn.Module):
    """A layer that notes its own phase in each forward, and raises when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(2))
        self.inside: list[str] = []
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the weight."""
        assert isinstance(self, FsdpModule)
        self.inside.append(self.phase.name)
        if self.fails:
            raise LookupError("as planned")
        return x @ self.weight.t()


def live(_rank: int, actions: tuple[str, ...]) -> tuple[list[Seen], list[str], int]:
    """Live a life; return what was seen behind each action, in each forward, and completed backwards."""
    layer: Any = Watched()
    rows = (fsdp_core.RowAtomic(),)
    with fsdp_core.fully_shard_context("cpu"):
        mesh = init_device_mesh("cpu", (1,))
        fsdp_core.fully_shard(layer, mesh, fsdp_core.Placements((0,), rows, rows, rows))
    completed: list[nn.Module] = []
    layer.register_post_backward_hook(completed.append)
    losses: list[Tensor] = []
    seen = []
    for action in actions:
        _act(layer, action, losses)
        seen.append((layer.phase.name, not isinstance(layer.weight, DTensor)))
    layer.reshard()
    return seen, layer.inside, len(completed)


def _act(layer: Any, action: str, losses: list[Tensor]) -> None:
    x = torch.ones(1, 2)
    if action == "forward":
        losses.append(layer(x).sum())
    elif action == "backward":
        losses.pop(0).backward()
    elif action == "evaluate":
        with torch.no_grad():
            layer(x)
    elif action == "fail":
        layer.fails = True
        with pytest.raises(LookupError):
            layer(x)
        layer.fails = False
    else:
        getattr(layer, action)()


class PhaseMachine(RuleBasedStateMachine):
    """Collects actions, and what a unit must look like behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.actions: list[str] = []
        self.expected: list[Seen] = []
        self.graphs = self.forwards = self.backwards = 0

    @rule(action=st.sampled_from(("forward", "evaluate", "fail")))
    def run(self, action: str) -> None:
        """A forward goes to FORWARD and back, and leaves shards, however it ends."""
        self._add(action, RESTING)
        self.forwards += 1
        self.graphs += action == "forward"

    @precondition(lambda self: self.graphs > 0)
    @rule()
    def backward(self) -> None:
        """Each backward completes the unit once, and leaves shards."""
        self._add("backward", RESTING)
        self.graphs -= 1
        self.backwards += 1

    @rule()
    def unshard(self) -> None:
        """By hand the weights come without a phase."""
        self._add("unshard", FULL)

    @rule()
    def reshard(self) -> None:
        """And go."""
        self._add("reshard", RESTING)

    def _add(self, action: str, expected: Seen) -> None:
        self.actions.append(action)
        self.expected.append(expected)

    def teardown(self) -> None:
        """Live the life, and compare."""
        seen, inside, completed = fsdp_sim.simulate(live, 1, args=(tuple(self.actions),)).results[0]

        assert seen == self.expected
        assert inside == [Phase.FORWARD.name] * self.forwards
        assert completed == self.backwards


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
class TestPhases(PhaseMachine.TestCase):  # type: ignore[misc,valid-type]
    """Twenty lives."""

    settings = settings(max_examples=20, stateful_step_count=ACTIONS_MAX, deadline=None)
