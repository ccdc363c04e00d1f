"""CUDA scripts: what a program that says ``cuda`` sees on a rank, and that nothing of it stays."""

import types
from collections.abc import Callable
from io import BytesIO
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fsdp_core
import fsdp_sim
from fsdp_sim.trace import diff
from tests.sim.litmus import findings, is_racy, on_one_rank

cuda: Any = torch.cuda
accelerator: Any = torch.accelerator  # noqa: TID251  its equivalents are what is tested


def on_gpu(program: Callable[[], Any], **options: Any) -> Any:
    """Return what ``program()`` returns on the only rank of a world that has a GPU."""
    return on_one_rank(program, knobs=("cuda",), **options)


def on_two_gpus(program: Callable[[int], Any]) -> list[Any]:
    """Return what ``program(rank)`` returns on two ranks, each with its own GPU chosen."""

    def run(rank: int) -> Any:
        cuda.set_device(rank)
        return program(rank)

    return fsdp_sim.simulate(run, 2, knobs=("cuda",)).results


# ---------------------------------------------------------------------- devices


def test_each_rank_has_a_gpu_of_its_own() -> None:
    """As many as ranks are counted; tensors say where they are."""
    results = on_two_gpus(
        lambda rank: (
            cuda.is_available(),
            cuda.device_count(),
            cuda.current_device(),
            str(torch.ones(1, device="cuda").device),
            str(accelerator.current_accelerator()),
        )
    )

    assert results == [(True, 2, rank, f"cuda:{rank}", "cuda") for rank in (0, 1)]


def test_streams_and_events_say_whose_gpu_they_are_on() -> None:
    """By device, and by its index and type."""

    def ask(rank: int) -> list[Any]:
        stream, event = cuda.Stream(), cuda.Event()
        return [str(stream.device), stream.device_index, stream.device_type, str(event.device)]

    assert on_two_gpus(ask) == [[f"cuda:{rank}", rank, 1, f"cuda:{rank}"] for rank in (0, 1)]


def test_a_rank_that_has_not_chosen_its_gpu_is_told_so() -> None:
    """As in every process, the current device is 0 at first, which is another rank's."""
    message = (
        "rank 1 must use its own GPU, cuda:1, got cuda:0; call "
        r"torch.cuda.set_device\(int\(os.environ\['LOCAL_RANK'\]\)\) before anything uses 'cuda'"
    )
    with pytest.raises(RuntimeError, match=f"(?m)^{message}$"):
        fsdp_sim.simulate(lambda _: torch.ones(1, device="cuda"), 2, knobs=("cuda",))


def test_an_unknown_function_of_cuda_raises_by_its_name() -> None:
    """What is not on the list is not simulated, in silence least of all."""
    message = "torch.cuda.memory_snapshot is not simulated: a CUDA script must do without it"
    with pytest.raises(NotImplementedError, match=f"(?m)^{message}$"):
        on_gpu(lambda: cuda.memory_snapshot())


@pytest.mark.parametrize(
    "name", ["CUDAGraph", "graph", "MemPool", "FloatTensor", "ExternalStream", "seed", "cudart"]
)
def test_classes_and_functions_that_need_a_real_gpu_are_refused(name: str) -> None:
    """Each by its name."""
    with pytest.raises(NotImplementedError, match=rf"(?m)^torch\.cuda\..*{name} is not simulated"):
        on_gpu(lambda: getattr(cuda, name)())


def names_of(*modules: types.ModuleType) -> list[dict[str, int]]:
    """Return which objects the names of modules stand for."""
    return [{name: id(value) for name, value in vars(module).items()} for module in modules]


def test_nothing_outlives_the_world() -> None:
    """Every name is as before, also where the program failed."""
    modules: tuple[Any, ...] = (
        torch.cuda,
        torch.cuda.memory,
        accelerator,
        torch,
        dist,
        torch.Tensor,
    )
    before = names_of(*modules)
    on_gpu(lambda: torch.ones(2, device="cuda"))
    with pytest.raises(NotImplementedError):
        on_gpu(lambda: cuda.cudart())

    assert names_of(*modules) == before
    assert not torch.ones(2).is_cuda


def test_fsdp_core_trains_on_the_simulated_gpu() -> None:
    """Its device is CUDA's, its streams are the simulator's."""

    def train(rank: int) -> str:
        mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (2,))
        model = torch.nn.Linear(4, 4).to("cuda")
        placements = fsdp_core.Placements(
            dp_axes=[0],
            parameter=[torch.distributed.tensor.Shard(0)],
            gradient=[torch.distributed.tensor.Shard(0)],
            optimizer=[torch.distributed.tensor.Shard(0)],
        )
        with fsdp_core.fully_shard_context():
            fsdp_core.fully_shard(model, mesh, placements)
        model(torch.ones(2, 4, device="cuda")).sum().backward()
        gradient = model.weight.grad
        return "none" if gradient is None else str(gradient.device)

    assert on_two_gpus(train) == ["cuda:0", "cuda:1"]


