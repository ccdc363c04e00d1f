"""Lifetime: each rule of reuse both ways, and the checker against a naive one."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_sim.op import Kind
from tests.sim.ops import Ops, read, write
from tests.sim.test_races import NaiveOrder


def test_memory_read_by_another_stream_may_not_be_reused_before_it_is_done() -> None:
    """The reader is not ordered before the next allocation."""
    ops = Ops()
    ops.alloc(1, 7)
    ops.wait_stream(0, 1)
    ops.aten(0, read(7))
    ops.free(1, 7)
    ops.alloc(1, 8)

    (finding,) = ops.findings("lifetime")

    assert str(finding) == (
        "UseAfterFree: rank 0: block 7 was freed to stream 1, which allocates again"
        " while 'mm' on stream 0 may still access it\n"
        "  op 2  mm  on stream 0  rank 0  program.py:2\n"
        "  op 4  alloc  on stream 1  rank 0  program.py:4\n"
        "  freed at op 3 (program.py:3); any later allocation on stream 1 may take its memory\n"
        "  nothing orders op 2 before op 4: stream 1 has never waited for stream 0\n"
        "  missing edge: stream 1 must wait for stream 0 after op 2"
    )


def test_the_size_of_the_next_allocation_does_not_matter() -> None:
    """What fits today may not fit tomorrow: the rule depends on no luck."""
    ops = Ops()
    ops.alloc(1, 7, nbytes=64)
    ops.aten(0, read(7))
    ops.free(1, 7)
    ops.alloc(1, 8, nbytes=1 << 20)

    assert len(ops.findings("lifetime")) == 1


def test_a_wait_between_free_and_allocation_protects() -> None:
    """The order at the allocation counts, not at the free."""
    ops = Ops()
    ops.alloc(1, 7)
    ops.aten(0, read(7))
    ops.free(1, 7)
    ops.wait_stream(1, 0)
    ops.alloc(1, 8)

    assert ops.findings("lifetime") == ()


def test_a_host_wait_between_free_and_allocation_protects() -> None:
    """What the host launches later is behind what it waited for."""
    ops = Ops()
    ops.alloc(1, 7)
    ops.aten(0, read(7))
    ops.free(1, 7)
    ops.synchronize(0)
    ops.alloc(1, 8)

    assert ops.findings("lifetime") == ()


def test_record_stream_protects() -> None:
    """The allocator keeps the block until the work on that stream is done, and on that one alone."""
    ops = Ops()
    ops.alloc(1, 7)
    ops.record_stream(0, 7)
    ops.aten(0, read(7))
    ops.aten(2, read(7))
    ops.free(1, 7)
    ops.alloc(1, 8)

    assert [finding.ops[0].stream for finding in ops.findings("lifetime")] == ["stream 2"]


def test_accesses_of_the_allocating_stream_need_no_protection() -> None:
    """A stream is in order with itself."""
    ops = Ops()
    ops.alloc(1, 7)
    ops.aten(1, write(7))
    ops.free(1, 7)
    ops.alloc(1, 8)

    assert ops.findings("lifetime") == ()


def test_an_allocation_on_another_stream_takes_nothing_from_this_pool() -> None:
    """Pools are per stream."""
    ops = Ops()
    ops.alloc(1, 7)
    ops.aten(0, read(7))
    ops.free(1, 7)
    ops.alloc(0, 8)

    assert ops.findings("lifetime") == ()


def test_memory_that_nobody_allocates_again_is_safe() -> None:
    """What is never used again cannot be corrupted."""
    ops = Ops()
    ops.alloc(1, 7)
    ops.aten(0, read(7))
    ops.free(1, 7)

    assert ops.findings("lifetime") == ()


def gather_twice(*, waits: bool) -> Ops:
    """Two rounds of: allocate and gather on stream 1, compute on stream 0, free."""
    ops = Ops()
    for block in (7, 8, 9):
        if waits:
            ops.wait_stream(1, 0)
        ops.add(Kind.ALLOC, "alloc", 1, other=block, nbytes=64, line=1)
        ops.add(Kind.COLLECTIVE, "all_gather", 1, (write(block),), line=2)
        ops.wait_stream(0, 1)
        ops.aten(0, read(block), line=3)
        ops.free(1, block)
    return ops


@pytest.mark.parametrize(("waits", "count"), [(True, 0), (False, 1)])
def test_a_free_without_record_is_fine_where_stream_order_protects(waits: bool, count: int) -> None:
    """NVIDIA/Megatron-LM#5788: no report with the wait before each allocation, exactly one without."""
    findings = gather_twice(waits=waits).findings("races", "lifetime")

    assert [finding.kind for finding in findings] == ["UseAfterFree"] * count


