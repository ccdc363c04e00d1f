"""Packed point-to-point: owners get whole tensors, holders get their rows back."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard

import fsdp_sim
from fsdp_core import device as accelerator
from fsdp_core.dbuffer import DBuffer
from fsdp_core.errors import StateError
from fsdp_core.gather_scatter import gather_to_owners, scatter_from_owners
from fsdp_core.owner_planning import OwnerPlan, assign_owners, list_holders, plan_owner
from tests.core.worlds import make_mesh, need_point_to_point, on_ranks

SHAPES = [(6, 4), (4, 4), (3,), (5, 1, 2)]
MATRICES = [0, 1, 3]


def make_tensors() -> list[Tensor]:
    """Small integers, different everywhere."""
    return [
        (torch.arange(float(torch.Size(shape).numel())) + 100 * index).view(shape)
        for index, shape in enumerate(SHAPES)
    ]


def make_buffer_and_plan(rank: int) -> tuple[DBuffer, OwnerPlan]:
    """A row-sharded buffer over all ranks, with its matrices assigned."""
    mesh = make_mesh(dist.get_world_size())
    buffer = DBuffer.distribute_tensors(make_tensors(), mesh, [Shard(0)])
    axes, layout = buffer.axes, buffer.layout
    holders = list_holders(
        layout, axes.sizes, buffer.placements, axes.coordinate, lambda place: place[0]
    )
    owners = assign_owners(layout, holders, MATRICES).owners
    return buffer, plan_owner(layout, holders, owners, rank)


def rows_of(buffer: DBuffer) -> dict[int, Tensor]:
    """This rank's rows of each matrix."""
    return {index: buffer.get_tensor_view(index) for index in MATRICES}


def gathers_and_scatters(rank: int) -> None:
    """Owners get exact tensors; what they send back arrives, and nothing else is written."""
    buffer, plan = make_buffer_and_plan(rank)

    wholes = gather_to_owners(plan, rows_of(buffer))
    assert tuple(wholes) == plan.owned
    assert all(torch.equal(whole, make_tensors()[index]) for index, whole in wholes.items())

    bits = buffer.flat.view(torch.int32)  # padding is not initialised, and may be NaN
    before = bits.clone()
    scatter_from_owners(plan, wholes, rows_of(buffer))
    assert torch.equal(bits, before)

    scatter_from_owners(plan, {i: 2 * whole for i, whole in wholes.items()}, rows_of(buffer))
    for index, tensor in enumerate(make_tensors()):
        chunk = buffer.get_tensor_chunk(index)
        rows = tensor[chunk.offsets[0] : chunk.offsets[0] + chunk.sizes[0]]
        factor = 2 if index in MATRICES else 1
        assert torch.equal(buffer.get_tensor_view(index), factor * rows)


@pytest.mark.everywhere
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_what_is_gathered_and_scattered_is_the_same(world_size: int) -> None:
    """Also where some ranks hold nothing."""
    need_point_to_point()
    on_ranks(gathers_and_scatters, world_size)


@pytest.mark.parametrize(("waits", "found"), [(True, []), (False, ["Race"])])
def test_on_a_side_stream_the_caller_waits(waits: bool, found: list[str]) -> None:
    """Order with other streams is the caller's business; inside the stream nothing is missing."""

    def program(rank: int) -> None:
        buffer, plan = make_buffer_and_plan(rank)
        side = accelerator.new_stream(torch.device("cpu"))
        current = accelerator.current_stream(torch.device("cpu"))
        accelerator.wait_stream(side, current)
        with accelerator.on_stream(side):
            wholes = gather_to_owners(plan, rows_of(buffer))
            scatter_from_owners(plan, wholes, rows_of(buffer))
        if waits:
            accelerator.wait_stream(current, side)
        buffer.flat.add_(1)

    report = fsdp_sim.simulate(program, 2, strict=False)

    assert sorted({finding.kind for finding in report.findings}) == found


@pytest.mark.everywhere
def test_a_rank_with_nothing_to_send_makes_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that are whole on their owner take no message."""

    def refuse(*_operations: object) -> None:
        msg = "called"
        raise AssertionError(msg)

    monkeypatch.setattr(dist, "batch_isend_irecv", refuse)

    on_ranks(gathers_and_scatters, 1)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (
            lambda plan, rows: gather_to_owners(plan, {0: rows[0]}),
            "the source of tensor 1 must have 16 elements, got none; pass one made for this plan",
        ),
        (
            lambda plan, rows: gather_to_owners(plan, {**rows, 0: rows[1]}),
            "the source of tensor 0 must have 24 elements, got 16; pass one made for this plan",
        ),
        (
            lambda plan, rows: scatter_from_owners(plan, rows, {}),
            "the destination of tensor 0 must have 24 elements, got none; pass one made for this plan",
        ),
        (
            lambda plan, rows: scatter_from_owners(plan, {}, rows),
            "the whole tensor of tensor 0 must have 24 elements, got none; pass one made for this plan",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_plan_are_refused(
    lone_process: None, break_it: Callable[[OwnerPlan, dict[int, Tensor]], object], message: str
) -> None:
    """Before anything is sent."""
    buffer, plan = make_buffer_and_plan(0)

    with pytest.raises(StateError) as caught:
        break_it(plan, rows_of(buffer))

    assert str(caught.value) == message
