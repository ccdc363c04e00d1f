"""The optimizer of a program, the same object for the sharded and the unsharded run."""

from collections.abc import Iterable

import torch
from torch import nn

from fsdp_sim.program.spec import OptimizerSpec


def make_optimizer(
    spec: OptimizerSpec, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """Return the optimizer over ``parameters``, frozen ones included."""
    foreach, fused = spec.implementation == "foreach", spec.implementation == "fused"
    if spec.kind == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=spec.lr,
            momentum=spec.momentum,
            weight_decay=spec.weight_decay,
            foreach=foreach,
            fused=fused,
        )
    kind = torch.optim.Adam if spec.kind == "adam" else torch.optim.AdamW
    return kind(
        parameters, lr=spec.lr, weight_decay=spec.weight_decay, foreach=foreach, fused=fused
    )
