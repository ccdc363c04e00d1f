"""What the cases share: models of small integers, sharding, the unsharded run, counts from a trace."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.profiler import record_function

import fsdp_core
import fsdp_sim
from fsdp_core import FsdpContext, FsdpModule, Phase, Placements, RowAtomic
from fsdp_sim.op import Kind, Op
from fsdp_sim.program.model import fold
from tests.core.worlds import device_type, on_ranks, unsharded, world_size

Tensors = dict[str, Tensor | None]
Build = Callable[[], nn.Module]
Step = Callable[[nn.Module, int, int], Any]

SHARDED = Placements((0,), (RowAtomic(),), (RowAtomic(),), (RowAtomic(),))
"""Everything sharded, on a mesh of one axis (ZeRO-3)."""
HYBRID = Placements(
    (0, 1),
    (Replicate(), RowAtomic()),
    (Partial("avg"), RowAtomic()),
    (Replicate(), RowAtomic()),
)
"""Sharded over the inner axis, replicated over the outer one (HSDP)."""
ZERO_1 = Placements((0,), (Replicate(),), (Partial("avg"),), (RowAtomic(),))
"""Weights whole, optimizer sharded (ZeRO-1)."""

# ---------------------------------------------------------------------- models of integers


def integers(*shape: int, start: int = 0) -> Tensor:
    """Small integers [shape] that depend on `start` alone."""
    pattern = torch.tensor([1.0, -1.0, 2.0, 1.0, -2.0, 0.0, -1.0])
    indices = (torch.arange(torch.Size(shape).numel()) * 3 + start) % len(pattern)
    return pattern[indices].view(shape)


def fill(model: nn.Module) -> nn.Module:
    """Give every parameter small integers, others for each."""
    with torch.no_grad():
        for start, parameter in enumerate(model.parameters()):
            parameter.copy_(integers(*parameter.shape, start=start))
    return model


def linear(rows: int = 2, columns: int = 2) -> nn.Linear:
    """A layer of one weight [rows, columns]."""
    return nn.Linear(columns, rows, bias=False)


class Row(nn.Module):
    """Named layers that are called one after the other, each output folded to integers in [-2, 2].

    The fold keeps values and gradients small, so that sums over ranks are exact.
    """

    def __init__(self, *names: str, **layers: nn.Module) -> None:
        super().__init__()
        self.names = (*names, *layers)
        for name in names:
            self.add_module(name, linear())
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor, calls: Sequence[str] | None = None) -> Tensor:
        """Call the layers named in `calls`, by default all."""
        for name in self.names if calls is None else calls:
            x = fold(self.get_submodule(name)(x))
        return x


def batch(rank: int, number: int = 0, rows: int = 1, width: int = 2) -> Tensor:
    """A rank's input [rows, width] in a step."""
    return integers(rows, width, start=2 * rank + 5 * number)


def loss_of(y: Tensor, rank: int) -> Tensor:
    """A loss whose gradient differs between elements and ranks."""
    return (y * integers(*y.shape, start=rank + 1)).sum()


# ---------------------------------------------------------------------- sharding


def mesh_of(*shape: int) -> DeviceMesh:
    """A mesh of the devices that ranks compute on."""
    return init_device_mesh(device_type(), shape)


def shard(
    model: nn.Module, *units: str | Sequence[str], mesh: Sequence[int] = (2,), **options: Any
) -> FsdpContext:
    """Shard the modules of these names in this order, a sequence of names as one unit."""
    context_options = {
        name: options.pop(name)
        for name in ("runtime_policy", "prefetch_order", "parameter_to_owner")
        if name in options
    }
    placements = options.pop("placements", SHARDED if len(mesh) == 1 else HYBRID)
    device_mesh = mesh_of(*mesh)
    with fsdp_core.fully_shard_context(**context_options) as context:
        for names in units:
            if isinstance(names, str):
                unit: Any = model.get_submodule(names)
            else:
                unit = [model.get_submodule(name) for name in names]
            fsdp_core.fully_shard(unit, device_mesh, placements, **options)
    return context


def units_in(model: nn.Module) -> list[FsdpModule]:
    """The sharded modules in and below `model`."""
    return [module for module in model.modules() if isinstance(module, FsdpModule)]


