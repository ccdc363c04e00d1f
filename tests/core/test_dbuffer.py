"""DBuffer: values under every change of placements, storage, views, and what it refuses."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fsdp_core.dbuffer import Chunk, DBuffer
from fsdp_core.errors import ConfigError, UnsupportedError
from fsdp_core.layout import GlobalLayout
from fsdp_core.layout_builder import (
    build_for_row_atomic,
    build_for_row_atomic_unpadding,
    build_for_tensor_atomic,
)
from fsdp_core.placement import BlockAtomic, RowAtomic, TensorAtomic
from tests.core.worlds import Body, device_type, make_mesh, on_ranks

R, S, AVG, SUM = Replicate(), Shard(0), Partial("avg"), Partial("sum")
SHAPES = [(5, 4), (2, 6), (3,)]
BUILDERS = [build_for_row_atomic, build_for_row_atomic_unpadding]


def make_tensors(factor: float = 1.0) -> list[Tensor]:
    """Small integers, different everywhere."""
    numels = [torch.Size(shape).numel() for shape in SHAPES]
    return [
        (torch.arange(float(numel)) + 100 * index).view(shape) * factor
        for index, (numel, shape) in enumerate(zip(numels, SHAPES, strict=True))
    ]


def assert_holds(buffer: DBuffer, tensors: Sequence[Tensor]) -> None:
    """Each rank's view of each tensor is the rows its chunk says."""
    for index, tensor in enumerate(tensors):
        chunk = buffer.get_tensor_chunk(index)
        rows = tensor[chunk.offsets[0] : chunk.offsets[0] + chunk.sizes[0]]
        assert torch.equal(rows, buffer.get_tensor_view(index))


def placement_lists(ndim: int) -> list[list[Any]]:
    """All lists of replicated outer and sharded inner axes."""
    return [[R] * (ndim - count) + [S] * count for count in range(ndim + 1)]


# -- bodies: one rank's program, on any backend ------------------------------------------------


def gathers_and_slices(shape: tuple[int, ...], rank: int) -> None:
    """From every list of placements to every other one, with and without `out`."""
    mesh = make_mesh(*shape)
    for build in BUILDERS:
        layout = build(SHAPES, mesh.size())
        for source in placement_lists(mesh.ndim):
            buffer = DBuffer.distribute_tensors(make_tensors(), mesh, source, layout)
            assert_holds(buffer, make_tensors())
            for target in placement_lists(mesh.ndim):
                assert_holds(buffer.redistribute(target), make_tensors())
                out = DBuffer.empty(mesh, target, layout, torch.float32)
                assert buffer.redistribute(target, out=out) is out
                assert_holds(out, make_tensors())
            assert_holds(buffer, make_tensors())


def reductions(shape: tuple[int, ...], rank: int) -> None:
    """Sums and averages to every list of placements, also into a part of the source itself."""
    mesh = make_mesh(*shape)
    total = mesh.size() * (mesh.size() + 1) / 2
    for build in BUILDERS:
        layout = build(SHAPES, mesh.size())
        for op, factor in ((SUM, total), (AVG, total / mesh.size())):
            for target in placement_lists(mesh.ndim):
                for in_place in (False, True):
                    contribution = DBuffer.distribute_tensors(
                        make_tensors(rank + 1), mesh, [op] * mesh.ndim, layout
                    )
                    out = contribution.view(target) if in_place else None
                    assert_holds(contribution.redistribute(target, out=out), make_tensors(factor))
                    if not in_place and layout.has_equal_shard_sizes:
                        assert_holds(contribution, make_tensors(rank + 1))


