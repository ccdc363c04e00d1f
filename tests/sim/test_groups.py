"""Groups: start-up is adopted, groups come and go, and nothing goes past the simulator unseen."""

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, ProcessGroup
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import init_process_group, new_group, split_group

import fsdp_sim

c10d: Any = distributed_c10d
untyped: Any = dist
HAND_MADE: Any = FakeProcessGroup._create_internal(0, 2)
CPU = torch.device("cpu")


def run(program: Callable[[int], Any], world_size: int = 2) -> list[Any]:
    """Run a program that must give no finding."""
    return fsdp_sim.simulate(program, world_size).results


def summed(group: Any = None) -> float:
    """Return the sum of rank + 1 over the ranks of a group."""
    value = torch.full((1,), dist.get_rank() + 1.0)
    dist.all_reduce(value, group=group)
    return value.item()


# ---------------------------------------------------------------------- start-up


def test_a_rank_starts_with_its_default_group_in_place() -> None:
    """Backend "sim", its own rank, the world's size."""

    def program(rank: int) -> Any:
        return dist.is_initialized(), dist.get_backend(), dist.get_rank(), dist.get_world_size()

    assert run(program) == [(True, "sim", 0, 2), (True, "sim", 1, 2)]


@pytest.mark.parametrize(
    "backend", [None, "gloo", "nccl", "NCCL", "sim", "cpu:gloo,cuda:nccl", dist.Backend.GLOO]
)
@pytest.mark.parametrize("start", [dist.init_process_group, init_process_group])
def test_start_up_adopts_the_default_group(start: Callable[..., None], backend: Any) -> None:
    """Also through a name that was bound to the function before the world."""

    def program(rank: int) -> tuple[float, str]:
        start(backend, rank=rank, world_size=2)
        return summed(), dist.get_backend()

    assert run(program) == [(3.0, "sim")] * 2


def test_a_second_start_up_raises_as_in_pytorch() -> None:
    """The same words."""

    def program(rank: int) -> None:
        dist.init_process_group()
        dist.init_process_group()

    with pytest.raises(ValueError, match=r"^trying to initialize the default process group twice!"):
        run(program)


@pytest.mark.parametrize(
    "backend", ["mpi", "ucc", "fake", "threaded", "cpu:gloo,cuda:mine", "nope"]
)
def test_other_backends_are_refused_by_name(backend: str) -> None:
    """At start-up, and for a new group."""

    def program(rank: int) -> list[str]:
        messages = []
        for call in (
            lambda: dist.init_process_group(backend),
            lambda: dist.new_group([0, 1], backend=backend),
        ):
            with pytest.raises(ValueError, match="backend must be") as caught:
                call()
            messages.append(str(caught.value))
        return messages

    message = (
        "backend must be None, one of gloo, nccl, sim, or a map of devices to these in a simulated "
        f"world, got {backend!r}"
    )
    assert run(program) == [[message] * 2] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 5}, "init_process_group: rank must be 0, the simulated rank, got 5"),
        (
            {"world_size": 8},
            "init_process_group: world_size must be 2, as in the simulated world, got 8",
        ),
    ],
)
def test_a_place_that_is_not_the_ranks_is_refused(arguments: dict[str, int], message: str) -> None:
    """Before anything is changed: the group can still be adopted."""

    def program(rank: int) -> str:
        if rank == 1:
            return message
        with pytest.raises(ValueError, match="must be") as caught:
            c10d.init_process_group(**arguments)
        dist.init_process_group()
        return str(caught.value)

    assert run(program) == [message] * 2


def test_a_world_leaves_pytorch_as_it_was() -> None:
    """The functions that it replaces are PyTorch's own again."""
    run(lambda rank: summed())

    with pytest.raises(ValueError, match="environment variable"):
        dist.init_process_group("gloo")
    with pytest.raises(RuntimeError, match=r"must be used inside fsdp_sim\.simulate"):
        dist.init_process_group("sim", rank=0, world_size=1, store=untyped.HashStore())
    assert not dist.is_initialized()


# ---------------------------------------------------------------------- groups


@pytest.mark.parametrize("make", [dist.new_group, new_group])
@pytest.mark.parametrize("backend", [None, "gloo", "nccl"])
def test_a_group_of_some_ranks_reduces_among_them(make: Callable[..., Any], backend: Any) -> None:
    """All ranks make it, its own use it."""

    def program(rank: int) -> float:
        group = make([0, 2], backend=backend)
        return summed(group) if rank != 1 else -1.0

    assert run(program, 3) == [4.0, -1.0, 4.0]


