"""PyTorch's own parallelism, unmodified, on numbers whose sums are exact: every order gives the same bits."""

import itertools
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

WIDTH = 4
untyped: Any = dist
STEPS = 2
CPU = torch.device("cpu")


def fill(module: nn.Module) -> nn.Module:
    """Give every parameter values -1, 0 and 1."""
    for number, parameter in enumerate(module.parameters()):
        values = (torch.arange(parameter.numel()) * (number + 2)) % 3 - 1
        parameter.data.copy_(values.reshape(parameter.shape))
    return module


class Block(nn.Module):
    """Two layers, recomputed in the backward pass if asked for."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes:
            return checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def batch(rank: int, step: int) -> Tensor:
    """Return whole numbers 0, 1 and 2, other ones on each rank and step."""
    return (torch.arange(2.0 * WIDTH).reshape(2, WIDTH) + rank + step) % 3


def flat(parameters: Iterable[Tensor]) -> list[float]:
    """Return all elements of whole parameters."""
    whole = (each.full_tensor() if isinstance(each, DTensor) else each for each in parameters)
    return [value for each in whole for value in each.detach().float().flatten().tolist()]


# ---------------------------------------------------------------------- FSDP2


def sharded(mesh: DeviceMesh, *, recomputes: bool = False, **options: Any) -> nn.Sequential:
    """Return a model of two blocks, each a unit of FSDP2, and the root."""
    model = nn.Sequential(Block(recomputes=recomputes), Block(recomputes=recomputes))
    fill(model)
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def train(
    model: nn.Module, rank: int, *, microbatches: int = 1, clips: bool = False
) -> list[float]:
    """Train some steps; return losses and final weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4)
    loss, losses = torch.zeros(()), []
    for step in range(STEPS):
        for microbatch in range(microbatches):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(microbatch == microbatches - 1)
            loss = model(batch(rank, step + microbatch)).float().sum()
            loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 2.0, norm_type=float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses + flat(model.parameters())


def line() -> DeviceMesh:
    """Return a mesh of all ranks in a row."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def square() -> DeviceMesh:
    """Return a 2x2 mesh."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def fsdp2(rank: int, mesh: Callable[[], DeviceMesh] = line, **options: Any) -> list[float]:
    """Train under FSDP2."""
    training = {name: options.pop(name) for name in ("microbatches", "clips") if name in options}
    return train(sharded(mesh(), **options), rank, **training)


def fsdp2_evaluation(rank: int) -> list[float]:
    """Evaluate without gradients, train, and evaluate again."""
    model = sharded(line())
    with torch.no_grad():
        before = model(batch(rank, 7)).flatten().tolist()
    weights = train(model, rank)
    with torch.no_grad():
        after = model(batch(rank, 7)).flatten().tolist()
    return [*before, *weights, *after]


