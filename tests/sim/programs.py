"""Small rank programs that several tests run."""

import torch
import torch.distributed as dist


def sum_of_ranks(rank: int) -> float:
    """All-reduce rank + 1 and return the sum."""
    value = torch.full((4,), float(rank + 1))
    dist.all_reduce(value)
    return float(value[0])


def gathered_on_a_side_stream(rank: int, *, waits: bool = True) -> list[float]:
    """Gather on a side stream and read the result on the default stream."""
    stream = torch.cpu.Stream()
    mine, everything = torch.full((2,), float(rank)), torch.zeros(2 * dist.get_world_size())
    stream.wait_stream(torch.cpu.current_stream())
    with torch.cpu.stream(stream):
        dist.all_gather(list(everything.chunk(dist.get_world_size())), mine)
    if waits:
        torch.cpu.current_stream().wait_stream(stream)
    doubled = everything * 2
    return list(doubled.tolist())


def order_by_query(rank: int) -> None:
    """Rank 0 swaps two collectives if a query happens to say that the device is done."""
    small, large = torch.ones(4), torch.ones(8)
    event = torch.cpu.Event()
    event.record()
    tensors = [large, small] if rank == 0 and event.query() else [small, large]
    for tensor in tensors:
        dist.all_reduce(tensor)