def partly_reduced(rank: int) -> None:
    """On (outer, inner): inner first, outer later, as hybrid sharding does."""
    mesh = make_mesh(2, 2)
    buffer = DBuffer.distribute_tensors(make_tensors(rank + 1), mesh, [AVG, AVG])

    inner = buffer.redistribute([AVG, S])
    assert_holds(inner, make_tensors((2 * (rank // 2 * 2) + 3) / 2))
    assert_holds(inner.redistribute([R, S]), make_tensors(2.5))
    assert_holds(inner.redistribute([S, S]), make_tensors(2.5))
    assert_holds(inner.redistribute([R, R]), make_tensors(2.5))


def whole_tensors(rank: int) -> None:
    """Unequal shards, one of them empty."""
    mesh = make_mesh(dist.get_world_size())
    layout = build_for_tensor_atomic(SHAPES, mesh.size(), [1, 0, 1])
    buffer = DBuffer.distribute_tensors(make_tensors(), mesh, [TensorAtomic()], layout)
    rows = [len(buffer.get_tensor_view(index)) for index in range(3)]
    assert rows == {0: [0, 2, 0], 1: [5, 0, 3]}.get(rank, [0, 0, 0])

    assert_holds(buffer.redistribute([R]), make_tensors())
    summands = DBuffer.distribute_tensors(make_tensors(rank + 1), mesh, [SUM], layout)
    total = mesh.size() * (mesh.size() + 1) / 2
    assert_holds(summands.redistribute([TensorAtomic()]), make_tensors(total))


def refilled_storage(rank: int) -> None:
    """Views taken before a release see what is gathered after a reallocation."""
    mesh = make_mesh(dist.get_world_size())
    shard = DBuffer.distribute_tensors(make_tensors(), mesh, [S])
    full = DBuffer.empty(mesh, [R], shard.layout, torch.float32)
    views = [full.get_tensor_view(index) for index in range(3)]
    version = full.flat._version

    full.release_storage()
    assert full.is_released
    assert full.flat.untyped_storage().nbytes() == 0
    full.reallocate_storage()
    shard.redistribute([R], out=full)

    wholes = make_tensors()
    assert all(torch.equal(view, wholes[index]) for index, view in enumerate(views))
    assert full.flat._version == version
    assert not full.is_released


def cast_into_own_slice(rank: int) -> None:
    """A gather whose input is already in its place in the output."""
    mesh = make_mesh(dist.get_world_size())
    shard = DBuffer.distribute_tensors(make_tensors(), mesh, [S])
    full = DBuffer.empty(mesh, [R], shard.layout, torch.bfloat16)

    own = shard.cast(torch.bfloat16, out=full.view([S]))
    own.redistribute([R], out=full)

    assert_holds(full, [tensor.bfloat16() for tensor in make_tensors()])


def planned_gather(rank: int) -> None:
    """A planned redistribution does the same each time, into whatever memory is there by then."""
    mesh = make_mesh(dist.get_world_size())
    shard = DBuffer.distribute_tensors(make_tensors(), mesh, [S])
    full = DBuffer.empty(mesh, [R], shard.layout, torch.bfloat16)
    version = full.flat._version
    gather = shard.redistribution(full)

    for factor in (1, 2):
        full.release_storage()
        full.reallocate_storage()
        gather()
        assert_holds(full, [tensor.bfloat16() for tensor in make_tensors(factor)])
        shard.flat.mul_(2)

    assert full.flat._version == version


def whole_blocks(rank: int) -> None:
    """Blocks of two rows, on as many ranks as there are."""
    mesh = make_mesh(dist.get_world_size())
    tensors = [torch.arange(24.0).view(6, 4), torch.arange(6.0).view(2, 3)]
    layout = build_for_row_atomic([(6, 4), (2, 3)], mesh.size(), block_size=2)
    buffer = DBuffer.distribute_tensors(tensors, mesh, [BlockAtomic(2)], layout)

    assert all(len(buffer.get_tensor_view(index)) % 2 == 0 for index in range(2))
    assert_holds(buffer.redistribute([R]), tensors)


BODIES_OF_1: list[Body] = [
    partial(gathers_and_slices, (1,)),
    partial(reductions, (1,)),
    refilled_storage,
    cast_into_own_slice,
    planned_gather,
    whole_blocks,
]
BODIES_OF_2: list[Body] = [
    partial(gathers_and_slices, (2,)),
    partial(reductions, (2,)),
    whole_tensors,
    refilled_storage,
    cast_into_own_slice,
    planned_gather,
    whole_blocks,
]
BODIES_OF_4: list[Body] = [
    partial(gathers_and_slices, (2, 2)),
    partial(reductions, (2, 2)),
    partial(gathers_and_slices, (1, 2, 2)),
    partial(reductions, (2, 1, 2)),
    partly_reduced,
    whole_tensors,
    whole_blocks,
    refilled_storage,
    cast_into_own_slice,
    planned_gather,
]


def name_of(body: Any) -> str:
    """The id of a parametrised body."""
    return str(getattr(body, "func", body).__name__)


@pytest.mark.everywhere
@pytest.mark.parametrize("body", BODIES_OF_2, ids=name_of)
def test_on_two_ranks(body: Body) -> None:
    """Values are exact, and no ordering is missing."""
    on_ranks(body, 2)


@pytest.mark.everywhere
@pytest.mark.parametrize("body", BODIES_OF_4, ids=name_of)
def test_on_four_ranks(body: Body) -> None:
    """The same on two axes."""
    on_ranks(body, 4)


@pytest.mark.everywhere
@pytest.mark.parametrize("body", BODIES_OF_1, ids=name_of)
def test_on_one_rank(body: Body) -> None:
    """The same collectives at world size 1."""
    on_ranks(body, 1)


@pytest.mark.everywhere
@settings(max_examples=12)  # each example is a world
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=3),
    st.integers(1, 3),
    st.sampled_from(BUILDERS),
)
def test_gathering_what_was_sharded_gives_it_back(
    shapes: list[tuple[int, ...]], world_size: int, build: Callable[..., GlobalLayout]
) -> None:
    """For any shapes, fewer rows than ranks and none at all included."""
    tensors = [torch.arange(float(torch.Size(shape).numel())).view(shape) for shape in shapes]

    def program(rank: int) -> None:
        mesh = make_mesh(world_size)
        buffer = DBuffer.distribute_tensors(tensors, mesh, [S], build(shapes, world_size))
        full = buffer.redistribute([R])
        for index, tensor in enumerate(tensors):
            assert torch.equal(full.get_tensor_view(index), tensor)

    on_ranks(program, world_size)


# -- one process is enough ---------------------------------------------------------------------


@pytest.fixture
def mesh(lone_process: None) -> DeviceMesh:
    """A mesh of this process alone."""
    return make_mesh(1)


def test_nothing_to_change_gives_the_buffer_itself(mesh: DeviceMesh) -> None:
    """No copy, no collective."""
    buffer = DBuffer.distribute_tensors(make_tensors(), mesh, [S])

    assert buffer.redistribute([RowAtomic()]) is buffer
    assert buffer.view([S]) is buffer
    assert buffer.cast(torch.float32) is buffer


def test_a_cast_keeps_the_layout_and_fills_out(mesh: DeviceMesh) -> None:
    """Every element is converted, padding included."""
    buffer = DBuffer.distribute_tensors(make_tensors(), mesh, [S])
    out = DBuffer.empty(mesh, [S], buffer.layout, torch.bfloat16)

    converted = buffer.cast(torch.bfloat16)

    assert converted.layout is buffer.layout
    assert_holds(converted, [tensor.bfloat16() for tensor in make_tensors()])
    assert buffer.cast(torch.bfloat16, out=out) is out
    assert_holds(out, [tensor.bfloat16() for tensor in make_tensors()])


def test_a_target_that_is_no_placement_is_refused(mesh: DeviceMesh) -> None:
    """Before anything is sent."""
    buffer = DBuffer.distribute_tensors(make_tensors(), mesh, [S])

    with pytest.raises(ConfigError, match=r"^placements must be Replicate, Partial or Shard"):
        buffer.redistribute(["S(0)"])  # type: ignore[list-item]


def test_partial_to_the_same_partial_copies_into_out(mesh: DeviceMesh) -> None:
    """Gradients that stay partial between microbatches take no collective."""
    buffer = DBuffer.distribute_tensors(make_tensors(), mesh, [AVG])
    out = DBuffer.empty(mesh, [AVG], buffer.layout, torch.float32)

    assert buffer.redistribute([AVG]) is buffer
    assert_holds(buffer.redistribute([AVG], out=out), make_tensors())
    assert out.flat.data_ptr() != buffer.flat.data_ptr()


def test_a_slice_shares_storage_and_a_copy_does_not(mesh: DeviceMesh) -> None:
    """Replicate to shard is a view, unless there is an `out`."""
    buffer = DBuffer.distribute_tensors(make_tensors(), mesh, [R])
    out = DBuffer.empty(mesh, [S], buffer.layout, torch.float32)

    assert buffer.redistribute([S]).flat.data_ptr() == buffer.flat.data_ptr()
    assert buffer.redistribute([S], out=out).flat.data_ptr() != buffer.flat.data_ptr()


def test_replicate_becomes_partial_avg_without_communication(mesh: DeviceMesh) -> None:
    """Every rank holds the average already."""
    buffer = DBuffer.distribute_tensors(make_tensors(), mesh, [R])

    relabelled = buffer.redistribute([AVG])

    assert relabelled.placements == (AVG,)
    assert relabelled.flat is buffer.flat


def test_from_local_shares_storage(mesh: DeviceMesh) -> None:
    """The buffer is the tensor that came."""
    layout = build_for_row_atomic([(2, 2)], 1)
    local = torch.arange(4.0)

    buffer = DBuffer.from_local(local, mesh, [S], layout)

    assert buffer.flat.data_ptr() == local.data_ptr()


@pytest.mark.parametrize("local", [torch.empty(5), torch.empty(2, 2), torch.empty(8)[::2]])
def test_a_local_tensor_of_another_form_is_refused(mesh: DeviceMesh, local: Tensor) -> None:
    """It must be flat, contiguous and as long as the range."""
    layout = build_for_row_atomic([(2, 2)], 1)

    with pytest.raises(ConfigError) as caught:
        DBuffer.from_local(local, mesh, [S], layout)

    assert str(caught.value) == (
        f"local must be contiguous and of shape (4,), got shape {tuple(local.shape)} "
        f"with strides {local.stride()}; pass this rank's piece, flat"
    )


def test_parameters_are_detached_and_made_contiguous(mesh: DeviceMesh) -> None:
    """The buffer takes no part in autograd, whatever it is filled from."""
    weight = torch.arange(6.0).view(2, 3).t().requires_grad_()

    buffer = DBuffer.distribute_tensors([weight], mesh, [S])

    assert torch.equal(buffer.get_tensor_view(0), weight)
    assert not buffer.flat.requires_grad


def test_a_buffer_made_in_inference_mode_can_be_trained_with(mesh: DeviceMesh) -> None:
    """Neither it nor its views are inference tensors, and it can be gathered there."""
    with torch.inference_mode():
        buffer = DBuffer.distribute_tensors(make_tensors(), mesh, [S])
        full = buffer.redistribute([R])
        view = full.get_tensor_view(0)

    assert not buffer.flat.is_inference()
    assert not view.is_inference()
    assert torch.equal(view, make_tensors()[0])


def test_meta_tensors_give_their_shapes_alone(mesh: DeviceMesh) -> None:
    """The elements stay uninitialised, on the mesh's device."""
    metas = [torch.empty(shape, device="meta") for shape in SHAPES]

    buffer = DBuffer.distribute_tensors(metas, mesh, [S])

    assert buffer.flat.device.type == "cpu"
    assert [buffer.get_tensor_view(index).shape for index in range(3)] == [*map(torch.Size, SHAPES)]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([], "a buffer needs at least one tensor, got none; pass one, which may be empty"),
        (
            [torch.empty(1), torch.empty(1, dtype=torch.bfloat16)],
            (
                "the tensors of one buffer must have one dtype, got [torch.float32, torch.bfloat16]; "
                "use one buffer each"
            ),
        ),
        (
            [torch.empty(3, 1)],
            "the layout must be built for shapes ((3, 1),), got ((2, 2),); build it from these tensors, or leave it out",
        ),
    ],
)
def test_tensors_that_make_no_buffer_are_refused(
    mesh: DeviceMesh, tensors: list[Tensor], message: str
) -> None:
    """None, several dtypes, or other shapes than the layout's."""
    layout = build_for_row_atomic([(2, 2)], 1)

    with pytest.raises(ConfigError) as caught:
        DBuffer.distribute_tensors(tensors, mesh, [S], layout)

    assert str(caught.value) == message