def test_fsdp2_makes_its_own_mesh_of_gpus() -> None:
    """Without a mesh it takes all ranks, on the accelerator that PyTorch names."""

    def train(rank: int) -> str:
        model = torch.nn.Linear(4, 4).to("cuda")
        torch.distributed.fsdp.fully_shard(model)
        model(torch.ones(2, 4, device="cuda")).sum().backward()
        gradient = model.weight.grad
        return "none" if gradient is None else str(gradient.device)

    assert on_two_gpus(train) == ["cuda:0", "cuda:1"]


# ---------------------------------------------------------------------- tensors


def made() -> dict[str, torch.Tensor]:
    """Return tensors made in many ways on the GPU."""
    host = torch.ones(2)
    with torch.device("cuda"):
        by_default = torch.zeros(2)
    parameter = torch.nn.Linear(2, 2).cuda().weight
    return {
        "factory": torch.zeros(2, device="cuda"),
        "by index": torch.zeros(2, device=0),
        "data": torch.tensor([1.0], device="cuda"),
        "as_tensor": torch.as_tensor(host, device="cuda"),
        "by default": by_default,
        "to": host.to("cuda"),
        "to device and dtype": host.to("cuda", torch.float64),
        "to like": host.to(by_default),
        "cuda": host.cuda(),
        "like": torch.zeros_like(by_default),
        "like elsewhere": torch.zeros_like(host, device="cuda"),
        "new": by_default.new_zeros(3),
        "new of data": by_default.new_tensor([1.0, 2.0]),
        "computed": by_default + 1,
        "with a number of the host's": by_default * torch.tensor(2.0),
        "view": by_default[:1],
        "cast": by_default.half(),
        "parameter": parameter,
        "loss": torch.nn.functional.one_hot(torch.zeros(2, dtype=torch.long, device="cuda"), 3),
    }


def test_what_is_made_on_the_gpu_or_computed_there_is_there() -> None:
    """However it is made."""
    devices = on_gpu(lambda: {name: str(tensor.device) for name, tensor in made().items()})

    assert devices == dict.fromkeys(devices, "cuda:0")


def test_an_index_alone_names_a_gpu() -> None:
    """``model.to(rank)``, and what wraps models takes it as well."""

    def program(rank: int) -> list[str]:
        model = nn.Linear(2, 2).to(rank)
        replicated = DistributedDataParallel(model, device_ids=[rank])
        sharded = FullyShardedDataParallel(nn.Linear(2, 2), device_id=rank, use_orig_params=True)
        made = [torch.ones(1).to(rank), torch.ones(1, device=rank), *model.parameters()]
        outputs = [replicated(torch.ones(1, 2)), sharded(torch.ones(1, 2).to(rank))]
        for output in outputs:
            output.sum().backward()
        return [str(tensor.device) for tensor in (*made, *outputs)]

    assert on_two_gpus(program) == [[f"cuda:{rank}"] * 6 for rank in (0, 1)]


def test_what_is_made_without_a_device_is_on_the_host() -> None:
    """Its reads and writes are on no stream, so another stream may copy it without a wait."""

    def copy() -> list[str]:
        host = torch.randn(4) + torch.ones(4)
        side = cuda.Stream()
        with cuda.stream(side):
            copied = host.to("cuda", non_blocking=True)
        cuda.current_stream().wait_stream(side)
        copied.record_stream(cuda.current_stream())
        copied.add_(1)
        return [
            str(host.device),
            str(copied.cpu().device),
            str(copied.to("cpu", torch.half).device),
        ]

    assert on_gpu(copy) == ["cpu", "cpu", "cpu"]


def test_a_copy_to_the_gpu_on_another_stream_must_be_waited_for() -> None:
    """Using it at once is a race."""

    def use_at_once() -> None:
        with cuda.stream(cuda.Stream()):
            copied = torch.ones(4).to("cuda", non_blocking=True)
        copied.add_(1)

    assert is_racy(use_at_once, knobs=("cuda",))


