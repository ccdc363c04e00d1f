"""A planted bug: which of two reductions comes first depends on whether a copy happens to be done.

On one machine every rank nearly always answers alike, so this runs for years. When two ranks answer
differently, each waits in a reduction that the other has not begun.
"""

import torch
import torch.distributed as dist


def main() -> None:
    """Reduce a large and a small tensor, the large one first if it is ready."""
    dist.init_process_group("gloo")
    large, small = torch.zeros(1024), torch.ones(16)
    copying, large_is_ready = torch.cpu.Stream(), torch.cpu.Event()
    copying.wait_stream(torch.cpu.current_stream())
    with torch.cpu.stream(copying):
        large.fill_(1.0)
        large_is_ready.record()

    order = [large, small] if large_is_ready.query() else [small, large]
    torch.cpu.current_stream().wait_event(large_is_ready)
    for tensor in order:
        dist.all_reduce(tensor)


if __name__ == "__main__":
    main()