def test_a_tensor_of_another_shape_is_not_copied(mesh: DeviceMesh) -> None:
    """The message has both shapes."""
    buffer = DBuffer.distribute_tensors(make_tensors(), mesh, [S])

    with pytest.raises(ConfigError) as caught:
        buffer.copy_from(1, torch.empty(6, 2))

    assert (
        str(caught.value)
        == "tensor 1 of the buffer must have shape (2, 6), got (6, 2); pass the whole tensor"
    )


def test_an_out_that_is_not_the_result_is_refused(mesh: DeviceMesh) -> None:
    """Each difference has its message."""
    buffer = DBuffer.distribute_tensors(make_tensors(), mesh, [S])
    other = build_for_row_atomic([(32, 2)], 1)
    wrong: dict[str, tuple[list[Any], GlobalLayout, torch.dtype]] = {
        f"placements {(R,)}, got {(RowAtomic(),)}": ([S], buffer.layout, torch.float32),
        "dtype torch.float32, got torch.bfloat16": ([R], buffer.layout, torch.bfloat16),
        "the layout of this buffer, got another one": ([R], other, torch.float32),
    }

    for problem, (placements, layout, dtype) in wrong.items():
        out = DBuffer.empty(mesh, placements, layout, dtype)
        with pytest.raises(ConfigError) as caught:
            buffer.redistribute([R], out=out)
        assert str(caught.value) == f"out must have {problem}; allocate it so, or leave it out"