def test_a_copy_to_the_host_waits_for_its_stream() -> None:
    """So what the host launches after it is behind it; ``non_blocking`` promises nothing."""

    def after_copy(*, non_blocking: bool) -> None:
        side = cuda.Stream()
        with cuda.stream(side):
            made_there = torch.ones(4, device="cuda")
            made_there.to("cpu", non_blocking=non_blocking)
        made_there.add_(1)

    assert not is_racy(lambda: after_copy(non_blocking=False), knobs=("cuda",))
    assert is_racy(lambda: after_copy(non_blocking=True), knobs=("cuda",))


def test_tensors_of_both_devices_must_not_meet() -> None:
    """As on CUDA, but for single numbers and indices."""
    message = (
        "add.Tensor: expected all tensors to be on the same device, but found at least two devices, "
        "cuda:0 and cpu"
    )
    with pytest.raises(RuntimeError, match=f"(?m)^{message}$"):
        on_gpu(lambda: torch.ones(2, device="cuda") + torch.ones(2))


def test_an_index_of_the_hosts_may_meet_the_gpu() -> None:
    """As on CUDA."""
    assert on_gpu(lambda: torch.arange(4, device="cuda")[torch.tensor([1, 2])].tolist()) == [1, 2]


def test_a_gradient_goes_back_to_where_the_leaf_is() -> None:
    """Also across a copy."""

    def backward() -> tuple[str, list[float]]:
        leaf = torch.ones(2, requires_grad=True)
        (leaf.to("cuda") * 3).sum().backward()
        assert leaf.grad is not None
        return str(leaf.grad.device), leaf.grad.tolist()

    assert on_gpu(backward) == ("cpu", [3.0, 3.0])


def test_the_type_of_a_tensor_names_the_gpu() -> None:
    """As on CUDA; a conversion to it by name is refused."""
    names = on_gpu(lambda: [torch.ones(1, device=where).type() for where in ("cuda", "cpu")])

    assert names == ["torch.cuda.FloatTensor", "torch.FloatTensor"]
    with pytest.raises(
        NotImplementedError, match=r"^Tensor\.type\('torch\.cuda\.HalfTensor'\) is not"
    ):
        on_gpu(lambda: torch.ones(1).type("torch.cuda.HalfTensor"))


def test_a_barrier_of_cpp_finds_the_gpu() -> None:
    """Its tensor is made where PyTorch says that the accelerator is."""

    def meet(rank: int) -> None:
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
        dist.barrier()

    assert on_two_gpus(meet) == [None, None]


def test_numpy_sees_no_memory_of_the_gpu() -> None:
    """As on CUDA."""
    with pytest.raises(TypeError, match=r"^can't convert cuda:0 device type tensor to numpy"):
        on_gpu(lambda: torch.ones(2, device="cuda").numpy())


def test_memory_can_be_pinned() -> None:
    """On the host alone."""
    pinned = on_gpu(
        lambda: [
            torch.ones(2).is_pinned(),
            torch.ones(2).pin_memory().is_pinned(),
            torch.ones(2, pin_memory=True).is_pinned(),
        ]
    )

    assert pinned == [False, True, True]


def test_a_file_says_where_its_tensors_were() -> None:
    """They come back there, unless ``map_location`` says otherwise."""

    def load() -> list[str]:
        file = BytesIO()
        torch.save({"a": torch.ones(2, device="cuda"), "b": torch.ones(2)}, file)
        devices = []
        for where in (None, "cpu", "cuda"):
            file.seek(0)
            loaded = torch.load(file, map_location=where)
            devices += [str(loaded[name].device) for name in ("a", "b")]
        return devices

    assert on_gpu(load) == ["cuda:0", "cpu", "cpu", "cpu", "cuda:0", "cuda:0"]


# ---------------------------------------------------------------------- random numbers, memory, autocast


def test_the_gpu_has_random_numbers_of_its_own() -> None:
    """What is drawn there changes nothing on the host, and can be drawn again."""

    def draw() -> bool:
        torch.manual_seed(3)
        alone = torch.rand(2).tolist()
        torch.manual_seed(3)
        state = cuda.get_rng_state()
        there = torch.rand(2, device="cuda").tolist()
        beside = torch.rand(2).tolist()
        cuda.set_rng_state(state)
        return alone == beside and there == torch.rand(2, device="cuda").tolist()

    assert on_gpu(draw)


def test_a_generator_can_be_the_gpus() -> None:
    """Seeded alike, it draws the same numbers."""

    def draw() -> bool:
        generators = [torch.Generator(device="cuda").manual_seed(5) for _ in range(2)]
        one, other = (torch.rand(2, device="cuda", generator=each) for each in generators)
        return str(generators[0].device) == "cuda:0" and one.tolist() == other.tolist()

    assert on_gpu(draw)


