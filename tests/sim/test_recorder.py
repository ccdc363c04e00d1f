"""The recorder: what a real process does becomes the ops that the simulator makes of the same program."""

import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

import fsdp_sim
from fsdp_sim.analysis import analyse
from fsdp_sim.checkers import CHECKERS, make
from fsdp_sim.errors import ConfigError
from fsdp_sim.mutation.core_programs import small_programs
from fsdp_sim.op import Kind, Op
from fsdp_sim.program import run_program
from fsdp_sim.trace import Trace, diff
from tests.sim import fake_cuda
from tests.sim.processes import on_gloo
from tests.system import fsdp2_program

cpu: Any = torch.cpu  # whose stubs promise less than there is inside a recording
cuda: Any = torch.cuda

Program = Callable[[int], Any]


def run_spec(name: str, rank: int) -> None:
    """Train one of the programs that are data."""
    run_program(small_programs()[name])


def collectives(rank: int) -> None:
    """Synchronous, asynchronous and functional ones, a barrier, and objects."""
    values, both = torch.full((2,), float(rank)), [torch.empty(2), torch.empty(2)]
    ones = torch.ones(2)
    dist.all_reduce(values)
    works: list[Any] = [
        dist.all_gather(both, values, async_op=True),
        dist.broadcast(ones, 1, async_op=True),
    ]
    for work in works:
        work.wait()
    assert dist.group.WORLD is not None
    summed = funcol.all_reduce(ones, "sum", dist.group.WORLD)
    assert (summed + 1).sum().item() == 6
    dist.barrier()
    dist.all_gather_object([None, None], {"rank": rank})


def messages(rank: int) -> None:
    """A message each way, one after the other."""
    value = torch.zeros(2)
    for sender in (0, 1):
        if rank == sender:
            dist.send(value, 1 - rank)
        else:
            dist.recv(value, 1 - rank)


def streams_and_events(rank: int, device: Any = cpu) -> None:
    """Every way of ordering streams, and of waiting for them on the host."""
    side, event = device.Stream(), device.Event()
    device.current_stream().wait_event(event)
    side.wait_stream(device.current_stream())
    with side:
        value = torch.ones(2)
        event.record()
    event.wait()
    device.current_stream().wait_event(side.record_event())
    side.synchronize()
    event.synchronize()
    assert event.query()
    assert side.query()
    device.synchronize()
    assert value.sum().item() == 2


def freed_late(rank: int) -> None:
    """A block that another stream uses last."""
    value, side = torch.ones(2), cpu.Stream()
    side.wait_stream(cpu.current_stream())
    with cpu.stream(side):
        value.add_(1)
    value.record_stream(side)


def backward_on_two_streams(rank: int) -> None:
    """Autograd's own waits are ops too."""
    leaf, side = torch.ones(2, requires_grad=True), cpu.Stream()
    side.wait_stream(cpu.current_stream())
    with cpu.stream(side):
        there = leaf * 2
    cpu.current_stream().wait_stream(side)
    (there * leaf).sum().backward()


PROGRAMS: dict[str, Program] = {
    "collectives": collectives,
    "messages": messages,
    "streams and events": streams_and_events,
    "freed late": freed_late,
    "backward on two streams": backward_on_two_streams,
    "FSDP2": fsdp2_program.train,
    **{
        name: functools.partial(run_spec, name)
        for name in ("zero3", "zero1", "recorded", "bf16", "recomputed_reentrant", "adamw")
    },
}


def recorded(program: Program, rank: int) -> list[Op]:
    """Return the ops of a real process.

    The collector is off, as in a world: a gradient that a cycle still holds is added to out of place.
    """
    gc.collect()
    gc.disable()
    try:
        with fsdp_sim.record(device="cpu") as recording:
            program(rank)
    finally:
        gc.enable()
    return list(recording.trace.ops)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_real_processes_and_simulated_ranks_do_the_same_in_the_same_order(tmp_path: Path) -> None:
    """One order digest for both, and no finding in either; all in one set of processes."""
    programs = {name: functools.partial(recorded, program) for name, program in PROGRAMS.items()}
    for name, ranks in on_gloo(programs, 2, tmp_path).items():
        real = Trace.merged([Trace.of(ops, 2, [rank]) for rank, ops in enumerate(ranks)])
        simulated = fsdp_sim.simulate(PROGRAMS[name], 2, trace=True).trace

        assert diff(real, simulated, order_only=True) is None, name
        assert real.order_digest == simulated.order_digest
        assert analyse(real.ops, make(CHECKERS), 2).findings == ()


