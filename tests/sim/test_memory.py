"""Memory: births and deaths of storages, what protects them, and that the simulator holds none."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import fsdp_sim
from fsdp_sim.op import Kind
from tests.sim.litmus import cpu, findings, on_one_rank, ops_of


def births_and_deaths(program: Callable[[], Any]) -> list[tuple[str, int]]:
    """Return each ALLOC and FREE, in order, with its block, numbered by birth."""
    ops = [op for op in ops_of(program) if op.kind in (Kind.ALLOC, Kind.FREE)]
    numbers = {op.other: number for number, op in enumerate(o for o in ops if o.kind is Kind.ALLOC)}
    return [(op.kind.value, numbers[op.other]) for op in ops]


# ---------------------------------------------------------------------- births and deaths


def test_a_storage_is_born_with_its_first_tensor_and_dies_with_its_last() -> None:
    """Views share their base's block; it dies when nobody is left."""

    def program() -> None:
        x = torch.zeros(4)
        view = x[1:]
        del x
        torch.ones(2)
        del view

    assert births_and_deaths(program) == [
        ("alloc", 0),
        ("alloc", 1),
        ("free", 1),
        ("free", 0),
    ]


def test_what_is_written_in_place_is_not_born_again() -> None:
    """An out-variant or an in-place op allocates nothing."""

    def program() -> None:
        x = torch.zeros(4)
        x.add_(1)
        torch.add(x, 1, out=x)

    assert births_and_deaths(program) == [("alloc", 0), ("free", 0)]


def test_a_tensor_that_takes_memory_in_is_of_the_same_block() -> None:
    """DLPack hands memory on; what either tensor does to it concerns the other."""

    def program(*, waits: bool) -> None:
        x, side = torch.zeros(4), cpu.Stream()
        side.wait_stream(cpu.current_stream())
        with cpu.stream(side):
            torch.from_dlpack(x).add_(1)
        if waits:
            cpu.current_stream().wait_stream(side)
        x.add_(1)
        side.synchronize()
        assert x.tolist() == [2.0] * 4

    assert findings(lambda: program(waits=True)) == ()
    assert [finding.kind for finding in findings(lambda: program(waits=False))] == ["Race"]


def test_resizing_a_storage_to_nothing_frees_it_and_back_allocates_it() -> None:
    """A storage that comes back is new memory, with a block of its own."""

    def program() -> None:
        x = torch.zeros(4)
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(16)

    assert births_and_deaths(program) == [("alloc", 0), ("free", 0), ("alloc", 1), ("free", 1)]


def test_a_tensor_that_grows_takes_new_memory() -> None:
    """``Tensor.resize_`` beyond the storage frees the old block."""

    def program() -> None:
        torch.zeros(4).resize_(8)

    assert births_and_deaths(program) == [("alloc", 0), ("free", 0), ("alloc", 1), ("free", 1)]


def test_a_block_belongs_to_the_stream_on_which_it_was_allocated() -> None:
    """Its free names that stream, wherever it is freed."""

    def program() -> None:
        side = cpu.Stream()
        assert cpu.current_stream().stream_id == 0
        with cpu.stream(side):
            x = torch.zeros(4)
        cpu.current_stream().wait_stream(side)
        del x

    assert [op.stream for op in ops_of(program) if op.kind is Kind.FREE] == [1]


def test_what_dies_after_the_program_has_returned_is_no_op() -> None:
    """Deaths that depend on the collector are left out of the trace."""

    def program() -> Tensor:
        cycle: list[Any] = [torch.zeros(4)]
        cycle.append(cycle)
        return torch.ones(4)

    assert births_and_deaths(program) == [("alloc", 0), ("alloc", 1)]


# ---------------------------------------------------------------------- reuse across streams


def freed_while_read(protect: Callable[[Tensor, Any], Any]) -> Callable[[], None]:
    """Return a program that frees a tensor while a side stream reads it, protected by ``protect``."""

    def program() -> None:
        side = cpu.Stream()
        x = torch.zeros(4)
        side.wait_stream(cpu.current_stream())
        with cpu.stream(side):
            x.add(1)
        protect(x, side)
        del x
        torch.ones(8)

    return program


PROTECTIONS: dict[str, Callable[[Tensor, Any], Any]] = {
    "record_stream": lambda x, side: x.record_stream(side),
    "record_stream of a view": lambda x, side: x[1:].record_stream(side),
    "the pool's stream waits": lambda _, side: cpu.current_stream().wait_stream(side),
    "the pool's stream waits for an event": lambda _, side: cpu.current_stream().wait_event(
        side.record_event()
    ),
    "the host waits": lambda _, side: side.synchronize(),
}


