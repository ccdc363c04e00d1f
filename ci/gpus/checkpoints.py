"""Checkpoints: saved by all ranks, loaded by fewer, which go on as the whole model would."""

import json
import sys
from pathlib import Path
from tempfile import mkdtemp

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fsdp_core
from ci.gpu.process import device, one_process_group
from ci.gpus.launch import in_fresh_processes, shared, world_sizes
from fsdp_core.full_state import full_state_dict

LAYERS, WIDTH, BATCH = 3, 12, 4
STEPS = 2


def run() -> dict[str, object]:
    """Return, for each number of ranks that loads what all have saved, whether all weights are right.

    The folder of the checkpoint must be one that all nodes see: ``TMPDIR`` says which.
    """
    folder = shared(mkdtemp() if dist.get_rank() == 0 else None)
    sizes = world_sizes()[::-1]
    row = {}
    for ranks in sizes:
        action = "save" if ranks == sizes[0] else "load"
        row[f"{action} on {ranks}"] = in_fresh_processes(
            "ci.gpus.checkpoints", action, folder, ranks=ranks
        )[0]
    if dist.get_rank() == 0:
        print(json.dumps(row))
    return dict(row)


def check(action: str, folder: str) -> str:
    """Train and save, or load and train on; return "equal" if the weights are those of one process."""
    target = device()
    model, optimizer = _build(target)
    steps = STEPS
    if action == "load":
        fsdp_core.load_checkpoint(model, optimizer, folder)
        steps = 2 * STEPS
    _train(model, optimizer, range(steps - STEPS, steps))
    if action == "save":
        fsdp_core.save_checkpoint(model, optimizer, folder)
    got = full_state_dict(model)
    if dist.get_rank() != 0:
        return "equal"
    expected = _layers().to(target)
    _train(expected, torch.optim.SGD(expected.parameters(), lr=0.5, momentum=0.5), range(steps))
    wrong = [name for name, value in expected.state_dict().items() if _differ(value, got[name])]
    return f"not equal: {wrong}" if wrong else "equal"


def _differ(one: Tensor, other: Tensor) -> bool:
    return not torch.equal(one.cpu(), other.cpu())


def _layers() -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            weight.copy_((torch.arange(WIDTH * WIDTH).view(WIDTH, WIDTH) + number) % 3 - 1.0)
    return model


def _build(target: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = init_device_mesh(target.type, (dist.get_world_size(),))
    shards = (Shard(0),)
    placements = fsdp_core.Placements((0,), shards, shards, shards)
    model = _layers().to(target)
    with fsdp_core.fully_shard_context(target):
        for layer in model:
            fsdp_core.fully_shard(layer, mesh, placements)
        fsdp_core.fully_shard(model, mesh, placements)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    fsdp_core.fully_shard_optimizer(optimizer)
    return model, optimizer


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Train on the same inputs on every rank, so that the mean over ranks is each rank's gradient."""
    for step in steps:
        weights = next(model.parameters())
        data = (torch.arange(BATCH * WIDTH, device=weights.device) + step) % 3 - 1.0
        (model(data.view(BATCH, WIDTH)) / 1024).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    with one_process_group():
        print(json.dumps(check(sys.argv[1], str(Path(sys.argv[2]) / "checkpoint"))))