def test_memory_is_counted_as_the_caching_allocator_counts() -> None:
    """In blocks of 512 bytes; peaks can be reset."""

    def count() -> list[int]:
        tensor = torch.empty(1000, device="cuda")  # 4000 bytes
        figures = [cuda.memory_allocated(), cuda.max_memory_allocated(), cuda.memory_reserved()]
        del tensor
        figures += [cuda.memory_allocated(), cuda.max_memory_allocated()]
        cuda.reset_peak_memory_stats()
        return [*figures, cuda.max_memory_allocated()]

    assert on_gpu(count) == [4096, 4096, 2 << 20, 0, 4096, 0]


def test_autocast_of_cuda_computes_in_half_precision() -> None:
    """Float16 unless another type is asked for; recomputation sees the same."""

    def cast() -> list[torch.dtype]:
        layer = torch.nn.Linear(2, 2).cuda()
        inputs = torch.ones(2, 2, device="cuda", requires_grad=True)
        with torch.autocast("cuda"):
            first = layer(inputs)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            second = checkpoint(layer, inputs, use_reentrant=False)
            enabled = torch.is_autocast_enabled("cuda")
            third = torch.get_autocast_dtype("cuda")
        second.float().sum().backward()
        assert enabled
        assert not torch.is_autocast_enabled("cuda")
        return [first.dtype, second.dtype, third]

    assert on_gpu(cast) == [torch.float16, torch.bfloat16, torch.bfloat16]


# ---------------------------------------------------------------------- process groups


def test_the_group_is_nccls() -> None:
    """Scripts that ask are told so."""

    def ask(rank: int) -> str:
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
        return dist.get_backend()

    assert on_two_gpus(ask) == ["nccl", "nccl"]


def test_gradients_are_compressed_as_the_versions_of_cuda_and_nccl_allow() -> None:
    """DDP asks for both before it takes this hook."""

    def train(rank: int) -> list[float]:
        model = DistributedDataParallel(nn.Linear(2, 1, bias=False).cuda(), device_ids=[rank])
        model.register_comm_hook(None, bf16_compress_hook)
        model(torch.full((1, 2), float(rank), device="cuda")).sum().backward()
        gradient = model.module.weight.grad
        assert gradient is not None
        return gradient.tolist()[0]

    assert on_two_gpus(train) == [[0.5, 0.5]] * 2


def test_a_collective_of_the_hosts_memory_is_refused() -> None:
    """NCCL has none."""
    message = (
        "allreduce_: a collective of a CUDA script must have its tensors on cuda:0, as NCCL's, got one"
        r" on the host; move it there \(collectives of gloo on the host are not simulated beside NCCL's\)"
    )
    with pytest.raises(RuntimeError, match=f"(?m)^{message}$"):
        on_two_gpus(lambda _: dist.all_reduce(torch.ones(2)))


def test_objects_travel_through_the_gpu() -> None:
    """As NCCL sends them."""

    def gather(rank: int) -> list[Any]:
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, {"rank": rank})
        return objects

    assert on_two_gpus(gather) == [[{"rank": 0}, {"rank": 1}]] * 2


def test_a_reduction_that_nobody_waits_for_is_a_race() -> None:
    """The GPU's streams are those of every world."""

    def program() -> None:
        tensor, side = torch.ones(2, device="cuda"), cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            dist.all_reduce(tensor)
        tensor.sum()

    assert {finding.kind for finding in findings(program, knobs=("cuda",))} == {"Race"}


def gather_objects(where: str) -> None:
    """Objects, in a labelled range whose allocations belong to the order."""
    objects: list[Any] = [None, None]
    with torch.profiler.record_function("fsdp_core::agree"):
        dist.all_gather_object(objects, "an object")


def make_real(where: str) -> None:
    """Memory for a weight that had none."""
    shape, values = torch.empty(2, device="meta"), torch.arange(2.0)
    with torch.profiler.record_function("fsdp_core::init"):
        torch.empty_like(shape, device=where).copy_(values)


@pytest.mark.parametrize("program", [gather_objects, make_real])
def test_the_order_is_the_same_under_both_names_of_the_device(
    program: Callable[[str], None],
) -> None:
    """What is the device's where it is called "cuda" is the device's where it is called "cpu"."""

    def on_cuda(rank: int) -> None:
        cuda.set_device(rank)
        program("cuda")

    first = fsdp_sim.simulate(on_cuda, 2, knobs=("cuda",), trace=True).trace
    second = fsdp_sim.simulate(lambda _: program("cpu"), 2, trace=True).trace

    assert diff(first, second, order_only=True) is None