def assert_resting(model: nn.Module) -> None:
    """Sharded parameters are registered, and no storage is beyond what the placements keep."""
    for module in units_in(model):
        unit = module.fsdp_unit
        assert unit.phase is Phase.RESTING, unit.name
        assert not unit.is_unsharded, unit.name
        for group in unit.groups:
            if not group.keeps_full:
                assert group.full_weight.flat.untyped_storage().nbytes() == 0, unit.name
            for member in group.members:
                assert member.full.grad is None, member.fqn
    assert all(isinstance(each, DTensor) for each in sharded_parameters(model))
    for module in units_in(model):
        assert module.context.stats.full_nbytes == 0


def sharded_parameters(model: nn.Module) -> list[nn.Parameter]:
    """What the units register now."""
    return [
        slot.registry[slot.name]  # type: ignore[misc]
        for module in units_in(model)
        for member in module.fsdp_unit.members
        for slot in member.slots
    ]


def local_rows(model: nn.Module, *, grads: bool = False) -> Tensors:
    """Copies of this rank's rows of each parameter, or of its gradient."""
    rows: Tensors = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.grad if grads else parameter.detach()
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        rows[name] = None if local is None else local.detach().clone()
    return rows


def put_together(ranks: Sequence[Tensors], mesh: Sequence[int] = (2,)) -> Tensors:
    """The whole tensors from all ranks' rows; replicas on an outer axis must agree bit by bit.

    Integers are whole on every rank.
    """
    shards = mesh[-1]
    replicas = [ranks[start : start + shards] for start in range(0, len(ranks), shards)]
    whole: list[Tensors] = [{} for _ in replicas]
    for tensors, replica in zip(whole, replicas, strict=True):
        for name in ranks[0]:
            rows = [rank[name] for rank in replica]
            present = [each for each in rows if each is not None]
            assert len(present) in (0, len(rows)), f"{name} is on some ranks only"
            if present and not present[0].is_floating_point():
                assert all(torch.equal(each, present[0]) for each in present), name
                present = present[:1]
            tensors[name] = torch.cat(present) if present else None
    for tensors in whole[1:]:
        assert_equal(tensors, whole[0])
    return whole[0]


def assert_equal(got: Tensors, expected: Tensors) -> None:
    """The same names, and the same bits in each."""
    assert list(got) == list(expected)
    for name, tensor in got.items():
        other = expected[name]
        if tensor is None or other is None:
            assert tensor is other, f"{name}: {tensor} instead of {other}"
        else:
            assert torch.equal(tensor, other), f"{name}: {tensor} instead of {other}"


# ---------------------------------------------------------------------- sharded against unsharded


@dataclass(frozen=True)
class Training:
    """A training program to be run on shards and unsharded.

    Attributes:
        build: makes the model, with the same values each time.
        step: forwards and backwards of one step: of (model, rank, number of the step).
        units: names of the modules to shard, inner ones first.
        steps: how many; after each one SGD with a rate of 1 updates the weights.
        mesh: two ranks unless it is given, or one where there is one process alone.
        options: of `shard`.
        after: called with (model, number) behind each step's update; changes weights in place.
        entered: units that backward enters in each step on every rank: a trainable parameter of
            theirs that nobody used gets a gradient of zeros.
        rests: every unit must be at rest after each step's backwards.
    """

    build: Build
    step: Step
    units: Sequence[str | Sequence[str]]
    steps: int = 1
    mesh: tuple[int, ...] = field(default_factory=lambda: (world_size(2),))
    options: dict[str, Any] = field(default_factory=dict)
    after: Callable[[nn.Module, int], None] = lambda _model, _number: None
    entered: Sequence[str] = ()
    rests: bool = True

    @property
    def world_size(self) -> int:
        """How many ranks."""
        return torch.Size(self.mesh).numel()


@dataclass
class Trained:
    """What one step left: gradients before the optimizer's step, weights after it.

    Attributes:
        returned: what the step returned; in an unsharded run a list of what each rank's returned.
        stats: the context's counters; empty for an unsharded run.
    """

    gradients: Tensors
    weights: Tensors
    returned: Any = None
    stats: dict[str, int] = field(default_factory=dict)


