"""PyTorch's own FSDP2 on a small model whose sums are exact, so that every backend gives the same bits."""

import gc

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

STEPS = 2


def make_model() -> nn.Sequential:
    """Return three layers with small whole numbers as weights."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    for number, parameter in enumerate(model.parameters()):
        values = torch.arange(parameter.numel()) * (number + 3) % 5 - 2
        parameter.data.copy_(values.reshape(parameter.shape))
    return model


def train(rank: int) -> list[float]:
    """Train on one rank; return the sums of outputs of each step, then those of the final weights."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = make_model()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6)
    outputs = []
    for step in range(STEPS):
        batch = (torch.arange(16.0).reshape(2, 8) + rank + step) % 3
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(loss.item())
    return outputs + [value for weight in model.parameters() for value in whole(weight).tolist()]


def whole(weight: Tensor) -> Tensor:
    """Return all of a sharded weight, flat."""
    assert isinstance(weight, DTensor)
    return weight.full_tensor().detach().flatten()


def main() -> None:
    """Print what rank 0 has."""
    dist.init_process_group("gloo")
    values = train(dist.get_rank())
    if dist.get_rank() == 0:
        print("values", *(float(value).hex() for value in values))
    # FSDP2's modules are cycles that hold the process group. Its threads end with it: one that is left
    # when Python ends may abort the process as it lets a tensor go.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
