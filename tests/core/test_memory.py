"""Memory: what stays between passes, and how many full buffers a backward has at a time."""

import gc
import time  # noqa: TID251  what other threads hold can be waited for by the clock alone
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import fsdp_core
import fsdp_sim
from fsdp_core import FsdpModule, MixedPrecisionPolicy, Placements, RuntimePolicy
from fsdp_core.parameter_group import ParameterGroup
from fsdp_core.unit import ShardedUnit
from fsdp_sim.analysis import analyse
from fsdp_sim.checkers import make as make_checkers
from fsdp_sim.checkers.memory_peak import MemoryPeak
from tests.cases.programs import (
    Row,
    assert_resting,
    batch,
    fill,
    linear,
    loss_of,
    shard,
)
from tests.core.worlds import need_gpu, on_ranks, world_size

R, P, S = Replicate(), Partial("avg"), Shard(0)
ZERO_1 = Placements((0,), (R,), (P,), (S,))
ZERO_2 = Placements((0,), (R,), (S,), (S,))
ZERO_3 = Placements((0,), (S,), (S,), (S,))


def group_of(module: nn.Module) -> ParameterGroup:
    """The only parameter group of a unit."""
    assert isinstance(module, FsdpModule)
    (group,) = module.fsdp_unit.groups
    return group


def storages(group: ParameterGroup) -> dict[int, int]:
    """Bytes of each storage that a group's buffers hold, by address."""
    buffers = [group.main_weight, group.full_weight, group.final_grad]
    found = {}
    for buffer in buffers:
        storage = buffer.flat.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found


@pytest.mark.everywhere
@pytest.mark.parametrize(
    ("placements", "compute", "nbytes"),
    [
        # 8 rows of 2 over 2 ranks: a shard is 8 elements, the whole is 16.
        (ZERO_3, None, [32, 32]),  # main weight, main gradient
        (ZERO_3, torch.bfloat16, [32, 32]),  # compute weights exist while they are used only
        (ZERO_2, None, [32, 64]),  # gradient shard, whole weights that the main ones are part of
        (ZERO_1, None, [64, 64]),  # whole gradients, whole weights
        (ZERO_1, torch.bfloat16, [32, 32, 64]),  # main shard, whole bf16 weights, whole gradients
    ],
)
def test_what_stays_between_passes(
    placements: Placements, compute: torch.dtype | None, nbytes: list[int]
) -> None:
    """No more than the placements keep; weights of one dtype share their storage."""

    def body(rank: int) -> list[int]:
        policy = MixedPrecisionPolicy(compute_dtype=compute)
        model = fill(linear(8, 2))
        shard(model, "", placements=placements, mixed_precision_policy=policy)
        y = model(batch(rank).to(compute or torch.float32))
        loss_of(y.float(), rank).backward()
        assert_resting(model)
        return sorted(storages(group_of(model)).values())

    assert on_ranks(body, 2) == [nbytes] * 2


def gradient_nbytes(model: nn.Module) -> int:
    """Bytes that the gradients of the only group of a unit have now."""
    return group_of(model).final_grad.flat.untyped_storage().nbytes()


def gradient_of(model: nn.Module) -> DTensor:
    """The gradient of a linear unit's weight."""
    gradient = model.get_parameter("weight").grad
    assert isinstance(gradient, DTensor)
    return gradient


@pytest.mark.everywhere
@pytest.mark.parametrize("placements", [ZERO_1, ZERO_2, ZERO_3])
def test_dropped_gradients_have_no_memory_through_a_forward(placements: Placements) -> None:
    """They get it with the first reduction, and lose it to the next training forward."""

    def body(rank: int) -> list[bool]:
        shard(model := fill(linear(8, 2)), "", placements=placements)
        has_memory = [gradient_nbytes(model) > 0]
        for _ in range(2):
            loss = loss_of(model(batch(rank)), rank)
            has_memory.append(gradient_nbytes(model) > 0)
            loss.backward()
            has_memory.append(gradient_nbytes(model) > 0)
            model.zero_grad()
        return has_memory

    assert on_ranks(body, 2) == [[False, False, True, False, True]] * 2


