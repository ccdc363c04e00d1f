"""A script as people write it for GPUs: DDP with a copy stream, mixed precision and scaled losses."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train for three steps; rank 0 prints the losses."""
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    model = DistributedDataParallel(layers, device_ids=[local])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cuda")
    copies = torch.cuda.Stream()
    torch.manual_seed(1 + local)
    for step in range(3):
        inputs, labels = torch.randn(8, 16).pin_memory(), torch.randint(0, 4, (8,)).pin_memory()
        with torch.cuda.stream(copies):
            inputs = inputs.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
        torch.cuda.current_stream().wait_stream(copies)
        for each in (inputs, labels):
            each.record_stream(torch.cuda.current_stream())
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(step, float(mean.item()).hex())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
