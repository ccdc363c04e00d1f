"""CUDA graphs: forward, backward and step captured once and replayed with changing inputs."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fsdp_core
from ci.gpu.process import one_process_group

LAYERS = 8
WIDTH = 256
BATCH = 32
WARM_UP_STEPS = 3
STEPS = 20


def run() -> dict[str, object]:
    """Return whether 20 replayed steps equal eager ones bit for bit, and both step times."""
    with one_process_group():
        eager_losses, eager_weights, eager_ms = _train(_eager)
        graph_losses, graph_weights, graph_ms = _train(_captured)
    same_weights = all(
        torch.equal(one, other) for one, other in zip(eager_weights, graph_weights, strict=True)
    )
    row: dict[str, object] = {
        "losses equal": eager_losses == graph_losses,
        "weights equal": same_weights,
        "eager ms": eager_ms,
        "graph ms": graph_ms,
        "ratio": graph_ms / eager_ms,
    }
    print(row)
    return row


Step = Callable[[], None]
Runner = Callable[[Step, torch.cuda.Stream], Step]


def _eager(step: Step, _: torch.cuda.Stream) -> Step:
    return step


def _captured(step: Step, stream: torch.cuda.Stream) -> Step:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph.replay


def _train(runner: Runner) -> tuple[list[float], list[Tensor], float]:
    """Warm up on the stream that captures, then run the steps; return losses, weights, ms."""
    model, optimizer = _build()
    generator = torch.Generator(device="cuda").manual_seed(1)
    batches = torch.randn(WARM_UP_STEPS + STEPS, BATCH, WIDTH, device="cuda", generator=generator)
    data, loss = torch.empty(BATCH, WIDTH, device="cuda"), torch.empty((), device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        value = model(data).square().mean()
        value.backward()
        optimizer.step()
        loss.copy_(value.detach())

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for batch in batches[:WARM_UP_STEPS]:
            data.copy_(batch)
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    data.copy_(batches[WARM_UP_STEPS])
    run_step = runner(step, stream)
    losses = []
    begin = time.perf_counter()
    for batch in batches[WARM_UP_STEPS:]:
        data.copy_(batch)
        run_step()
        losses.append(loss.item())
    milliseconds = (time.perf_counter() - begin) * 1e3 / STEPS
    weights = [
        parameter.to_local().detach().clone()  # type: ignore[attr-defined]
        for parameter in model.parameters()
    ]
    return losses, weights, milliseconds


def _build() -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    shards = (Shard(0),)
    placements = fsdp_core.Placements((0,), shards, shards, shards)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS))
        )
    with fsdp_core.fully_shard_context():
        for layer in model:
            fsdp_core.fully_shard(layer, mesh, placements)
        fsdp_core.fully_shard(model, mesh, placements)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)
    fsdp_core.fully_shard_optimizer(optimizer)
    return model, optimizer
