"""Point-to-point follows NCCL: messages rendezvous on the device, in order of issue."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_sim


def exchange(
    sends: Sequence[tuple[torch.Tensor, int]], recvs: Sequence[tuple[torch.Tensor, int]]
) -> None:
    """Issue all in one batch and wait."""
    operations = [dist.P2POp(dist.isend, tensor, peer) for tensor, peer in sends]
    operations += [dist.P2POp(dist.irecv, tensor, peer) for tensor, peer in recvs]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def test_a_message_arrives() -> None:
    """Blocking calls, and handles that are waited for."""

    def program(rank: int) -> list[float]:
        out, back = torch.empty(2), torch.empty(1)
        if rank == 0:
            dist.send(torch.tensor([1.0, 2.0]), 1)
            work = dist.irecv(back, 1)
        else:
            dist.recv(out, 0)
            work = dist.isend(out[:1] * 5, 0)
        assert work is not None
        work.wait()
        return [*out.tolist()] if rank else [*back.tolist()]

    assert fsdp_sim.simulate(program, 2, poison=True).results == [[5.0], [1.0, 2.0]]


def test_messages_of_a_pair_arrive_in_order_of_issue() -> None:
    """The k-th recv gets the k-th send."""

    def program(rank: int) -> list[float]:
        tensors = [torch.full((1,), float(each) * (1 - rank)) for each in range(3)]
        for tensor in tensors:
            dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
        return [tensor.item() for tensor in tensors]

    assert fsdp_sim.simulate(program, 2).results == [[0.0, 1.0, 2.0]] * 2


def test_sending_first_on_both_sides_is_a_deadlock() -> None:
    """Small messages happen to pass on gloo: no protection.  The report names the way out."""

    def program(rank: int) -> None:
        dist.send(torch.ones(1), 1 - rank)
        dist.recv(torch.empty(1), 1 - rank)

    with pytest.raises(fsdp_sim.Deadlock, match=r"torch\.distributed\.batch_isend_irecv") as caught:
        fsdp_sim.simulate(program, 2)
    assert caught.value.finding is not None
    assert {op.name for op in caught.value.finding.ops} == {"send", "recv"}


def test_sending_first_with_handles_is_a_deadlock_too() -> None:
    """``isend`` frees the host, not the stream of the pair."""

    def program(rank: int) -> None:
        works = [dist.isend(torch.ones(1), 1 - rank), dist.irecv(torch.empty(1), 1 - rank)]
        for work in works:
            assert work is not None
            work.wait()

    with pytest.raises(fsdp_sim.Deadlock):
        fsdp_sim.simulate(program, 2)


def test_a_send_that_meets_a_recv_is_clean() -> None:
    """One side receives first."""

    def program(rank: int) -> float:
        got = torch.empty(1)
        if rank == 0:
            dist.send(torch.ones(1), 1)
            dist.recv(got, 1)
        else:
            dist.recv(got, 0)
            dist.send(torch.ones(1), 0)
        return got.item()

    assert fsdp_sim.simulate(program, 2, poison=True).results == [1.0, 1.0]


def test_a_batch_sends_first_on_both_sides() -> None:
    """All operations of a batch are one device op: they match in any order."""

    def program(rank: int) -> float:
        got = torch.empty(1)
        exchange([(torch.tensor([float(rank)]), 1 - rank)], [(got, 1 - rank)])
        return got.item()

    assert fsdp_sim.simulate(program, 2, poison=True).results == [1.0, 0.0]


def test_batches_in_opposite_orders_are_a_deadlock() -> None:
    """A batch is one device op, and two batches of a group run one after the other."""

    def program(rank: int) -> None:
        exchange([(torch.ones(1), 1 - rank)], [])
        exchange([], [(torch.empty(1), 1 - rank)])

    with pytest.raises(fsdp_sim.Deadlock, match="batch_isend_irecv"):
        fsdp_sim.simulate(program, 2)


def test_a_ring_of_batches_is_clean() -> None:
    """Each rank sends to the next and receives from the one before."""

    def program(rank: int) -> float:
        got = torch.empty(1)
        exchange([(torch.tensor([float(rank)]), (rank + 1) % 4)], [(got, (rank - 1) % 4)])
        return got.item()

    assert fsdp_sim.simulate(program, 4, poison=True).results == [3.0, 0.0, 1.0, 2.0]


def test_a_ring_of_single_messages_is_clean() -> None:
    """Each pair of ranks has a stream of its own, so nothing is behind anything."""

    def program(rank: int) -> float:
        got = torch.empty(1)
        works = [
            dist.isend(torch.tensor([float(rank)]), (rank + 1) % 4),
            dist.irecv(got, (rank - 1) % 4),
        ]
        for work in works:
            assert work is not None
            work.wait()
        return got.item()

    assert fsdp_sim.simulate(program, 4, poison=True).results == [3.0, 0.0, 1.0, 2.0]


def test_the_middle_stage_of_1f1b_is_clean() -> None:
    """Activations go down and gradients up, each pair of directions in one batch."""

    def program(rank: int) -> list[float]:
        forward, backward = torch.full((1,), 1.0 + rank), torch.full((1,), 10.0 * (1 + rank))
        down, up = torch.zeros(1), torch.zeros(1)
        if rank == 0:
            exchange([(forward, 1)], [])
            exchange([(forward, 1)], [(up, 1)])
        elif rank == 1:
            exchange([], [(down, 0)])
            exchange([(forward, 2)], [])
            exchange([(backward, 0)], [(down, 0)])
            exchange([], [(up, 2)])
        else:
            exchange([], [(down, 1)])
            exchange([(backward, 1)], [])
        return [down.item(), up.item()]

    assert fsdp_sim.simulate(program, 3).results == [[0.0, 20.0], [1.0, 30.0], [2.0, 0.0]]


def test_a_batch_and_single_messages_do_not_meet() -> None:
    """They travel on different communicators: the group's and the pair's."""

    def program(rank: int) -> float:
        got = torch.empty(1)
        if rank == 0:
            exchange([(torch.ones(1), 1)], [])
        else:
            dist.recv(got, 0)
        return got.item()

    with pytest.raises(fsdp_sim.Deadlock):
        fsdp_sim.simulate(program, 2)


@pytest.mark.parametrize("is_batched", [False, True])
def test_reading_a_message_before_its_wait_is_a_race(is_batched: bool) -> None:
    """``wait`` joins the stream that the message arrives on."""

    def program(rank: int) -> Any:
        tensor = torch.ones(1)
        operation = dist.isend if rank == 0 else dist.irecv
        if is_batched:
            works = dist.batch_isend_irecv([dist.P2POp(operation, tensor, 1 - rank)])
        else:
            works = [work for work in (operation(tensor, 1 - rank),) if work is not None]
        doubled = tensor * 2
        for work in works:
            work.wait()
        return doubled

    with pytest.raises(fsdp_sim.Race):
        fsdp_sim.simulate(program, 2)


def test_receiving_into_what_the_same_batch_sends_is_a_race() -> None:
    """All operations of a batch run at once, whatever their order in the list."""

    def program(rank: int, *, shares: bool) -> float:
        mine = torch.full((2,), float(rank))
        got = mine if shares else torch.empty(2)
        exchange([(mine, 1 - rank)], [(got, 1 - rank)])
        return got.sum().item()

    assert fsdp_sim.simulate(lambda rank: program(rank, shares=False), 2).results == [2.0, 0.0]
    with pytest.raises(fsdp_sim.Race, match="of one batch run at once"):
        fsdp_sim.simulate(lambda rank: program(rank, shares=True), 2)


def test_a_batch_may_send_one_buffer_twice_and_fill_halves_of_another() -> None:
    """Two readers do not collide, nor do disjoint bytes."""

    def program(rank: int) -> list[float]:
        mine, got = torch.full((1,), float(rank)), torch.empty(2)
        others = [(rank + 1) % 3, (rank + 2) % 3]
        exchange(
            [(mine, other) for other in others],
            [(got[index : index + 1], other) for index, other in enumerate(others)],
        )
        return got.tolist()

    assert fsdp_sim.simulate(program, 3).results == [[1.0, 2.0], [2.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_batch_may_send_to_its_own_rank(world_size: int) -> None:
    """Both parts of the message are the rank's."""

    def program(rank: int) -> list[float]:
        got = torch.empty(2)
        exchange([(torch.full((2,), 3.0 + rank), rank)], [(got, rank)])
        return got.tolist()

    results = fsdp_sim.simulate(program, world_size, poison=True).results
    assert results == [[3.0 + rank] * 2 for rank in range(world_size)]