def train_shards(rank: int, training: Training) -> list[Trained]:
    """Run a training on one rank's shards; for `simulate`."""
    model = training.build()
    context = shard(model, *training.units, mesh=training.mesh, **training.options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    fsdp_core.fully_shard_optimizer(optimizer)
    trained = []
    for number in range(training.steps):
        begin_step(number)
        returned = training.step(model, rank, number)
        if training.rests:
            assert_resting(model)
        gradients = local_rows(model, grads=True)
        optimizer.step()
        with torch.no_grad():
            training.after(model, number)
        trained.append(Trained(gradients, local_rows(model), returned, dict(vars(context.stats))))
        optimizer.zero_grad()
    return trained


def train_unsharded(training: Training) -> list[Trained]:
    """Run each rank's batches in turn on the whole model; gradients are averaged over ranks."""
    model = training.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trained = []
    for number in range(training.steps):
        returned = [training.step(model, rank, number) for rank in range(training.world_size)]
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                parameter.grad /= training.world_size
            elif parameter.requires_grad and name.startswith(tuple(training.entered)):
                parameter.grad = torch.zeros_like(parameter)
        gradients = local_rows(model, grads=True)
        optimizer.step()
        with torch.no_grad():
            training.after(model, number)
        trained.append(Trained(gradients, local_rows(model), returned))
        optimizer.zero_grad()
    return trained


def check_parity(training: Training, **options: Any) -> fsdp_sim.Report:
    """Simulate a training, with every checker, and compare each step with the unsharded run."""
    report = fsdp_sim.simulate(
        train_shards, training.world_size, args=(training,), **{"trace": True, **options}
    )
    _assert_parity(training, report.results)
    return report


def check_values(training: Training) -> list[list[Trained]]:
    """Compare each step with the unsharded run, wherever tests run; return what each rank trained."""
    ranks = on_ranks(partial(train_shards, training=training), training.world_size)
    _assert_parity(training, ranks)
    return ranks


def _assert_parity(training: Training, trained: Sequence[Sequence[Trained]]) -> None:
    whole = unsharded(partial(train_unsharded, training))
    for number, expected in enumerate(whole):
        ranks = [rank[number] for rank in trained]
        assert_equal(put_together([r.gradients for r in ranks], training.mesh), expected.gradients)
        assert_equal(put_together([r.weights for r in ranks], training.mesh), expected.weights)


# ---------------------------------------------------------------------- counts

STEP = "fsdp_core::step"


def begin_step(number: int) -> None:
    """Mark the beginning of a step in the trace."""
    with record_function(f"{STEP} {number}"):
        pass


def ops_by_step(report: fsdp_sim.Report, rank: int = 0) -> list[list[Op]]:
    """A rank's ops behind each mark of `begin_step`."""
    steps: list[list[Op]] = []
    for op in report.trace.all_ops():
        if op.rank != rank:
            continue
        if op.kind is Kind.RANGE_PUSH and op.name.startswith(STEP):
            steps.append([])
        elif steps:
            steps[-1].append(op)
    return steps


def collectives(ops: Sequence[Op], *, gathers: bool) -> list[str]:
    """The units whose weights were gathered, or whose gradients were reduced, in order of issue."""
    label = "fsdp_core::unshard " if gathers else "fsdp_core::reduce_gradients "
    return [
        op.annotation.removeprefix(label)
        for op in ops
        if op.kind is Kind.COLLECTIVE and op.annotation and op.annotation.startswith(label)
    ]


def gathered(ops: Sequence[Op]) -> list[str]:
    """The units whose weights were gathered."""
    return collectives(ops, gathers=True)


def reduced(ops: Sequence[Op]) -> list[str]:
    """The units whose gradients were reduced."""
    return collectives(ops, gathers=False)


def entered(ops: Sequence[Op], phase: str) -> Iterator[str]:
    """The units that entered a phase ("forward", "backward"), in order."""
    label = f"fsdp_core::{phase} "
    for op in ops:
        if op.kind is Kind.RANGE_PUSH and op.name.startswith(label):
            yield op.name.removeprefix(label)
