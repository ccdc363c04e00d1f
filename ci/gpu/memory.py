"""Memory: no growth over many steps, back to rest, and peaks of the ZeRO stages."""

import gc

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import fsdp_core
from ci.gpu.process import one_process_group

LAYERS = 16
WIDTH = 2048
MIB = 2**20
STEPS = 200

STAGES: dict[str, tuple[Placement, Placement, Placement]] = {
    "ZeRO-1": (Replicate(), Partial("avg"), Shard(0)),
    "ZeRO-2": (Replicate(), Shard(0), Shard(0)),
    "ZeRO-3": (Shard(0), Shard(0), Shard(0)),
}


def run() -> dict[str, dict[str, float]]:
    """Return MiB: at rest, peak of a step, growth over 200 steps, left after deletion."""
    with one_process_group():
        _warm_up()
        return {name: _stage(*placements) for name, placements in STAGES.items()}


def _warm_up() -> None:
    """Let cuBLAS take its workspaces, which stay, before anything is counted."""
    layer = nn.Linear(WIDTH, WIDTH, device="cuda")
    layer(torch.ones(8, WIDTH, device="cuda")).sum().backward()


def _stage(parameter: Placement, gradient: Placement, state: Placement) -> dict[str, float]:
    before = torch.cuda.memory_allocated()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    placements = fsdp_core.Placements((0,), (parameter,), (gradient,), (state,))
    with torch.device("cuda"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        data = torch.randn(8, WIDTH)
    with fsdp_core.fully_shard_context() as context:
        for layer in model:
            fsdp_core.fully_shard(layer, mesh, placements)
        fsdp_core.fully_shard(model, mesh, placements)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    fsdp_core.fully_shard_optimizer(optimizer)

    _step(model, optimizer, data)
    torch.cuda.synchronize()
    rest = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        _step(model, optimizer, data)
    torch.cuda.synchronize()
    row = {
        "rest": (rest - before) / MIB,
        "peak": (torch.cuda.max_memory_allocated() - before) / MIB,
        "growth": (torch.cuda.memory_allocated() - rest) / MIB,
        "peak_full": context.stats.peak_full_nbytes / MIB,
        "layer": WIDTH * WIDTH * 4 / MIB,
    }
    gc.disable()
    del model, optimizer, data, layer
    row["left"] = (torch.cuda.memory_allocated() - before) / MIB
    gc.enable()
    return row


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, data: Tensor) -> None:
    model(data).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
