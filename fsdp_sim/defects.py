"""Defects: stand-ins that are wrong in a known way, for tests that must be able to find it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

CHUNK_NUMEL = 4
"""Elements that one block of the imagined kernel updates."""
CHUNKS_MAX = 8
"""Blocks of one launch."""


class SkippingSGD(torch.optim.Optimizer):
    """SGD that loses updates on some ranks: a launch waits for a chunk that an empty tensor has not.

    Tensors are cut into chunks, which are launched when there are enough of them or when the last chunk
    of the last tensor is reached. Where the last tensor is empty, nothing launches what is pending.

    Source: NVIDIA/TransformerEngine#3207, the multi-tensor apply of fused optimizers.
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no loss to return
        """Update all parameters that have a gradient, but for those that the defect loses."""
        del closure
        for group in self.param_groups:
            params = [each for each in group["params"] if each.grad is not None]
            pending: list[tuple[Tensor, Tensor]] = []
            for position, parameter in enumerate(params):
                chunks = list(_chunks(parameter))
                for number, chunk in enumerate(chunks):
                    pending.append(chunk)
                    is_last = position == len(params) - 1 and number == len(chunks) - 1
                    if is_last or len(pending) == CHUNKS_MAX:
                        _launch(pending, group["lr"])


def _chunks(parameter: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Return the chunks of a parameter and of its gradient; none of an empty one."""
    assert parameter.grad is not None
    if parameter.numel() == 0:
        return ()
    flats = (parameter.view(-1), parameter.grad.reshape(-1))
    return zip(*(flat.split(CHUNK_NUMEL) for flat in flats), strict=True)


def _launch(pending: list[tuple[Tensor, Tensor]], lr: float) -> None:
    for weight, grad in pending:
        weight.sub_(grad, alpha=lr)
    pending.clear()