def fsdp2_compiled(rank: int) -> list[float]:
    """Train with each unit compiled."""
    model = sharded(line())
    for block in model:
        block.compile(backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo looks at gradients of tensors that are no leaves
        return train(model, rank)


FSDP2: dict[str, Callable[[int], Any]] = {
    "plain": fsdp2,
    "kept whole": partial(fsdp2, reshard_after_forward=False),
    "mixed precision": partial(
        fsdp2,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    ),
    "replicated and sharded": partial(fsdp2, mesh=square),
    "recomputed": partial(fsdp2, recomputes=True),
    "clipped": partial(fsdp2, clips=True),
    "accumulated": partial(fsdp2, microbatches=2),
    "replicated and accumulated": partial(fsdp2, mesh=square, microbatches=2),
    "evaluated": fsdp2_evaluation,
    "compiled": fsdp2_compiled,
}


# ---------------------------------------------------------------------- FSDP1


def fsdp1(rank: int, strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD) -> list[float]:
    """Train under FullyShardedDataParallel, each block a unit.

    With ``use_orig_params=False`` PyTorch never frees the flat parameters of a model, as ``Leak`` says.
    """
    shard = partial(
        FullyShardedDataParallel,
        sharding_strategy=strategy,
        device_id=CPU,
        use_orig_params=True,
    )
    blocks = [shard(fill(Block())) for _ in range(2)]
    return train(shard(nn.Sequential(*blocks)), rank)


FSDP1: dict[str, Callable[[int], Any]] = {
    "plain": fsdp1,
    "kept whole": partial(fsdp1, strategy=ShardingStrategy.SHARD_GRAD_OP),
}


# ---------------------------------------------------------------------- DDP


class Branches(nn.Module):
    """A block that is used and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def ddp(
    rank: int,
    *,
    hook: Any = None,
    branches: bool = False,
    microbatches: int = 1,
    **options: Any,
) -> list[float]:
    """Train under DistributedDataParallel with buckets of a few parameters."""
    inner = fill(Branches() if branches else nn.Sequential(Block(), Block()))
    options.setdefault("bucket_cap_mb", 100 / 2**20)
    model = DistributedDataParallel(inner, find_unused_parameters=branches, **options)
    if not callable(hook) and hook is not None:
        model._register_builtin_comm_hook(hook)
    elif hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4)
    loss, losses = torch.zeros(()), []
    for step in range(STEPS):
        for microbatch in range(microbatches):
            with model.no_sync() if microbatch < microbatches - 1 else nullcontext():
                loss = model(batch(rank, step + microbatch)).sum()
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses + flat(model.parameters())


def summing_hook(
    _: Any,
    bucket: dist.GradBucket,
) -> torch.futures.Future[Tensor]:
    """A hook of a user: reduce, then divide."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda each: each.value()[0] / dist.get_world_size())


DDP: dict[str, Callable[[int], Any]] = {
    "buckets": ddp,
    "one bucket": partial(ddp, bucket_cap_mb=25),
    "views": partial(ddp, gradient_as_bucket_view=True),
    "static": partial(ddp, static_graph=True),
    "no_sync": partial(ddp, microbatches=2),
    "unused parameters": partial(ddp, branches=True),
    "a user's hook": partial(ddp, hook=summing_hook),
    "PyTorch's own hook": partial(ddp, hook=untyped.BuiltinCommHookType.FP16_COMPRESS),
    "compressed": partial(ddp, hook=default_hooks.fp16_compress_hook),
}


# ---------------------------------------------------------------------- DTensor, tensor parallel


def redistributions(rank: int) -> list[float]:
    """Take a tensor from every placement on a 2x2 mesh to the next one, and whole."""
    mesh = square()
    spread = distribute_tensor(torch.arange(64.0).reshape(8, 8), mesh, [Replicate(), Replicate()])
    values: list[float] = []
    for placements in itertools.product((Shard(0), Shard(1), Replicate()), repeat=2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without all-to-all on CPU it gathers, and says so
            spread = spread.redistribute(placements=placements)
        values += spread.to_local().flatten().tolist()
    return values + flat([spread])


def partial_sums(rank: int) -> list[float]:
    """Matrix products whose partial sums are reduced and scattered."""
    mesh = square()
    left = distribute_tensor(torch.arange(16.0).reshape(4, 4) % 3, mesh, [Shard(0), Shard(1)])
    right = distribute_tensor(torch.arange(16.0).reshape(4, 4) % 5, mesh, [Replicate(), Shard(0)])
    product: Any = left @ right
    assert any(isinstance(placement, Partial) for placement in product.placements)
    scattered = product.redistribute(placements=[Shard(0), Shard(0)])
    return flat([product, scattered])


def tensor_parallel(rank: int) -> list[float]:
    """A block whose first layer is split by columns and second by rows, under FSDP2 on the other axis."""
    mesh = square()
    model = nn.Sequential(Block(), Block())
    fill(model)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model:
        parallelize_module(block, mesh["shard"], plan)
        fully_shard(block, mesh=mesh["replicate"])
    fully_shard(model, mesh=mesh["replicate"])
    return train(model, rank // 2)


DTENSOR: dict[str, Callable[[int], Any]] = {
    "redistributions": redistributions,
    "partial sums": partial_sums,
    "tensor parallel": tensor_parallel,
}


# ---------------------------------------------------------------------- checkpoints


def save_and_load(rank: int, folder: Path) -> list[float]:
    """Save a sharded model, destroy its values, load it, and gather it whole."""
    model = sharded(line())
    state = get_model_state_dict(model)
    save(state, checkpoint_id=str(folder))
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        parameter.to_local().detach().zero_()
    state = get_model_state_dict(model)
    load(state, checkpoint_id=str(folder))
    set_model_state_dict(model, state)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    gathered = get_model_state_dict(model, options=whole)
    return [*flat(model.parameters()), float(len(gathered))]


# ---------------------------------------------------------------------- pipelines

STAGES = 3


def pipeline(rank: int) -> list[float]:
    """1F1B over 3 stages, each sharded by FSDP2 over 2 ranks."""
    mesh = init_device_mesh("cpu", (STAGES, 2), mesh_dim_names=("stage", "data"))
    stage, data = mesh.get_local_rank("stage"), mesh.get_local_rank("data")
    block = fill(Block())
    fully_shard(block, mesh=mesh["data"])
    part = PipelineStage(block, stage, STAGES, CPU, group=mesh.get_group("stage"))
    schedule = Schedule1F1B(part, 2 * STAGES, loss_fn=lambda output, _: output.sum())
    optimizer = torch.optim.SGD(block.parameters(), lr=2.0**-6)
    losses: list[Tensor] = []
    for step in range(STEPS):
        inputs = torch.cat([batch(data, step + each) for each in range(2 * STAGES)])
        if stage == 0:
            schedule.step(inputs)
        elif stage == STAGES - 1:
            schedule.step(target=inputs, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses] + flat(block.parameters())
