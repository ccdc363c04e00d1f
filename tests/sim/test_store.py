"""The world's store: what one rank sets another gets, and who waits lets the others run."""

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

import fsdp_sim

c10d: Any = distributed_c10d
untyped: Any = dist
"""PyTorch types neither the stores nor what the store-based barrier takes."""


def store() -> Any:
    """Return the store that the default group was made with."""
    return c10d._get_default_store()


def test_a_get_waits_until_the_key_is_set() -> None:
    """Rank 0 comes first and waits for rank 1."""

    def program(rank: int) -> bytes:
        if rank == 1:
            store().set("key", "value")
        return bytes(store().get("key"))

    assert fsdp_sim.simulate(program, 2).results == [b"value"] * 2


def test_counters_add_up() -> None:
    """Each rank sees a sum of its own; the last one is everybody's."""

    def program(rank: int) -> int:
        return int(store().add("count", rank + 1))

    assert fsdp_sim.simulate(program, 3).results == [1, 3, 6]


def test_a_store_based_barrier_lets_everybody_go_on() -> None:
    """PyTorch's own, which waits for a key that the last rank sets."""

    def program(rank: int) -> int:
        c10d._store_based_barrier(rank, store(), "group", 3, timedelta(seconds=1))
        return rank

    assert fsdp_sim.simulate(program, 3).results == [0, 1, 2]


def test_a_wait_for_several_keys_needs_them_all() -> None:
    """Set one by one, by different ranks."""

    def program(rank: int) -> bool:
        store().set(f"key {rank}", b"1")
        store().wait([f"key {each}" for each in range(3)])
        return bool(store().check([f"key {each}" for each in range(3)]))

    assert fsdp_sim.simulate(program, 3).results == [True] * 3


def test_values_are_compared_and_set_and_deleted() -> None:
    """On one rank: set if absent, set if equal, keep otherwise."""

    def program(rank: int) -> list[Any]:
        answers = [
            store().compare_set("key", *pair) for pair in (("", "a"), ("x", "b"), ("a", "c"))
        ]
        return [
            *answers,
            store().delete_key("key"),
            store().delete_key("key"),
            store().check(["key"]),
        ]

    assert fsdp_sim.simulate(program, 1).results == [[b"a", b"a", b"c", True, False, False]]


def test_many_keys_are_set_and_got_at_once() -> None:
    """And a value grows by appending."""

    def program(rank: int) -> Any:
        if rank == 0:
            store().multi_set(["a", "b"], ["1", "2"])
            store().append("c", "3")
            store().append("c", "4")
            store().set("done", "")
        store().wait(["done"])
        return store().multi_get(["a", "b", "c"])

    assert fsdp_sim.simulate(program, 2).results == [[b"1", b"2", b"34"]] * 2


def test_queues_give_in_order_and_wait_when_empty() -> None:
    """Rank 0 pops before rank 1 has pushed."""

    def program(rank: int) -> list[bytes]:
        own = untyped.TCPStore("localhost", 1234, 2, rank == 0)
        if rank == 1:
            own.queue_push("queue", "first")
            own.queue_push("queue", "second")
            return []
        return [own.queue_pop("queue") for _ in range(2)]

    assert fsdp_sim.simulate(program, 2).results == [[b"first", b"second"], []]


def test_an_empty_queue_can_be_asked_without_waiting() -> None:
    """PyTorch's error for it."""

    def program(rank: int) -> int:
        own = untyped.HashStore()
        with pytest.raises(dist.QueueEmptyError):
            own.queue_pop("queue", block=False)
        return own.queue_len("queue")

    assert fsdp_sim.simulate(program, 1).results == [0]


def test_a_key_that_nobody_sets_is_a_deadlock() -> None:
    """No timeout is waited for; the key is named as the program called it."""

    def program(rank: int) -> None:
        if rank == 0:
            store().wait(["never"], timedelta(seconds=1))

    with pytest.raises(fsdp_sim.Deadlock) as caught:
        fsdp_sim.simulate(program, 2)
    assert "store key" in str(caught.value)
    assert "never" in str(caught.value)


def test_a_key_that_comes_after_a_collective_is_a_deadlock() -> None:
    """Rank 0 waits for the key before the barrier, rank 1 sets it behind it."""

    def program(rank: int) -> None:
        if rank == 0:
            store().wait(["key"])
        dist.barrier()
        if rank == 1:
            store().set("key", "late")

    with pytest.raises(fsdp_sim.Deadlock, match="store key"):
        fsdp_sim.simulate(program, 2)


def test_stores_that_a_program_makes_are_the_worlds() -> None:
    """A TCPStore of a program's own connects the simulated ranks, without a socket."""

    def program(rank: int) -> bytes:
        own = untyped.TCPStore("localhost", 1234, 2, rank == 0)
        own.set(f"from {rank}", str(rank))
        return bytes(own.get(f"from {1 - rank}"))

    assert fsdp_sim.simulate(program, 2).results == [b"1", b"0"]


def test_two_stores_of_a_program_are_apart() -> None:
    """Other ports, other keys."""

    def program(rank: int) -> bool:
        first = untyped.TCPStore("localhost", 1, 2, rank == 0)
        second = untyped.TCPStore("localhost", 2, 2, rank == 0)
        first.set("key", "value")
        return bool(second.check(["key"]))

    assert fsdp_sim.simulate(program, 2).results == [False, False]