def test_streams_of_cuda_are_seen_as_simulated_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for torch.cuda whose tensors are on the CPU; its own calls inside are not ops."""
    fake_cuda.install(monkeypatch)
    with fsdp_sim.record(device="cuda") as recording:
        streams_and_events(0, cuda)
    simulated = fsdp_sim.simulate(streams_and_events, 1, trace=True).trace

    assert diff(recording.trace, simulated, order_only=True) is None


def train_on_one_rank(rank: int) -> None:
    """Train a program of one rank."""
    run_program(replace(small_programs()["zero3"], mesh=(1,)), torch.device("cpu"))


def test_training_on_cuda_is_seen_as_simulated(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What gathers, computes and reduces, on the streams that it does so."""
    with monkeypatch.context() as patched:
        fake_cuda.install(patched)
        with fsdp_sim.record(device="cuda") as recording:
            train_on_one_rank(0)
    dist.destroy_process_group()
    simulated = fsdp_sim.simulate(train_on_one_rank, 1, trace=True).trace

    assert diff(recording.trace, simulated, order_only=True) is None


def test_two_objects_of_one_cuda_stream_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch makes a new object whenever the current stream is asked for."""
    fake_cuda.install(monkeypatch)
    with fsdp_sim.record(device="cuda") as recording:
        cuda.current_stream().record_event()
        cuda.current_stream().record_event()

    assert [op.stream for op in recording.trace.ops if op.kind is Kind.RECORD_EVENT] == [0, 0]


def train_ddp() -> None:
    """DDP's C++ issues the reductions and waits for them."""
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model(torch.ones(2, 4)).sum().backward()
    for weight in model.parameters():
        assert weight.grad is not None
        weight.grad.add_(1)


def test_what_cpp_waits_for_is_ordered(alone: None) -> None:
    """DDP is clean, though nobody sees its waits."""
    with fsdp_sim.record(device="cpu") as recording:
        train_ddp()
    ops = recording.trace.ops

    assert sum(op.kind is Kind.COLLECTIVE for op in ops) > 2
    assert analyse(ops, make(CHECKERS), 1).findings == ()