@pytest.mark.everywhere
def test_a_view_outside_the_own_range_is_refused() -> None:
    """It would need communication."""

    def program(rank: int) -> None:
        mesh = make_mesh(2)
        buffer = DBuffer.distribute_tensors(make_tensors(), mesh, [S])
        with pytest.raises(ConfigError, match=r"^a view must lie inside this rank's range .+"):
            buffer.view([R])

    on_ranks(program, 2)


@pytest.mark.everywhere
def test_a_view_of_part_of_a_row_is_refused() -> None:
    """A buffer for whole tensors of other shapes splits this one inside a row."""

    def program(rank: int) -> None:
        mesh = make_mesh(2)
        layout = GlobalLayout(((2, 3),), (0,), 6, (0, 2))
        buffer = DBuffer.empty(mesh, [S], layout, torch.float32)
        with pytest.raises(UnsupportedError, match=r"^a view of tensor 0 needs whole rows of 3"):
            buffer.get_tensor_view(0)

    on_ranks(program, 2)


def test_placements_of_another_number_of_axes_are_refused(mesh: DeviceMesh) -> None:
    """One for each axis of the mesh."""
    layout = build_for_row_atomic([(2, 2)], 1)

    with pytest.raises(ConfigError) as caught:
        DBuffer.empty(mesh, [R, S], layout, torch.float32)

    assert (
        str(caught.value)
        == "a mesh of 1 axes must have as many placements, got 2; pass one for each axis"
    )


