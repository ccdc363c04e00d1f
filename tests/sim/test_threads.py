"""Threads: a program's own may run, and are refused what belongs to a rank."""

import threading  # noqa: TID251  threads of a program are what is tested
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

import fsdp_sim


def in_thread(work: Callable[[], Any]) -> None:
    """Run something on a thread of its own, to its end."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "an operator": lambda x: x.add_(1),
    "a view of its values": lambda x: x.reshape(2, 1) * 2,
    "a read": Tensor.item,
    "a read past any operator": lambda x: x.tolist(),
    "printing": str,
    "a collective": dist.all_reduce,
    "a stream": lambda x: torch.cpu.Stream(),
    "the current stream": lambda x: torch.cpu.current_stream(),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_thread_does_with_a_ranks_device_ends_the_run(name: str) -> None:
    """Nobody would see it: the run is neither clean nor a finding."""

    def program(rank: int) -> None:
        x = torch.ones(1) if name == "a read" else torch.ones(2)
        in_thread(lambda: REFUSED[name](x))

    with pytest.raises(fsdp_sim.UnseenThread) as caught:
        fsdp_sim.simulate(program, 2)

    assert str(caught.value).startswith(
        "tensors, streams and collectives of a rank must be used on the rank's own thread, got "
    )
    assert "a thread that rank 0 started, at " in str(caught.value)
    assert "test_threads.py:" in str(caught.value)


def test_a_refusal_cannot_be_swallowed() -> None:
    """What a thread of a pool raises waits in a future that nobody may ask."""

    def program(rank: int) -> None:
        x = torch.ones(2)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: x * 2)
        dist.barrier()

    with pytest.raises(fsdp_sim.UnseenThread):
        fsdp_sim.simulate(program, 2)


def test_a_thread_may_work_with_what_is_its_own() -> None:
    """Data of its own, and plain Python."""

    def program(rank: int) -> float:
        results: list[float] = []
        in_thread(lambda: results.append((torch.ones(3) + rank).sum().item()))
        return results[0]

    assert fsdp_sim.simulate(program, 2).results == [3.0, 6.0]


def test_a_thread_that_no_rank_started_is_left_alone() -> None:
    """Threads of the caller go on beside a world."""
    values: list[float] = []

    def program(rank: int) -> None:
        dist.barrier()

    fsdp_sim.simulate(program, 1)
    in_thread(lambda: values.append(torch.ones(2).sum().item()))

    assert values == [2.0]


@pytest.mark.parametrize("is_staged_aside", [False, True])
@pytest.mark.parametrize("knobs", [(), ("cuda",)])
def test_a_checkpoint_is_saved_asynchronously(
    tmp_path: Path, knobs: tuple[str, ...], is_staged_aside: bool
) -> None:
    """What is saved is what the weights were at the call; the program may go on training meanwhile."""

    def program(rank: int) -> list[float]:
        if knobs:
            torch.cuda.set_device(rank)
        weight = torch.ones(2, device="cuda" if knobs else "cpu") * (rank + 1)
        state = {f"weight of rank {rank}": weight}
        options = StagingOptions(False, False, is_staged_aside, False)
        saving: Any = async_save(
            state, checkpoint_id=tmp_path / "saved", async_stager=DefaultStager(options)
        )
        if is_staged_aside:
            saving.staging_completion.result()
        weight.zero_()
        (saving.upload_completion if is_staged_aside else saving).result()
        load(state, checkpoint_id=tmp_path / "saved")
        return weight.tolist()

    assert fsdp_sim.simulate(program, 2, knobs=knobs).results == [[1.0, 1.0], [2.0, 2.0]]


def test_what_fails_in_an_asynchronous_save_comes_out_of_its_future(tmp_path: Path) -> None:
    """As itself, where the program asks for the result."""

    def program(rank: int) -> str:
        (tmp_path / "a file").touch()
        folder = tmp_path / "a file" / "saved"
        saving: Any = async_save({"weight": torch.ones(2)}, checkpoint_id=folder)
        with pytest.raises(CheckpointException) as caught:
            saving.result()
        return str(caught.value)

    assert "NotADirectoryError" in fsdp_sim.simulate(program, 1).results[0]
