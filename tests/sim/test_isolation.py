"""Isolation: what a process owns is each rank's own, and nothing of a world stays behind."""

import contextlib
import contextvars
import ctypes
import gc
import io
import logging
import os
import random  # noqa: TID251  its state is what is tested
import signal
import sys
import threading  # noqa: TID251  what a world does to threads is tested
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import distributed_c10d, rpc
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.data import DataLoader, TensorDataset

import fsdp_sim
from fsdp_sim.engine import patches
from tests.sim.litmus import on_one_rank

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


def turn() -> None:
    """Let every other rank run."""
    dist.barrier()


def each(use: Callable[[int], Any], look: Callable[[], Any], world_size: int = 3) -> list[Any]:
    """Let each rank ``use(rank)`` something in turn, and return what each then sees."""

    def program(rank: int) -> Any:
        use(rank)
        turn()
        return look()

    return fsdp_sim.simulate(program, world_size).results


# ---------------------------------------------------------------------- the machine's devices


def test_a_gpu_of_the_machine_is_hidden_from_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for the machine's accelerator, in Python or of C++, gets the simulated device."""
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cuda"))

    def program(_rank: int) -> Any:
        unit = torch.nn.Linear(2, 2)
        fully_shard(unit)
        unit(torch.ones(1, 2)).sum().backward()
        dist.barrier()
        weight: Any = unit.weight
        return weight.device_mesh.device_type

    assert fsdp_sim.simulate(program, 2).results == ["cpu"] * 2
    assert torch._C._get_accelerator().type == "cuda"


@pytest.mark.parametrize("name", ["synchronize", "current_stream", "current_device"])
def test_use_of_cuda_is_refused_by_name_on_every_machine(name: str) -> None:
    """A program must not do another thing where there is a GPU."""

    def program(_rank: int) -> None:
        getattr(torch.cuda, name)()

    message = (
        rf"^CUDA is hidden inside a simulated world, got torch\.cuda\.{name}\(\); run .* --as cuda"
    )
    with pytest.raises(RuntimeError, match=message):
        fsdp_sim.simulate(program, 1)


def test_a_tensor_on_cuda_is_refused() -> None:
    """C++ asks for the device, so no function of torch.cuda is to blame."""
    message = r"^CUDA is hidden inside a simulated world, got a use of the device 'cuda'; "
    with pytest.raises(RuntimeError, match=message):
        on_one_rank(lambda: torch.ones(1, device="cuda"))


def test_remote_procedure_calls_are_refused() -> None:
    """They would wait for real processes, for ever."""
    message = "torch.distributed.rpc is not simulated, got init_rpc: "
    with pytest.raises(NotImplementedError, match=f"^{message}"):
        fsdp_sim.simulate(lambda rank: rpc.init_rpc(f"worker {rank}"), 2)


# ---------------------------------------------------------------------- random numbers

DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(()).item(),
    "random": lambda: random.random(),
    "random.gauss": lambda: random.gauss(0.0, 1.0),
    "numpy": lambda: float(np.random.rand()),  # noqa: NPY002  the global generator is what is tested
}


@pytest.mark.parametrize("name", DRAWS)
def test_each_rank_draws_its_own_random_numbers(name: str) -> None:
    """A rank's numbers do not depend on who else draws, or when."""
    draw = DRAWS[name]

    def program(rank: int) -> list[float]:
        numbers = []
        for _ in range(3):
            numbers.append(draw())
            turn()
        return numbers

    alone = fsdp_sim.simulate(lambda rank: [draw(), draw(), draw()], 1).results[0]
    together = fsdp_sim.simulate(program, 3).results
    mixed = fsdp_sim.simulate(program, 3, scheduler="uniform", seed=5).results

    assert together == mixed
    assert together[0] == alone
    assert len({numbers[0] for numbers in together}) == 3


@pytest.mark.parametrize("name", DRAWS)
def test_the_callers_random_numbers_are_not_drawn(name: str) -> None:
    """The process goes on as if there had been no world."""
    draw = DRAWS[name]
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    draw()
    expected = draw()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002

    draw()
    on_one_rank(draw)

    assert draw() == expected


# ---------------------------------------------------------------------- environment