def test_memory_freed_while_another_stream_reads_it_is_found_whatever_its_size() -> None:
    """The next allocation may take it, equal in size or not."""
    kinds = [finding.kind for finding in findings(freed_while_read(lambda *_: None))]

    assert kinds == ["UseAfterFree"]


@pytest.mark.parametrize("name", PROTECTIONS)
def test_ordering_or_record_stream_protects(name: str) -> None:
    """Nothing is reported where reuse cannot come too early."""
    assert findings(freed_while_read(PROTECTIONS[name])) == ()


def test_recording_the_wrong_stream_does_not_protect() -> None:
    """The recorded stream must be the one that reads."""
    program = freed_while_read(lambda x, _: x.record_stream(cpu.Stream()))

    assert [finding.kind for finding in findings(program)] == ["UseAfterFree"]


def gather_bucket(*, waits_for_readers: bool) -> Callable[[], None]:
    """Return the loop of a gather stream that frees without record_stream."""

    def program() -> None:
        compute, gather = cpu.current_stream(), cpu.Stream()
        shard = torch.ones(4)
        gather.wait_stream(compute)
        for _ in range(3):
            if waits_for_readers:
                gather.wait_stream(compute)
            with cpu.stream(gather):
                bucket = torch.empty(4)
                dist.all_gather([bucket], shard)
            compute.wait_stream(gather)
            bucket.sum()
            del bucket

    return program


def test_a_gather_stream_that_waits_before_every_allocation_needs_no_record() -> None:
    """Reuse is ordered behind the reader already."""
    assert findings(gather_bucket(waits_for_readers=True)) == ()


def test_without_that_wait_there_is_exactly_one_report() -> None:
    """One missing wait is one finding, though each pass of the loop shows it."""
    found = findings(gather_bucket(waits_for_readers=False))

    assert [finding.kind for finding in found if finding.kind == "UseAfterFree"] == ["UseAfterFree"]


def replaced_gradient(*, waits: bool) -> Callable[[], None]:
    """Return a step whose gradient buffer is allocated on compute and swapped on a reduce stream."""

    def program() -> None:
        compute, reduce = cpu.current_stream(), cpu.Stream()
        buffers = {"main": torch.zeros(4)}
        for _ in range(3):
            grad = torch.ones(4)
            reduce.wait_stream(compute)
            with cpu.stream(reduce):
                buffers["main"] = buffers["main"] + grad
            if waits:
                compute.wait_stream(reduce)
            del grad
            torch.ones(4)
        compute.wait_stream(reduce)

    return program


def test_a_gradient_buffer_allocated_on_one_stream_and_replaced_on_another() -> None:
    """Found without any delay, with the block's line; the replay line finds it again."""
    with pytest.raises(fsdp_sim.UseAfterFree) as caught:
        on_one_rank(replaced_gradient(waits=False))

    found = caught.value.finding
    assert found.ops[0].name == "add.Tensor"
    assert "test_memory.py" in str(found.ops[0].source)
    with pytest.raises(fsdp_sim.UseAfterFree):
        fsdp_sim.replay(lambda rank: replaced_gradient(waits=False)(), caught.value.schedule)
    assert findings(replaced_gradient(waits=True)) == ()


@pytest.mark.parametrize("first", ["view", "base"])
@pytest.mark.parametrize("protect", ["nothing", "record", "wait"])
def test_a_copy_of_a_view_on_a_side_stream(first: str, protect: str) -> None:
    """Offloading a view: reported unless recorded or waited for, in either order of death."""

    def program() -> None:
        side, tensors = cpu.Stream(), {"base": torch.zeros(8)}
        tensors["view"] = tensors["base"][2:6]
        side.wait_stream(cpu.current_stream())
        with cpu.stream(side):
            offloaded = torch.empty(4)
            offloaded.copy_(tensors["view"])
        if protect == "record":
            tensors["view"].record_stream(side)
        if protect == "wait":
            cpu.current_stream().wait_stream(side)
        del tensors[first]
        tensors.clear()
        torch.zeros(8).fill_(1)

    kinds = [finding.kind for finding in findings(program)]

    assert kinds == (["UseAfterFree"] if protect == "nothing" else [])


# ---------------------------------------------------------------------- the simulator holds nothing