@pytest.mark.everywhere
def test_a_rank_outside_of_the_mesh_is_refused() -> None:
    """It has no piece; the ranks of the mesh go on."""

    def program(rank: int) -> str:
        mesh = DeviceMesh(device_type(), [0])
        if rank == 0:
            DBuffer.distribute_tensors([torch.ones(2)], mesh, [S])
            return ""
        with pytest.raises(ConfigError) as caught:
            DBuffer.distribute_tensors([torch.ones(2)], mesh, [S])
        assert str(mesh) in str(caught.value)
        return str(caught.value).replace(str(mesh), "MESH")

    message = "this rank must be part of the mesh, got MESH; shard on its own ranks only"
    assert on_ranks(program, 2) == ["", message]


@pytest.mark.everywhere
def test_a_mesh_whose_ranks_do_not_rise_is_refused() -> None:
    """A process group orders its ranks by number, and pieces would land in other places."""

    def program(rank: int) -> None:
        mesh = DeviceMesh(device_type(), [1, 0])
        with pytest.raises(ConfigError, match=r"^ranks must rise along each axis of the mesh"):
            DBuffer.distribute_tensors(make_tensors(), mesh, [S])

    on_ranks(program, 2)


@pytest.mark.everywhere
def test_a_dtensor_has_the_global_shape_and_the_true_rows() -> None:
    """16 rows lie 9 and 7; the chunk says so, where even arithmetic would say 8 and 8."""

    def program(rank: int) -> tuple[torch.Size, torch.Size, Chunk, Chunk]:
        mesh = make_mesh(2)
        buffer = DBuffer.distribute_tensors([torch.zeros(16, 8), torch.zeros(16)], mesh, [S])
        weight = buffer.get_dtensor(0)
        assert isinstance(weight, DTensor)
        assert weight.placements == (Shard(0),)
        assert type(weight.placements[0]) is Shard
        assert weight.stride() == (8, 1)
        chunks = buffer.get_tensor_chunk(0), buffer.get_tensor_chunk(1)
        return weight.shape, weight.to_local().shape, *chunks

    first, second = on_ranks(program, 2)

    shape = torch.Size([16, 8])
    assert first == (shape, torch.Size([9, 8]), Chunk((0, 0), (9, 8)), Chunk((0,), (0,)))
    assert second == (shape, torch.Size([7, 8]), Chunk((9, 0), (7, 8)), Chunk((0,), (16,)))