def test_each_rank_has_an_environment_of_its_own() -> None:
    """Identity variables differ, changes are private, and nothing is left in Python's or C's."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    before = dict(os.environ)

    def use(rank: int) -> None:
        assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(rank)
        assert os.environ["WORLD_SIZE"] == "3"
        os.environ["FSDP_SIM_TEST"] = f"of rank {rank}"

    seen = each(use, lambda: os.environ["FSDP_SIM_TEST"])

    assert seen == ["of rank 0", "of rank 1", "of rank 2"]
    assert dict(os.environ) == before
    assert getenv(b"FSDP_SIM_TEST") is None


def test_a_variable_that_a_rank_deletes_is_there_for_others_and_afterwards() -> None:
    """Deleting is private too."""
    os.environ["FSDP_SIM_TEST"] = "kept"

    def use(rank: int) -> None:
        if rank == 0:
            del os.environ["FSDP_SIM_TEST"]

    try:
        assert each(use, lambda: os.environ.get("FSDP_SIM_TEST")) == [None, "kept", "kept"]
        assert os.environ["FSDP_SIM_TEST"] == "kept"
    finally:
        del os.environ["FSDP_SIM_TEST"]


def test_each_rank_has_arguments_of_its_own() -> None:
    """``sys.argv`` and ``__main__`` are a process's own."""
    before = sys.argv, sys.modules["__main__"]

    def use(rank: int) -> None:
        sys.argv = [f"script of {rank}"]

    assert each(use, lambda: sys.argv[0]) == ["script of 0", "script of 1", "script of 2"]
    assert (sys.argv, sys.modules["__main__"]) == before


def test_output_that_a_rank_redirects_is_its_own() -> None:
    """What another rank prints meanwhile does not land in it."""

    def program(rank: int) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as text:
            print(f"before {rank}")
            turn()
            print(f"after {rank}")
        return text.getvalue()

    assert fsdp_sim.simulate(program, 2).results == [
        "before 0\nafter 0\n",
        "before 1\nafter 1\n",
    ]


def test_warnings_that_a_rank_records_are_its_own() -> None:
    """Filters and recorders of warnings do not cross ranks."""

    def program(rank: int) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore" if rank == 0 else "always")
            turn()
            warnings.warn(f"from rank {rank}", stacklevel=1)
            turn()
        return [str(each.message) for each in caught]

    before = list(warnings.filters), warnings.showwarning

    assert fsdp_sim.simulate(program, 2).results == [[], ["from rank 1"]]
    assert (list(warnings.filters), warnings.showwarning) == before


def test_context_variables_are_a_ranks_own() -> None:
    """A rank starts with its caller's context, and keeps what it sets to itself."""
    VARIABLE.set("of the caller")
    starts = fsdp_sim.simulate(lambda rank: VARIABLE.get(), 2).results

    seen = each(lambda rank: VARIABLE.set(f"of rank {rank}"), VARIABLE.get)

    assert starts == ["of the caller"] * 2
    assert seen == ["of rank 0", "of rank 1", "of rank 2"]
    assert VARIABLE.get() == "of the caller"


# ---------------------------------------------------------------------- PyTorch's settings


class Settings:
    """One setting of PyTorch: how to change it and how to see it."""

    def __init__(self, change: Callable[[], Any], look: Callable[[], Any]) -> None:
        self.change = change
        self.look = look


ENTERED = contextlib.ExitStack()
"""Blocks that a rank has entered and never leaves."""