def test_a_barrier_that_cpp_waits_for_stops_the_host(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's has no handle for Python to wait for, unless it is asynchronous."""
    barrier = dist.ProcessGroup.barrier

    @functools.wraps(barrier)
    def as_nccl(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> None:
        barrier(group, *args, **kwargs).wait()

    monkeypatch.setattr(dist.ProcessGroup, "barrier", as_nccl)
    with fsdp_sim.record(device="cpu") as recording:
        dist.barrier()
    monkeypatch.undo()
    dist.destroy_process_group()
    simulated = fsdp_sim.simulate(lambda _: dist.barrier(), 1, trace=True).trace

    assert diff(recording.trace, simulated, order_only=True) is None


def read_too_early() -> None:
    """A sum that may still be written: right on a CPU by luck."""
    total, side = torch.ones(2), cpu.Stream()
    side.wait_stream(cpu.current_stream())
    with cpu.stream(side):
        dist.all_reduce(total)
    total.sum()


def test_a_race_of_a_real_process_is_found(alone: None) -> None:
    """The recording says what values do not."""
    with fsdp_sim.record(device="cpu") as recording:
        read_too_early()
    (finding,) = analyse(recording.trace.ops, make(["races"]), 1).findings

    assert finding.kind == "Race"
    assert {site.name for site in finding.ops} == {"all_reduce", "sum"}


def test_recording_adds_no_wait_for_the_host(alone: None) -> None:
    """What the program does not wait for, the recording does not either."""
    with fsdp_sim.record(device="cpu") as recording:
        dist.all_reduce(torch.ones(2))

    kinds = {op.kind for op in recording.trace.ops}
    assert kinds.isdisjoint({Kind.HOST_WAIT_EVENT, Kind.HOST_WAIT_STREAM})


def test_streams_that_outlive_the_recording_do_what_pytorchs_do(alone: None) -> None:
    """Nothing, and without an error."""
    with fsdp_sim.record(device="cpu") as recording:
        side = cpu.Stream()
        event = side.record_event()
    count = len(recording.trace.ops)
    side.wait_stream(cpu.current_stream())
    cpu.current_stream().wait_stream(side)
    with cpu.stream(side):
        event.record(side)
        event.wait()
    with side:
        side.record_event()
    side.synchronize()

    assert side.query()
    assert event.query()
    assert len(recording.trace.ops) == count


def test_pytorch_is_as_before_when_a_recording_ends() -> None:
    """Classes and functions alike."""
    names = [(cpu, "Stream"), (cpu, "current_stream"), (dist.Work, "wait")]
    before = [getattr(owner, name) for owner, name in names]
    with fsdp_sim.record(device="cpu"):
        pass

    assert [getattr(owner, name) for owner, name in names] == before
    assert fsdp_sim.simulate(lambda rank: torch.ones(1).item(), 1).results == [1.0]


def test_a_program_that_raises_leaves_its_trace(tmp_path: Path) -> None:
    """What led to the exception is what one wants to see."""

    def fail() -> None:
        with fsdp_sim.record(tmp_path / "trace.jsonl", device="cpu"):
            torch.ones(2).add_(1)
            raise KeyError

    with pytest.raises(KeyError):
        fail()

    assert "add_.Tensor" in {op.name for op in Trace.load(tmp_path / "trace.jsonl").ops}


def test_a_model_trained_under_a_recording_has_the_same_weights(alone: None) -> None:
    """No value is changed."""
    weights = []
    for is_recorded in (True, False):
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, 3)
        nn.init.constant_(model.bias, 1)
        if is_recorded:
            with fsdp_sim.record(device="cpu"):
                model(torch.ones(1, 2)).sum().backward()
        else:
            model(torch.ones(1, 2)).sum().backward()
        weights.append(model.weight.grad)

    assert torch.equal(*weights)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"path": "trace.jsonl", "rank": 0, "world_size": 2, "device": "cpu"},
            "path must have '{rank}' in it, since each process writes a file, got 'trace.jsonl'",
        ),
        (
            {"path": "nowhere/trace.jsonl", "device": "cpu"},
            "path must be in a folder that exists, got 'nowhere'",
        ),
        ({"rank": 2, "world_size": 2, "device": "cpu"}, "rank must be from 0 to 1, got 2"),
        ({"device": "tpu"}, "device must be 'cuda' or 'cpu', got 'tpu'"),
    ],
)
def test_what_cannot_be_recorded_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    """Before anything is seen."""
    with pytest.raises(ConfigError) as caught, fsdp_sim.record(**options):
        pass

    assert str(caught.value) == message


def test_a_gpu_is_recorded_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to name it."""
    fake_cuda.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with fsdp_sim.record() as recording:
        cuda.Stream().synchronize()

    assert [op.kind for op in recording.trace.ops][-1] is Kind.HOST_WAIT_STREAM


def test_recordings_do_not_nest() -> None:
    """One process is one rank."""
    with (
        fsdp_sim.record(device="cpu"),
        pytest.raises(ConfigError, match=r"^record must be entered once, "),
        fsdp_sim.record(device="cpu"),
    ):
        pass


def test_merging_needs_every_rank_once() -> None:
    """A rank that is missing would look like one that hangs."""
    first = Trace(2, ranks=[0])

    with pytest.raises(ConfigError) as caught:
        Trace.merged([first, first])

    assert str(caught.value) == "traces to merge must hold each of 2 ranks once, got ranks [0, 0]"