def test_a_message_to_the_own_rank_that_nobody_receives_is_a_deadlock() -> None:
    """The device waits for the other part, and nobody issues it."""

    def program(rank: int) -> None:
        exchange([(torch.ones(2), rank)], [])
        torch.cpu.synchronize()

    with pytest.raises(fsdp_sim.Deadlock, match="no rank can go on; missing: rank 0"):
        fsdp_sim.simulate(program, 1)


def test_receiving_from_anybody_is_refused() -> None:
    """NCCL cannot."""

    def program(rank: int) -> None:
        dist.recv(torch.empty(1))

    with pytest.raises(NotImplementedError, match="recv_any_source_"):
        fsdp_sim.simulate(program, 2)


def test_a_message_of_another_size_is_a_mismatch() -> None:
    """Two sent, three received."""

    def program(rank: int) -> None:
        dist.send(torch.ones(2), 1) if rank == 0 else dist.recv(torch.ones(3), 0)

    with pytest.raises(
        fsdp_sim.CollectiveMismatch, match=r"differs in sizes: \(2,\) on one, \(3,\)"
    ):
        fsdp_sim.simulate(program, 2)


def test_a_message_with_another_tag_is_a_mismatch() -> None:
    """NCCL ignores tags, so a program that counts on them mixes its messages up."""

    def program(rank: int) -> None:
        tensors = [torch.zeros(1), torch.ones(1)]
        if rank == 0:
            for tag, tensor in enumerate(tensors):
                dist.send(tensor, 1, tag=tag)
        else:
            for tag in (1, 0):
                dist.recv(tensors[tag], 0, tag=tag)

    with pytest.raises(
        fsdp_sim.CollectiveMismatch, match=r"differs in tag: 0 on one, 1 on the other"
    ):
        fsdp_sim.simulate(program, 2)


def test_messages_are_not_compared_by_annotation() -> None:
    """A stage may send inside a range that the next one does not open."""

    def program(rank: int) -> float:
        tensor = torch.full((1,), 1.0 - rank)
        if rank == 0:
            with torch.autograd.profiler.record_function("FSDP::stage"):
                dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
        return tensor.item()

    assert fsdp_sim.simulate(program, 2).results == [1.0, 1.0]


def test_group_ranks_address_peers() -> None:
    """``group_dst`` and ``group_src`` count inside the group."""

    def program(rank: int) -> float:
        group = dist.new_group([1, 2])
        tensor = torch.full((1,), float(rank))
        if rank == 1:
            dist.send(tensor, group=group, group_dst=1)
        elif rank == 2:
            dist.recv(tensor, group=group, group_src=0)
        return tensor.item()

    assert fsdp_sim.simulate(program, 3).results == [0.0, 1.0, 1.0]