SETTINGS = {
    "default dtype": Settings(
        lambda: torch.set_default_dtype(torch.float64), lambda: torch.ones(1).dtype
    ),
    "default device": Settings(
        lambda: torch.set_default_device("meta"), lambda: torch.ones(1).device
    ),
    "grad mode": Settings(lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "autocast": Settings(
        lambda: torch.autocast("cpu", dtype=torch.bfloat16).__enter__(),
        lambda: (torch.ones(2, 2) @ torch.ones(2, 2)).dtype,
    ),
    "deterministic algorithms": Settings(
        lambda: torch.use_deterministic_algorithms(True),
        torch.are_deterministic_algorithms_enabled,
    ),
    "matmul precision": Settings(
        lambda: torch.set_float32_matmul_precision("medium"),
        torch.get_float32_matmul_precision,
    ),
    "attention kernels": Settings(
        lambda: ENTERED.enter_context(sdpa_kernel(SDPBackend.MATH)),
        torch.backends.cuda.flash_sdp_enabled,
    ),
    "stopping early in recomputation": Settings(
        lambda: ENTERED.enter_context(set_checkpoint_early_stop(False)),
        lambda: torch.utils.checkpoint._enable_checkpoint_early_stop,
    ),
    "hooks of all modules": Settings(
        lambda: register_module_forward_hook(lambda *_: torch.zeros(1)),  # type: ignore[arg-type]
        lambda: nn.Linear(1, 1).requires_grad_(False)(torch.ones(7, 1)).shape,
    ),
    "hooks of all optimizers": Settings(
        lambda: register_optimizer_step_pre_hook(
            lambda optimizer, *_: ((optimizer, lambda: 7.0), {})
        ),
        lambda: torch.optim.SGD([torch.ones(1)]).step(),
    ),
    "anomaly mode": Settings(
        lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled
    ),
    "hooks of saved tensors": Settings(
        lambda: saved_tensors_hooks(lambda saved: saved, lambda saved: saved * 7).__enter__(),
        lambda: torch.autograd.grad((one := torch.ones(1, requires_grad=True)) * one, one)[
            0
        ].item(),
    ),
    "function modes": Settings(
        lambda: torch.device("meta").__enter__(), lambda: torch.ones(1).device
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_one_rank_is_not_anothers(name: str) -> None:
    """Rank 0 changes it for itself alone, and the process and the next world do not see it."""
    setting = SETTINGS[name]
    before = setting.look()

    def use(rank: int) -> None:
        if rank == 0:
            setting.change()

    def look() -> Any:
        return setting.look()

    seen = each(use, look)
    next_world = fsdp_sim.simulate(lambda rank: look(), 3).results

    assert seen[0] != before
    assert seen[1:] == [before, before]
    assert next_world == [before] * 3
    assert setting.look() == before


def test_a_loss_over_shards_of_the_logits_is_each_ranks_own_block() -> None:
    """Other ranks may leave ``loss_parallel`` while one is still inside."""

    def program(rank: int) -> float:
        mesh = init_device_mesh("cpu", (2,))
        logits: Any = distribute_tensor(torch.eye(4), mesh, [Shard(1)]).requires_grad_()
        with loss_parallel():
            turn()
            loss: Any = nn.functional.cross_entropy(logits, torch.arange(4))
            loss.backward()
        assert isinstance(logits.grad, DTensor)
        return float(loss.detach().full_tensor())

    whole = float(nn.functional.cross_entropy(torch.eye(4), torch.arange(4)))

    assert fsdp_sim.simulate(program, 2).results == pytest.approx([whole] * 2, rel=1e-6)


def test_the_forward_of_ddp_that_runs_is_each_ranks_own() -> None:
    """PyTorch keeps it in the class, and no rank's model is kept there when its program has ended."""

    def program(rank: int) -> bool:
        model = DistributedDataParallel(nn.Linear(2, 2))
        with model._inside_ddp_forward():
            turn()
            active: Any = DistributedDataParallel._active_ddp_module
            if rank == 1:
                turn()
        if rank == 0:
            turn()
        return active is model

    assert fsdp_sim.simulate(program, 2).results == [True, True]
    assert DistributedDataParallel._active_ddp_module is None


def test_every_rank_casts_its_own_weights_under_autocast() -> None:
    """Autocast's cache belongs to a process: no rank uses what another has cast."""

    def program(rank: int) -> tuple[int, float]:
        weight = torch.full((2, 2), float(rank + 1), requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            first = weight @ torch.ones(2, 2)
            turn()
            second = weight @ torch.ones(2, 2)
        return first.dtype.itemsize, float((first + second).sum().detach())

    report = fsdp_sim.simulate(program, 2, trace=True)
    casts = [
        sum(op.name == "_to_copy" and op.rank == rank for op in report.trace.ops) for rank in (0, 1)
    ]

    assert report.results == [(2, 16.0), (2, 32.0)]
    assert casts[0] == casts[1] > 0


def test_torchscript_compiles_what_a_world_replaces() -> None:
    """As before, inside and afterwards: it knows PyTorch's functions by identity."""

    def program(_rank: int) -> float:
        scripted: Any = torch.jit.script(doubled)
        return float(scripted(3.0))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert fsdp_sim.simulate(program, 2).results == [6.0, 6.0]
        assert fsdp_sim.simulate(program, 1, knobs=("cuda",)).results == [6.0]
        assert program(0) == 6.0


def doubled(value: float) -> Tensor:
    """Return twice the value, through two functions of PyTorch's that a world replaces."""
    return torch.tensor(value) + torch.full((), value)


# ---------------------------------------------------------------------- meshes


def gather_over_mesh(rank: int, first: bool) -> tuple[bool, list[float]]:
    """Redistribute a tensor over a mesh whose groups are made first or second."""
    if not first:
        dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    again = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    full = torch.arange(15.0).view(5, 3)
    sharded: Any = distribute_tensor(full, mesh, [Shard(0), Shard(1)])
    gathered: Tensor = (sharded * 2).redistribute(mesh, [Replicate(), Replicate()]).to_local()
    values: list[float] = gathered.flatten().tolist()
    return mesh == again and mesh["dp"] == again["dp"] and mesh["dp"] != mesh["tp"], values


def test_meshes_of_other_ranks_and_worlds_are_not_mixed_up() -> None:
    """What PyTorch caches for one mesh is not used for an equal one of other groups."""
    expected = [2.0 * number for number in range(15)]

    for first in (True, False, True):
        results = fsdp_sim.simulate(gather_over_mesh, 4, args=(first,)).results

        assert results == [(True, expected)] * 4


# ---------------------------------------------------------------------- switches of the process

SWITCHES: dict[str, Callable[[], Any]] = {
    "garbage collection": gc.isenabled,
    "frozen garbage": gc.get_freeze_count,
    "dispatch modes": patches.get_dispatch_flags,
    "a profiler listens": lambda: torch.autograd.profiler._is_profiler_enabled,
    "exception hook": lambda: sys.excepthook,
    "end of the process": lambda: os._exit,
    "threads": lambda: threading.Thread.start,
    "locks of handlers": lambda: "lock" in vars(logging.Handler),
    "streams": lambda: (torch.cpu.Stream, torch.cpu.current_stream, torch.Stream),
    "CUDA": lambda: (torch.cuda.is_available, torch.cuda._lazy_init),
    "process groups": lambda: (torch.distributed.is_initialized(), distributed_c10d._world),
}


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("ends", ["well", "in an error", "in a finding"])
def test_what_a_world_switches_for_the_process_is_as_before_afterwards(
    name: str, ends: str
) -> None:
    """However the world ends, and in whichever order its ranks leave their modes."""
    look = SWITCHES[name]
    before = look()

    def program(rank: int) -> None:
        if rank == 1 and ends == "in an error":
            raise ValueError("an error of the program")
        if rank == 0 or ends == "well":
            dist.barrier()

    with contextlib.suppress(ValueError, fsdp_sim.Deadlock):
        fsdp_sim.simulate(program, 2)

    assert look() == before


def test_signal_handlers_are_a_ranks_own() -> None:
    """Only the main thread of a process may set real ones, and no signal comes to a rank."""
    before = signal.getsignal(signal.SIGTERM)

    def handler(*_: Any) -> None:
        """Do nothing."""

    def use(rank: int) -> None:
        if rank == 0:
            assert signal.signal(signal.SIGTERM, handler) == before

    seen = each(use, lambda: signal.getsignal(signal.SIGTERM))

    assert seen == [handler, before, before]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_rank_that_would_start_ranks_is_refused() -> None:
    """They would be real processes, of which the simulator sees nothing."""
    message = (
        r"a simulated rank must not start ranks, got torch\.multiprocessing\.spawn, whose processes "
        r"would be real ones; call the function that it was given with the rank from "
        r"os\.environ\['RANK'\], as under torchrun"
    )
    with pytest.raises(NotImplementedError, match=f"(?m)^{message}$"):
        on_one_rank(lambda: torch.multiprocessing.spawn(print, nprocs=2))


def test_the_profiler_is_one_ranks_at_a_time() -> None:
    """Two threads that use PyTorch's profiler at once may end the process: the second is refused."""

    def program(rank: int, together: bool) -> bool:
        if rank == 1 and not together:
            turn()
        with torch.profiler.profile(acc_events=True) as profiler:
            torch.ones(2).add(1)
            if together:
                turn()
        if rank == 0 and not together:
            turn()
        return "aten::add" in [each.key for each in profiler.key_averages()]

    message = (
        "PyTorch's profiler must be used by one simulated rank at a time, got rank 1 while rank 0 "
        "uses it; profile one rank, such as the one with RANK=0"
    )
    assert fsdp_sim.simulate(program, 2, args=(False,)).results == [True, True]
    with pytest.raises(NotImplementedError, match=f"(?m)^{message}$"):
        fsdp_sim.simulate(program, 2, args=(True,))


def with_a_level(inside: Callable[[], None]) -> float:
    """Return what forward-mode differentiation gives for x squared at 3."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.tensor(3.0), torch.tensor(1.0))
        inside()
        return forward_ad.unpack_dual(dual * dual).tangent.item()


def with_jvp(inside: Callable[[], None]) -> float:
    """The same, as a function transform."""

    def square(x: torch.Tensor) -> torch.Tensor:
        inside()
        return x * x

    return torch.func.jvp(square, (torch.tensor(3.0),), (torch.tensor(1.0),))[1].item()


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # PyTorch's own use
@pytest.mark.parametrize("differentiate", [with_a_level, with_jvp])
def test_forward_mode_is_one_ranks_at_a_time(
    differentiate: Callable[[Callable[[], None]], float],
) -> None:
    """PyTorch has one level of it for a process: a second rank inside it is refused by name."""

    def program(rank: int, together: bool) -> float:
        return differentiate(turn if together else lambda: None)

    message = (
        "forward-mode differentiation must be used by one simulated rank at a time, got rank 1 while "
        "rank 0 uses it; call no collective inside its level"
    )
    assert fsdp_sim.simulate(program, 2, args=(False,)).results == [6.0, 6.0]
    with pytest.raises(NotImplementedError, match=f"(?m)^{message}$"):
        fsdp_sim.simulate(program, 2, args=(True,))


def test_a_data_loader_has_worker_processes(capfd: pytest.CaptureFixture[str]) -> None:
    """They are forked from a rank, and nothing of the world gets in their way."""

    def total() -> float:
        loader: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(4.0)), num_workers=1)
        return float(sum(batch.item() for (batch,) in loader))

    assert on_one_rank(total) == 6.0
    assert capfd.readouterr().err == ""


def test_a_block_that_an_error_leaves_half_run_ends_on_its_own_thread() -> None:
    """The generator of a checkpoint whose function raises was let go by the caller, up to torch 2.12."""
    ended: list[int] = []

    def half_run() -> Iterator[None]:
        try:
            yield
        finally:
            ended.append(threading.get_ident())

    def program(rank: int) -> None:
        generator = half_run()
        next(generator)
        raise ValueError(threading.get_ident())

    with pytest.raises(ValueError) as caught:  # noqa: PT011  the message is the thread
        fsdp_sim.simulate(program, 1)
    thread = caught.value.args[0]
    del caught
    gc.collect()

    assert ended == [thread]
    assert thread != threading.get_ident()


def test_a_checkpoint_that_raises_leaves_nothing_to_the_next_world() -> None:
    """A thread that serves again would save tensors with the hooks of the checkpoint."""

    def fails(x: Tensor) -> Tensor:
        raise ValueError("in a checkpoint")

    def program(rank: int) -> None:
        checkpoint(fails, torch.ones(1, requires_grad=True), use_reentrant=False)

    with pytest.raises(ValueError, match="in a checkpoint"):
        fsdp_sim.simulate(program, 2)

    assert (
        fsdp_sim.simulate(lambda rank: SETTINGS["hooks of saved tensors"].look(), 2).results
        == [2.0] * 2
    )


def test_garbage_is_collected_where_the_world_says_alone() -> None:
    """Python's own collector would run at other points in another process."""
    assert gc.isenabled()
    assert fsdp_sim.simulate(lambda rank: gc.isenabled(), 2).results == [False, False]


def test_replacements_are_undone_also_when_undoing_one_raises() -> None:
    """A broken one comes out as itself, and leaves none of the others in force."""
    undo, owner = patches.Patches(), SimpleNamespace(name="own")
    undo.replace(owner, "name", "replaced")
    undo.on_exit(lambda: pytest.fail("broken"))

    with pytest.raises(pytest.fail.Exception, match="broken"):
        undo.undo()

    assert owner.name == "own"