def test_a_group_can_be_made_by_its_own_ranks_alone() -> None:
    """With ``use_local_synchronization``."""

    def program(rank: int) -> float:
        if rank == 1:
            return -1.0
        return summed(dist.new_group([0, 2], use_local_synchronization=True))

    assert run(program, 3) == [4.0, -1.0, 4.0]


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters,
    reason="torch 2.11 always sorts the ranks",
)
def test_group_ranks_follow_the_order_given() -> None:
    """Unsorted ranks where the caller says so: an all-gather shows the order."""

    def program(rank: int) -> list[float]:
        group = dist.new_group([2, 0, 1], sort_ranks=False)
        out = [torch.empty(1) for _ in range(3)]
        dist.all_gather(out, torch.tensor([float(rank)]), group=group)
        return [each.item() for each in out]

    assert run(program, 3) == [[2.0, 0.0, 1.0]] * 3


def test_a_group_that_one_rank_does_not_make_is_a_deadlock() -> None:
    """Every rank must make every group, whether it is a member or not and whether it is used or not."""

    def program(rank: int, *, leaves_out: int) -> None:
        if rank != leaves_out:
            dist.new_group([0, 2])

    for leaves_out in (1, 2):
        with pytest.raises(fsdp_sim.Deadlock) as caught:
            fsdp_sim.simulate(partial(program, leaves_out=leaves_out), 3)
        finding = caught.value.finding
        assert finding is not None
        assert finding.message == (
            "the program has ended before every rank made a group; "
            f"missing: rank {leaves_out} in new_group (call 0 on group '0')"
        )
        assert finding.ranks == (leaves_out,)
    assert fsdp_sim.simulate(partial(program, leaves_out=-1), 3).findings == ()