@pytest.mark.everywhere
def test_gradients_to_add_to_keep_their_memory() -> None:
    """A second backward without zero_grad doubles them."""

    def body(rank: int) -> None:
        shard(model := fill(linear(8, 2)), "")
        loss_of(model(batch(rank)), rank).backward()
        first = gradient_of(model).to_local().clone()
        loss_of(model(batch(rank)), rank).backward()
        assert torch.equal(gradient_of(model).to_local(), 2 * first)

    on_ranks(body, 2)


@pytest.mark.everywhere
@pytest.mark.parametrize("held", [lambda grad: grad, lambda grad: grad.to_local()[1:]])
def test_a_gradient_that_somebody_holds_keeps_its_memory(held: Callable[[DTensor], Tensor]) -> None:
    """Also a view of one; its values are intact after zero_grad and a forward."""

    def body(rank: int) -> None:
        shard(model := fill(linear(8, 2)), "")
        loss_of(model(batch(rank)), rank).backward()
        kept = held(gradient_of(model))
        before = kept.clone()
        model.zero_grad()
        model(batch(rank))
        assert gradient_nbytes(model) > 0
        assert torch.equal(kept, before)
        del kept
        model(batch(rank))
        assert gradient_nbytes(model) == 0

    on_ranks(body, 2)


@pytest.mark.everywhere
def test_an_evaluation_takes_no_memory_from_gradients() -> None:
    """Dropped or not: a reduction may follow without a forward."""

    def body(rank: int) -> None:
        shard(model := fill(linear(8, 2)), "")
        loss_of(model(batch(rank)), rank).backward()
        model.zero_grad()
        with torch.no_grad():
            model(batch(rank))
        assert gradient_nbytes(model) > 0

    on_ranks(body, 2)


@pytest.mark.everywhere
def test_views_of_released_weights_come_back_to_life() -> None:
    """What autograd saved, also views that are no leaves, sees the regathered weights."""

    class Transposed(nn.Module):
        """Saves a view of its weight."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Return x times the weight's transposed."""
            return x @ self.weight.t()[:]

    def body(rank: int) -> None:
        shard(model := fill(Transposed()), "")
        loss = loss_of(model(batch(rank).requires_grad_()), rank)
        flat = group_of(model).full_weight.flat
        assert flat.untyped_storage().nbytes() == 0
        loss.backward()
        assert flat.untyped_storage().nbytes() == 0

    on_ranks(body, 2)


def peak_full_buffers(policy: RuntimePolicy) -> float:
    """Return the peak bytes of one step beyond those at rest, in full weights of one unit."""
    width = 64

    class Layers(nn.Module):
        """Equal layers, with activations that are small beside their weights."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(linear(width, width) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Call them in turn."""
            for layer in self.layers:
                x = layer(x)
            return x

    def body(_rank: int) -> None:
        model = Layers()
        context = shard(model, *(f"layers.{n}" for n in range(4)), "", runtime_policy=policy)
        x = torch.ones(1, width)
        for _ in range(2):
            model(x).sum().backward()
        assert context.stats.full_nbytes == 0

    report = fsdp_sim.simulate(body, 2, trace=True)
    analysis = analyse(report.trace.all_ops(), make_checkers(("memory_peak",)), 2)
    checker = analysis.checker(MemoryPeak)
    assert checker is not None
    weight = 4 * width * width
    # At rest: a shard of weights and one of gradients for each of four layers.
    resting = 4 * 2 * weight / 2
    return (checker.peaks(0).requested - resting) / weight


@pytest.mark.parametrize("overlap", [True, False])
def test_backward_has_three_full_buffers_at_most(*, overlap: bool) -> None:
    """Two units' weights and one's gradients; then one's weights, gradients and reduction input."""
    policy = RuntimePolicy(overlap_allgather_reduction=overlap)

    assert 3.0 <= peak_full_buffers(policy) < 3.2


