"""A script as people write it for GPUs: FSDP2 with mixed precision, made on the meta device."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main() -> None:
    """Train for three steps; rank 0 prints the losses."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cuda")
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(3):
        loss = model(torch.randn(4, 16).to("cuda")).float().pow(2).mean()
        loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(step, loss.item().hex())
        print(step, dist.get_rank(), norm.full_tensor().item().hex())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