def test_groups_of_other_ranks_at_one_place_are_a_mismatch() -> None:
    """They would get one name: each rank names its groups by counting them."""

    def program(rank: int) -> None:
        dist.new_group([0, 1])
        dist.new_group([2 * (rank // 2), 2 * (rank // 2) + 1])

    with pytest.raises(fsdp_sim.CollectiveMismatch) as caught:
        fsdp_sim.simulate(program, 4)

    finding = caught.value.finding
    assert finding is not None
    assert re.fullmatch(
        r"new_group \(call 1 on group '0'\) must be made by every rank with the same ranks: rank 0 makes "
        r"groups of \[\[0, 1\]\] at \S+test_groups\.py:\d+, rank 2 of \[\[2, 3\]\] at "
        r"\S+test_groups\.py:\d+",
        finding.message,
    )


def test_a_group_with_local_synchronisation_is_its_members_business() -> None:
    """Others need not call."""

    def program(rank: int) -> None:
        dist.new_group([rank], use_local_synchronization=True)
        if rank == 0:
            dist.new_group([0], use_local_synchronization=True)

    assert fsdp_sim.simulate(program, 2).findings == ()


def test_a_split_waits_for_all_ranks_of_the_parent() -> None:
    """NCCL splits the parent's communicator, which takes all of them."""

    def program(rank: int, *, misses: bool) -> None:
        if rank != 2 or not misses:
            dist.split_group(split_ranks=[[0, 1]])

    assert fsdp_sim.simulate(partial(program, misses=False), 3).findings == ()
    with pytest.raises(fsdp_sim.Deadlock) as caught:
        fsdp_sim.simulate(partial(program, misses=True), 3)
    finding = caught.value.finding
    assert finding is not None
    assert finding.message == "no rank can go on; missing: rank 2"
    assert finding.detail[:2] == (
        "rank 2 has ended",
        "rank 0 waits (split_group) for rank 2 to call split_group (call 0 on group '0')",
    )


def test_splits_that_differ_by_rank_are_a_mismatch() -> None:
    """The split must be the same on all ranks of the parent."""

    def program(rank: int) -> None:
        dist.split_group(split_ranks=[[0], [1, 2]] if rank < 2 else [[2], [0, 1]])

    with pytest.raises(fsdp_sim.CollectiveMismatch, match=r"rank 2 of \[\[2\], \[0, 1\]\] at"):
        fsdp_sim.simulate(program, 3)


@pytest.mark.parametrize("split", [dist.split_group, split_group])
def test_a_group_can_be_split(split: Callable[..., Any]) -> None:
    """Each rank gets its own part; one that is in none gets None."""

    def program(rank: int) -> Any:
        part = split(split_ranks=[[0, 1], [3, 2]])
        return None if part is None else (summed(part), dist.get_process_group_ranks(part))

    assert run(program, 5) == [(3.0, [0, 1])] * 2 + [(7.0, [2, 3])] * 2 + [None]


def test_a_part_can_be_split_again() -> None:
    """``split_ranks`` are ranks of the parent."""

    def program(rank: int) -> float:
        parent = dist.split_group(split_ranks=[[0, 1], [2, 3]])
        child = dist.split_group(parent, split_ranks=[[1], [0]])
        return summed(parent) + 100 * summed(child)

    assert run(program, 4) == [103.0, 203.0, 307.0, 407.0]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([], "split_ranks cannot be None or empty"),
        ([[]], "the split group cannot be empty"),
        ([[0, 0]], "the split group cannot have duplicate ranks"),
        ([[0, 4]], "split_ranks must be ranks of the parent group, 0 to 1, got [0, 4]"),
    ],
)
def test_a_split_that_cannot_be_is_refused(ranks: list[list[int]], message: str) -> None:
    """In PyTorch's words where it has some."""

    def program(rank: int) -> str:
        with pytest.raises(ValueError) as caught:  # noqa: PT011  the whole message is compared
            dist.split_group(split_ranks=ranks)
        return str(caught.value)

    assert run(program) == [message] * 2


def test_a_group_that_was_taken_out_of_its_world_cannot_be_used() -> None:
    """Nobody would answer: its collectives raise, and move no made-up values."""
    groups: list[Any] = []

    def program(rank: int) -> None:
        groups.append(dist.new_group([0, 1]))

    run(program)

    for group in groups:
        with pytest.raises(RuntimeError, match="FakeProcessGroup collective operation error"):
            dist.all_reduce(torch.ones(2), group=group)
        with pytest.raises(RuntimeError, match="FakeProcessGroup collective operation error"):
            dist.barrier(group)


def test_a_group_is_gone_once_destroyed() -> None:
    """Using it raises; a new one over the same ranks starts at operation 0."""

    def program(rank: int) -> Any:
        first = dist.new_group([0, 1])
        one = summed(first)
        dist.destroy_process_group(first)
        with pytest.raises(ValueError, match="is not registered"):
            dist.get_rank(first)
        second = dist.new_group([0, 1])
        return one, summed(second)

    assert run(program) == [(3.0, 3.0)] * 2


def test_a_name_may_be_used_again() -> None:
    """A destroyed group's operations never meet those of its successor."""

    def program(rank: int) -> float:
        total = 0.0
        for _ in range(3):
            group = dist.new_group([0, 1], use_local_synchronization=True)
            total += summed(group)
            dist.destroy_process_group(group)
        return total

    assert run(program) == [9.0, 9.0]


def test_the_default_group_can_be_destroyed_and_made_again() -> None:
    """Its sub-groups go with it; a new start-up makes a new one."""

    def program(rank: int) -> Any:
        dist.init_process_group("nccl")
        group = dist.new_group([0, 1])
        before = summed() + summed(group)
        dist.destroy_process_group()
        gone = dist.is_initialized()
        dist.init_process_group("gloo", rank=rank, world_size=2)
        again = dist.new_group([0, 1])
        return before, gone, summed() + summed(again)

    assert run(program) == [(6.0, False, 6.0)] * 2


def test_meshes_are_sliced_and_flattened() -> None:
    """A 2x2 mesh: sums over rows, columns, and both."""

    def program(rank: int) -> list[float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        flat = mesh._flatten("world")
        return [summed(each.get_group()) for each in (mesh["dp"], mesh["tp"], flat)]

    assert run(program, 4) == [
        [4.0, 3.0, 10.0],
        [6.0, 3.0, 10.0],
        [4.0, 7.0, 10.0],
        [6.0, 7.0, 10.0],
    ]


# ---------------------------------------------------------------------- nothing goes past unseen


@pytest.mark.parametrize("is_made_inside", [False, True])
def test_a_backend_built_by_hand_raises_on_first_use(is_made_inside: bool) -> None:
    """B66: PyTorch's own fake group would return without a word."""

    def program(rank: int) -> None:
        backend = HAND_MADE
        if is_made_inside:
            backend = FakeProcessGroup._create_internal(rank, 2)
        backend.allreduce([torch.tensor([1.0, 2.0, 3.0])])

    with pytest.raises(RuntimeError, match="a process group built by hand"):
        run(program)


def test_a_group_built_by_hand_raises_on_first_use() -> None:
    """B66: it was never registered in the running world."""

    def program(rank: int) -> None:
        group = ProcessGroup(untyped.HashStore(), rank, 2)
        backend = FakeProcessGroup._create_internal(rank, 2)
        group._register_backend(CPU, ProcessGroup.BackendType.CUSTOM, backend)
        group.allreduce([torch.ones(3)]).wait()

    with pytest.raises(
        RuntimeError, match="must use a process group of its own in the running world"
    ):
        run(program)


def test_another_ranks_group_raises_on_first_use() -> None:
    """Groups are per rank: sharing one through a global is a mistake of the script."""
    shared: list[Any] = []

    def program(rank: int) -> None:
        shared.append(dist.new_group([0, 1]))
        dist.barrier()
        shared[1 - rank].allreduce([torch.ones(1)])

    with pytest.raises(RuntimeError, match="must use a process group of its own"):
        run(program)