@pytest.mark.everywhere
def test_ten_rows_on_four_ranks_have_ten_rows_in_all() -> None:
    """The global shape is never guessed from a local one."""

    def program(rank: int) -> tuple[torch.Size, int]:
        mesh = make_mesh(4)
        dtensor = DBuffer.distribute_tensors([torch.zeros(10, 2)], mesh, [S]).get_dtensor(0)
        return dtensor.shape, len(dtensor.to_local())

    results = on_ranks(program, 4)

    assert results == [(torch.Size([10, 2]), rows) for rows in (3, 3, 3, 1)]


def test_only_what_comes_from_outside_counts_as_a_change(mesh: DeviceMesh) -> None:
    """Autograd's version counter moves with `copy_from`, not with `cast` and `redistribute`."""
    buffer = DBuffer.distribute_tensors(make_tensors(), mesh, [S])
    out = DBuffer.empty(mesh, [R], buffer.layout, torch.float32)
    version = out.flat._version

    buffer.redistribute([R], out=out)
    buffer.cast(torch.float32, out=out.view([S]))
    assert out.flat._version == version
    out.copy_from(0, make_tensors()[0])
    assert out.flat._version > version


def test_a_plan_is_made_once_for_each_pair_of_placements(mesh: DeviceMesh) -> None:
    """A step pays for collectives, not for arithmetic."""
    buffer = DBuffer.distribute_tensors(make_tensors(), mesh, [S])
    full = buffer.redistribute([R])
    plans = dict(buffer._stages)

    buffer.redistribute([R], out=full)

    assert all(buffer._stages[key] is plan for key, plan in plans.items())
