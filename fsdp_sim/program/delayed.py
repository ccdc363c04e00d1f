"""Weight gradients that come after the backward: autograd gives the input's, the weight's is made later.

A stand-in for layers of pipelines with split backwards (Transformer Engine's ``backward_dw``).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Postponed:
    """What backwards left to be done for one weight [out, in].

    Attributes:
        parts: of each call, its input [batch, in] and the gradient [batch, out] of its output.
        hooks: called when the weight's gradient is there.
    """

    parts: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    hooks: list[Callable[[], None]] = field(default_factory=list)

    def accumulate(self, weight: nn.Parameter) -> None:
        """Add the postponed gradients to that of ``weight``, and call the hooks; nothing if there are none.

        Ordering:
            Behind the backward, and before anything that needs the gradient.
        """
        if not self.parts:
            return
        for x, grad in self.parts:
            part = (grad.t() @ x).to(weight.dtype)
            weight.grad = part if weight.grad is None else weight.grad + part
        self.parts.clear()
        for hook in self.hooks:
            hook()


class _LinearWithDelayedWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, postponed: Postponed) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.postponed = postponed
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.postponed.parts.append((x.detach(), grads[0]))
        return (grads[0] @ weight if ctx.needs_input_grad[0] else None), None, None


def linear_with_delayed_weight(x: Tensor, weight: Tensor, postponed: Postponed) -> Tensor:
    """Return ``x`` [batch, in] times ``weight`` [out, in] transposed; its backward postpones the weight's."""
    y: Tensor = _LinearWithDelayedWeight.apply(x, weight, postponed)  # type: ignore[no-untyped-call]
    return y
