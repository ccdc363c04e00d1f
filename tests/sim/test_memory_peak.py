"""Memory peak: the model of the caching allocator, by hand-worked examples and its invariants."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_sim.checkers import memory_peak as module
from fsdp_sim.checkers.caching_allocator import CachingAllocator
from fsdp_sim.checkers.memory_peak import MemoryPeak, Peaks
from tests.sim.ops import Ops

KIB, MIB = 1 << 10, 1 << 20


def peaks(ops: Ops) -> Peaks:
    """Return the peaks of rank 0."""
    checker = ops.analyse("memory_peak").checker(MemoryPeak)
    assert checker is not None
    return checker.peaks(0)


@pytest.mark.parametrize(
    ("nbytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (1 * MIB, 1 * MIB, 2 * MIB),
        (1 * MIB + 1, 1 * MIB + 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (19 * MIB + 1, 20 * MIB, 20 * MIB),  # a rest of 1 MiB or less is not split off
        (21 * MIB, 22 * MIB, 22 * MIB),
    ],
)
def test_one_allocation_takes_a_segment_of_its_class(
    nbytes: int, allocated: int, reserved: int
) -> None:
    """Rounding, size classes and splitting as in PyTorch."""
    ops = Ops()
    ops.alloc(0, 0, nbytes)

    assert peaks(ops) == Peaks(nbytes, allocated, reserved)


def test_small_blocks_share_a_segment() -> None:
    """The rest of a split block serves the next one."""
    ops = Ops()
    for block in range(4):
        ops.alloc(0, block, 512 * KIB)

    assert peaks(ops) == Peaks(2 * MIB, 2 * MIB, 2 * MIB)


def test_freed_memory_is_reused_and_merged() -> None:
    """Two neighbours become one block again."""
    ops = Ops()
    ops.alloc(0, 0, MIB)
    ops.alloc(0, 1, MIB)
    ops.free(0, 0)
    ops.free(0, 1)
    for block in range(2, 6):
        ops.alloc(0, block, 512 * KIB)

    assert peaks(ops).reserved == 2 * MIB


def test_another_stream_has_pools_of_its_own() -> None:
    """What one stream frees the other cannot use."""
    ops = Ops()
    ops.alloc(0, 0, MIB)
    ops.free(0, 0)
    ops.alloc(1, 1, MIB)

    assert peaks(ops) == Peaks(MIB, MIB, 4 * MIB)


def test_the_smallest_block_that_fits_is_taken() -> None:
    """Else the large one would be split and a second segment needed."""
    ops = Ops()
    for block, nbytes in enumerate((30 * MIB, 12 * MIB)):
        ops.alloc(0, block, nbytes)
    ops.free(0, 0)
    ops.free(0, 1)
    ops.alloc(0, 2, 12 * MIB)
    ops.alloc(0, 3, 30 * MIB)

    assert peaks(ops).reserved == 42 * MIB


@pytest.mark.parametrize(("waits", "reserved"), [(False, 4 * MIB), (True, 2 * MIB)])
def test_a_recorded_block_waits_for_the_streams_work(waits: bool, reserved: int) -> None:
    """It returns to its pool when an allocation can know that the work is done."""
    ops = Ops()
    ops.alloc(0, 0, MIB)
    ops.alloc(0, 1, MIB)
    ops.record_stream(1, 0)
    ops.aten(1)
    ops.free(0, 0)
    if waits:
        ops.wait_stream(0, 1)
    ops.alloc(0, 2, MIB)

    assert peaks(ops).reserved == reserved


def test_the_log_may_be_taken_in_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its length changes no figure."""
    ops = Ops()
    for block in range(40):
        ops.alloc(0, block, 100 * KIB * (block % 7 + 1))
        if block >= 5:
            ops.free(0, block - 5)
    whole = peaks(ops)
    monkeypatch.setattr(module, "LOG_MAX", 3)

    assert peaks(ops) == whole


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 12 * MIB), st.integers(0, 9))))
def test_blocks_never_overlap_and_all_memory_comes_back(
    plan: list[tuple[int, int, int]],
) -> None:
    """Whatever is allocated and freed: segments are neither lost nor handed out twice."""
    allocator = CachingAllocator()
    used: list[int] = []
    for storage, (stream, nbytes, victim) in enumerate(plan):
        allocator.allocate(storage, nbytes, stream)
        used.append(storage)
        if victim < len(used):
            allocator.free(used.pop(victim))
        spans = sorted(allocator.span(block) for block in used)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert sum(end - start for start, end in spans) == allocator.allocated
        assert allocator.allocated <= allocator.reserved
    for storage in used:
        allocator.free(storage)

    assert allocator.allocated == 0
    assert allocator.free_nbytes() == allocator.reserved