def lives(program: Callable[[Callable[[str, Tensor], Tensor]], None]) -> list[str]:
    """Run ``program(watch)`` and return when the storages that it watches die, by its own steps."""
    log: list[str] = []

    def watch(name: str, tensor: Tensor) -> Tensor:
        log.append(f"{name} seen")
        watch.refs.append(  # type: ignore[attr-defined]
            weakref.ref(tensor.untyped_storage(), lambda _: log.append(f"{name} died"))
        )
        return tensor

    watch.refs = []  # type: ignore[attr-defined]
    gc.disable()
    try:
        program(watch)
    finally:
        gc.enable()
    return log


class Watched(torch.autograd.Function):
    """Watches the gradient that flows through it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, watch: Any) -> Tensor:
        """Pass on."""
        ctx.name, ctx.watch = name, watch
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Pass on and watch."""
        return ctx.watch(ctx.name, grad), None, None


def train(watch: Callable[[str, Tensor], Tensor]) -> None:
    """Two steps of a small model, watching activations and gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(2):
        x = torch.ones(2, 4)
        for index, layer in enumerate(model):
            x = watch(f"{step} out {index}", layer(x))
            x = Watched.apply(x, f"{step} grad {index}", watch)  # type: ignore[no-untyped-call]
        loss = x.sum()
        del x
        watch(f"{step} backward", torch.zeros(1))
        loss.backward()
        watch(f"{step} step", torch.zeros(1))
        optimizer.step()
        optimizer.zero_grad()


def train_on_two_streams(watch: Callable[[str, Tensor], Tensor]) -> None:
    """One step whose graph uses two streams, so that its nodes are hooked."""
    side, default = cpu.Stream(), cpu.current_stream()
    weight = torch.ones(4, requires_grad=True)
    x = watch("sin", weight.sin())
    x = Watched.apply(x, "grad of sin", watch)  # type: ignore[no-untyped-call]
    with cpu.stream(side):
        side.wait_stream(default)
        y = watch("exp", x.exp())
        y = Watched.apply(y, "grad of exp", watch)  # type: ignore[no-untyped-call]
        z = watch("cos", x.cos())
    default.wait_stream(side)
    loss = watch("sum", (y * z).sum())
    del x, y, z
    loss.backward()
    watch("end", torch.zeros(1))


@pytest.mark.parametrize("program", [train, train_on_two_streams])
def test_every_storage_dies_when_it_would_without_the_simulator(program: Any) -> None:
    """The log of lives, step by step, is that of a plain run."""
    plain = lives(program)

    simulated = fsdp_sim.simulate(lambda rank: lives(program), 1).results[0]

    assert len(plain) > 10
    assert simulated == plain


def test_a_work_that_was_waited_for_holds_nothing() -> None:
    """Output and input die with the program's own references, once the work is joined."""

    def program(rank: int) -> list[str]:
        def body(watch: Callable[[str, Tensor], Tensor]) -> None:
            x = watch("input", torch.ones(4))
            out = watch("output", torch.zeros(8))
            work = dist.all_gather(list(out.chunk(2)), x, async_op=True)
            watch("issued", torch.zeros(1))
            assert work is not None
            work.wait()
            watch("waited", torch.zeros(1))
            del x
            del out
            watch("end", torch.zeros(1))

        return lives(body)

    log = fsdp_sim.simulate(program, 2).results[0]

    assert log[log.index("waited seen") :] == [
        "waited seen",
        "waited died",
        "input died",
        "output died",
        "end seen",
        "end died",
    ]


def test_an_asynchronous_operation_holds_its_tensors_until_it_is_waited_for() -> None:
    """As NCCL's stash does: what the program drops early lives until the wait."""

    def program(rank: int) -> list[str]:
        def body(watch: Callable[[str, Tensor], Tensor]) -> None:
            x = watch("x", torch.ones(4))
            work = dist.all_reduce(x, async_op=True)
            del x
            watch("dropped", torch.zeros(1))
            assert work is not None
            work.wait()
            watch("waited", torch.zeros(1))

        return lives(body)

    log = fsdp_sim.simulate(program, 2).results[0]

    assert log.index("dropped seen") < log.index("x died") < log.index("waited seen")


# ---------------------------------------------------------------------- poison