def test_reducing_before_resharding_takes_a_full_buffer_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order of the two is what the bound rests on."""

    def finish_late(unit: ShardedUnit) -> None:
        unit.gradients.reduce()
        unit._leave_weights()
        unit._close()

    monkeypatch.setattr(ShardedUnit, "_finish_gradients", finish_late)

    assert peak_full_buffers(RuntimePolicy()) >= 4.0


@pytest.mark.everywhere
def test_forward_has_the_current_and_the_prefetched_unit_at_most() -> None:
    """Whatever the number of layers."""

    def body(rank: int) -> list[int]:
        seen = []
        for count in (2, 4, 8):
            names = [f"l{number}" for number in range(count)]
            context = shard(model := fill(Row(*names)), *names, "")
            with torch.no_grad():
                model(batch(rank))
            seen.append(context.stats.peak_full_nbytes)
        return seen

    assert on_ranks(body, 2) == [[2 * 16] * 3] * 2


LAYERS = 16


def peak_nbytes(placements: Placements | None) -> int:
    """Return the most bytes a rank has at a time in two AdamW steps; unsharded without placements."""
    width = 32

    def body(_rank: int) -> None:
        model = nn.Sequential(*(linear(width, width) for _ in range(LAYERS)))
        if placements is not None:
            shard(model, *(str(number) for number in range(LAYERS)), "", placements=placements)
        optimizer = torch.optim.AdamW(model.parameters())
        if placements is not None:
            fsdp_core.fully_shard_optimizer(optimizer)
        for _ in range(2):
            model(torch.ones(1, width)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    report = fsdp_sim.simulate(body, 2, trace=True, checkers=())
    checker = analyse(report.trace.all_ops(), make_checkers(("memory_peak",)), 2).checker(
        MemoryPeak
    )
    assert checker is not None
    return checker.peaks(0).requested


def test_each_stage_of_sixteen_layers_peaks_below_the_one_before() -> None:
    """And the first below the unsharded model, the weights at the start included."""
    peaks = [peak_nbytes(placements) for placements in (ZERO_3, ZERO_2, ZERO_1, None)]

    assert peaks == sorted(peaks)
    assert len(set(peaks)) == len(peaks)


@pytest.mark.everywhere
def test_an_optimizer_has_no_more_state_than_shards_of_it() -> None:
    """Adam has two tensors like each shard, beside counters of one element."""

    def body(rank: int) -> list[int]:
        shard(model := fill(linear(8, 2)), "", placements=ZERO_1)
        optimizer = fsdp_core.fully_shard_optimizer(torch.optim.Adam(model.parameters()))
        loss_of(model(batch(rank)), rank).backward()
        optimizer.step()
        (state,) = optimizer.state.values()
        values = [v.to_local() if isinstance(v, DTensor) else v for v in state.values()]
        return sorted(value.untyped_storage().nbytes() for value in values)

    # 8 rows of 2 over 2 ranks in fp32.
    assert on_ranks(body, 2) == [[4, 32, 32]] * 2


# ---------------------------------------------------------------------- the allocator of a GPU


def step_on_gpu(model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> int:
    """Train a step, and return the bytes that are allocated behind it."""
    model(torch.ones(2, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)  # gloo's threads hold what they reduced a moment longer than they need it
    return torch.cuda.memory_allocated()


@pytest.mark.everywhere
@pytest.mark.parametrize("placements", [ZERO_1, ZERO_2, ZERO_3], ids=["ZeRO-1", "ZeRO-2", "ZeRO-3"])
def test_a_gpu_gets_all_memory_back(placements: Placements) -> None:
    """Between steps not a byte more than after the first; nothing when the model is deleted."""
    need_gpu()
    width = 256

    def body(_rank: int) -> tuple[list[int], int]:
        plain = nn.Linear(width, width)  # what PyTorch takes once for products, and keeps
        step_on_gpu(plain, torch.optim.AdamW(plain.parameters()), width)
        del plain
        gc.collect()  # what earlier tests left
        before = torch.cuda.memory_allocated()
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        shard(model, "0", "1", "2", "3", "", mesh=(world_size(4),), placements=placements)
        optimizer = fsdp_core.fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
        seen = [step_on_gpu(model, optimizer, width) for _ in range(3)]
        gc.disable()
        del model, optimizer
        left = torch.cuda.memory_allocated() - before
        gc.enable()
        return seen, left

    for seen, left in on_ranks(body, world_size(4)):
        assert seen == seen[:1] * 3
        assert left == 0