def stage_twice(*, waits: bool) -> Ops:
    """Two rounds of: stream 1 allocates, stream 0 fills, stream 1 reduces and frees."""
    ops = Ops()
    for block in (7, 8):
        ops.alloc(1, block)
        if waits:
            ops.wait_stream(0, 1)
        ops.aten(0, write(block), name="copy_in")
        ops.wait_stream(1, 0)
        ops.collective(1, read(block), name="reduce_scatter")
        ops.free(1, block)
    return ops


def test_another_stream_may_use_new_memory_when_its_old_users_are_done() -> None:
    """The allocating stream is in order with itself; the stream that fills the block is not."""
    (finding,) = stage_twice(waits=False).findings("races", "lifetime")

    assert finding.message == (
        "rank 0: 'copy_in' on stream 0 uses block 8 while 'reduce_scatter' on stream 1"
        " may still access what its memory held before"
    )
    assert stage_twice(waits=True).findings("races", "lifetime") == ()


def test_memory_from_a_pool_that_held_nothing_is_fresh() -> None:
    """No wait is needed for work that never touched the pool."""
    ops = Ops()
    ops.aten(1, write(3))
    ops.alloc(1, 7)
    ops.aten(0, write(7))

    assert ops.findings("lifetime") == ()


@st.composite
def programs(draw: st.DrawFn) -> Ops:
    """A short program whose blocks are allocated, used anywhere and freed."""
    ops = Ops()
    streams = st.integers(0, 2)
    homes: dict[int, int] = {}
    for index in range(draw(st.integers(4, 16))):
        alive = st.sampled_from(sorted(homes)) if homes else st.nothing()
        kinds = ["alloc", "wait", "host", *(["use", "use", "record", "free"] if homes else [])]
        match draw(st.sampled_from(kinds)):
            case "alloc":
                homes[index] = draw(streams)
                ops.alloc(homes[index], index)
            case "use":
                ops.aten(draw(streams), read(draw(alive)))
            case "record":
                ops.record_stream(draw(streams), draw(alive))
            case "free":
                block = draw(alive)
                ops.free(homes.pop(block), block)
            case "wait":
                ops.wait_stream(draw(streams), draw(streams))
            case _:
                ops.synchronize(draw(st.integers(-1, 2)))
    return ops


def naive_reuses(ops: Ops) -> set[tuple[str, int, int]]:
    """Return (rule, block, stream of its user) of every reuse of memory that is not in order."""
    order = NaiveOrder()
    before = [order.before(op) for op in ops]
    uses = [op for op in ops if op.kind is Kind.ATEN]
    found: set[tuple[str, int, int]] = set()
    for alloc in (op for op in ops if op.kind is Kind.ALLOC):
        for free in ops[: alloc.index]:
            if free.kind is not Kind.FREE or free.stream != alloc.stream:
                continue
            for use in (op for op in uses if op.accesses[0].storage == free.other):
                is_recorded = any(
                    op.kind is Kind.RECORD_STREAM
                    and (op.other, op.stream) == (free.other, use.stream)
                    for op in ops[: free.index]
                )
                if use.stream != free.stream and is_recorded:
                    continue
                if use.stream != free.stream and use.index not in before[alloc.index]:
                    found.add(("late", free.other, use.stream))
                found |= {
                    ("early", alloc.other, later.stream)
                    for later in uses
                    if later.accesses[0].storage == alloc.other
                    and later.stream not in (alloc.stream, use.stream)
                    and use.index not in before[later.index]
                }
    return found


@given(programs())
def test_every_block_that_could_be_corrupted_is_found_and_no_other(ops: Ops) -> None:
    """Judging each block once agrees with comparing all uses of all memory of a pool."""
    found: set[tuple[str, int, int]] = set()
    for finding in ops.findings("lifetime"):
        block = re.search(r"block (\d+)", finding.message)
        assert block is not None
        is_late = "allocates again" in finding.message
        user = finding.ops[0 if is_late else 1].stream.split()[1]
        found.add(("late" if is_late else "early", int(block[1]), int(user)))

    assert found == naive_reuses(ops)