def is_nan(tensor: Tensor) -> bool:
    """Whether all elements are NaN."""
    return bool(tensor.isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_poison_makes_fresh_memory_nan(dtype: torch.dtype) -> None:
    """All ways to get memory without values."""

    def program() -> list[bool]:
        x = torch.empty(4, dtype=dtype)
        grown = torch.zeros(4, dtype=dtype)
        grown.untyped_storage().resize_(0)
        grown.untyped_storage().resize_(4 * dtype.itemsize)
        fresh = [x, torch.empty_like(x), x.new_empty(3), grown]
        return [is_nan(tensor) for tensor in fresh]

    assert on_one_rank(program, poison=True) == [True] * 4


def test_poison_shows_in_what_still_looks_at_freed_memory() -> None:
    """A NumPy view of a storage that is released sees NaN, not the old values."""

    def program() -> bool:
        x = torch.zeros(4)
        alias = x.numpy()
        del x
        kept = torch.from_numpy(alias)
        return not is_nan(kept)

    assert on_one_rank(program, poison=True)


def test_poison_leaves_values_alone() -> None:
    """Memory that holds values is not touched, and booleans stay booleans."""

    def program() -> list[float]:
        x = torch.full((2,), 3.0)
        torch.empty(3, dtype=torch.bool)
        values: list[float] = (x + torch.zeros(2)).tolist()
        return values

    assert on_one_rank(program, poison=True) == [3.0, 3.0]


# ---------------------------------------------------------------------- leaks

KEPT: list[Any] = []
"""A global that outlives every program."""


def test_memory_that_a_global_keeps_is_a_leak() -> None:
    """What is still allocated behind the program's end is reported with its size and line."""

    def program() -> None:
        KEPT.append(torch.zeros(4))

    try:
        found = findings(program)
    finally:
        KEPT.clear()

    assert [finding.kind for finding in found] == ["Leak"]
    assert found[0].message == (
        "rank 0: block 0 of 16 bytes is still allocated though the program has ended;"
        " its results do not hold it"
    )
    assert "test_memory.py" in str(found[0].ops[0].source)


def test_results_arguments_and_closures_are_no_leaks() -> None:
    """What the program returns or puts where its caller can see it, and graphs behind that, may live."""
    kept: list[Tensor] = []

    def program(rank: int, into: dict[str, Tensor]) -> Tensor:
        into["argument"] = torch.zeros(4)
        kept.append(torch.zeros(4))
        weight = torch.ones(4, requires_grad=True)
        return (weight.exp() * weight).sum()

    assert fsdp_sim.simulate(program, 1, args=({},)).findings == ()


def test_a_result_may_hold_what_a_transform_wraps_tensors_in() -> None:
    """An exception out of `torch.func.grad` does, by its frames: that has no storage."""

    def program(_rank: int) -> BaseException:
        def fail(x: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError(x.shape)

        with pytest.raises(ArithmeticError) as caught:
            torch.func.grad(fail)(torch.ones(2))
        return caught.value

    report = fsdp_sim.simulate(program, 1, strict=False)

    assert report.findings == ()
    assert report.results[0].args == ((2,),)


def test_garbage_is_no_leak() -> None:
    """Cycles are collected at the end, as they would be sooner or later."""

    def program() -> None:
        cycle: list[Any] = [torch.zeros(4)]
        cycle.append(cycle)

    assert findings(program) == ()


def test_garbage_that_one_collection_only_loosens_is_no_leak() -> None:
    """As where a hook of a DTensor's gradient accumulator holds both: the first frees a graph only."""

    def program() -> None:
        side = cpu.Stream()
        side.wait_stream(cpu.current_stream())
        with cpu.stream(side):
            mesh = init_device_mesh("cpu", (1,))
            weight = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Replicate()]))
        cpu.current_stream().wait_stream(side)
        function = weight.expand_as(weight).grad_fn
        assert function is not None
        accumulator = function.next_functions[0][0]
        assert accumulator is not None
        accumulator.register_hook(lambda *_, held=(weight, accumulator): None)
        weight.sum().backward()

    assert findings(program) == ()


def test_garbage_that_makes_garbage_does_not_hold_up_the_end() -> None:
    """Collections stop when nothing dies, and after a few if something always does."""

    class Phoenix:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            if not gone:
                Phoenix()

    gone: list[bool] = []

    def program() -> None:
        Phoenix()

    try:
        assert findings(program) == ()
    finally:
        gone.append(True)


def test_a_mesh_is_no_leak() -> None:
    """PyTorch keeps the small tensors of device meshes in caches of its own."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mesh["dp"].get_group()

    assert fsdp_sim.simulate(program, 4).findings == ()
