"""A planted bug: the runtime forgets that compute must wait for the weights that it uses.

One wait is taken out of ``fsdp_core``: the one between a unit's all-gather and its forward or backward.
On CPUs nothing changes, since they have no streams. On GPUs results are right as long as each gather
happens to be faster than the compute before it.
"""

import traceback
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fsdp_core


def forget_waits_of(function: str) -> None:
    """Drop each wait for an event that this function of the runtime asks for."""
    wait_event = torch.cpu.Stream.wait_event

    def forgetful(stream: Any, event: Any) -> None:
        callers = [frame.f_code.co_name for frame, _ in traceback.walk_stack(None)]
        if function not in callers:
            wait_event(stream, event)

    torch.cpu.Stream.wait_event = forgetful  # type: ignore[assignment,method-assign]


def main() -> None:
    """Train one step."""
    dist.init_process_group("gloo")
    forget_waits_of("demand")
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = fsdp_core.Placements([0], [Shard(0)], [Shard(0)], [Shard(0)])
    with fsdp_core.fully_shard_context("cpu"):
        fsdp_core.fully_shard(model[0], mesh, placements)
        fsdp_core.fully_shard(model[2], mesh, placements)
        fsdp_core.fully_shard(model, mesh, placements)
    model(torch.ones(4, 8)).sum().backward()


if __name__ == "__main__":
    main()
