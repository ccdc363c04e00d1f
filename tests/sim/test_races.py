"""Races: each rule of ordering both ways, and the checker against a naive one."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from fsdp_sim.analysis import analyse
from fsdp_sim.checkers import make
from fsdp_sim.checkers.overlap import overlaps
from fsdp_sim.checkers.races import Races
from fsdp_sim.checkers.words import Words
from fsdp_sim.clock import Clocks
from fsdp_sim.errors import Finding
from fsdp_sim.op import Access, Kind, Op
from tests.sim.ops import Ops, Strides, read, write


def race_indices(ops: Ops) -> list[tuple[int, int]]:
    """Return the pairs of ops that the checker calls races, each occurrence of its own."""
    clocks, words = Clocks(), Words()
    races = Races(words)
    found: list[Finding] = []
    for op in ops:
        clocks.apply(op)
        if op.kind in words.kinds:
            words.on_op(op, clocks)
        if op.kind in races.kinds:
            found += races.on_op(op, clocks)
    return [(finding.ops[0].index, finding.ops[1].index) for finding in found]


def test_two_streams_are_not_ordered_by_program_order() -> None:
    """A write and a read on two streams with nothing between them race."""
    ops = Ops()
    ops.aten(0, write(7))
    ops.aten(1, read(7))

    assert race_indices(ops) == [(0, 1)]


def test_one_stream_is_in_order() -> None:
    """Work on one stream runs in order of launch."""
    ops = Ops()
    ops.aten(1, write(7))
    ops.aten(1, read(7))
    ops.aten(1, write(7))

    assert race_indices(ops) == []


def test_two_reads_do_not_race() -> None:
    """Only a write conflicts."""
    ops = Ops()
    ops.aten(0, read(7))
    ops.aten(1, read(7))

    assert race_indices(ops) == []


def test_a_write_after_an_unordered_read_is_a_race() -> None:
    """The reader may still be running."""
    ops = Ops()
    ops.aten(0, read(7))
    ops.aten(1, write(7))

    assert race_indices(ops) == [(0, 1)]


def test_wait_stream_orders_what_was_launched_before_it() -> None:
    """Work launched after the wait is not covered by it."""
    ops = Ops()
    ops.aten(0, write(7))
    ops.wait_stream(1, 0)
    ops.aten(1, read(7))
    ops.aten(0, write(7))
    ops.aten(1, read(7))

    assert race_indices(ops) == [(2, 3), (3, 4)]


def test_an_event_is_a_snapshot() -> None:
    """Waiting on an event does not cover what was launched after its record."""
    ops = Ops()
    ops.aten(0, write(7))
    ops.record(0, event=0)
    ops.aten(0, write(8))
    ops.wait(1, event=0)
    ops.aten(1, read(7))
    ops.aten(1, read(8))

    assert race_indices(ops) == [(2, 5)]


def test_a_wait_on_an_event_never_recorded_is_a_no_op() -> None:
    """As in CUDA."""
    ops = Ops()
    ops.aten(0, write(7))
    ops.wait(1, event=0)
    ops.aten(1, read(7))

    assert race_indices(ops) == [(0, 2)]


def test_waits_are_transitive() -> None:
    """A stream that waits is behind all that the awaited stream waited for."""
    ops = Ops()
    ops.aten(0, write(7))
    ops.wait_stream(1, 0)
    ops.wait_stream(2, 1)
    ops.aten(2, read(7))

    assert race_indices(ops) == []


def test_what_the_host_waited_for_is_before_all_it_launches_later() -> None:
    """On every stream, also one that is used for the first time afterwards."""
    ops = Ops()
    ops.aten(1, write(7))
    ops.aten(2, write(8))
    ops.synchronize(1)
    ops.aten(3, read(7))
    ops.aten(3, read(8))

    assert race_indices(ops) == [(1, 4)]


def test_an_event_that_the_host_waited_for_covers_its_snapshot() -> None:
    """And nothing after it."""
    ops = Ops()
    ops.aten(1, write(7))
    ops.record(1, event=0)
    ops.aten(1, write(8))
    ops.synchronize_event(0)
    ops.aten(0, read(7))
    ops.aten(0, read(8))

    assert race_indices(ops) == [(2, 5)]


def test_disjoint_bytes_do_not_race() -> None:
    """Ranges are half open."""
    ops = Ops()
    ops.aten(0, write(7, 0, 32))
    ops.aten(1, write(7, 32, 64))
    ops.aten(2, read(7, 31, 32))

    assert race_indices(ops) == [(0, 2)]


def test_interleaved_views_do_not_race() -> None:
    """Two columns of a matrix share a range but no byte; the same column does."""
    column: Strides = (4, (4,), (4,))
    ops = Ops()
    ops.aten(0, write(7, 0, 52, column))
    ops.aten(1, write(7, 4, 56, column))
    ops.aten(2, write(7, 4, 56, column))

    assert race_indices(ops) == [(1, 2)]


def test_a_race_with_another_access_of_the_same_op_line_is_reported() -> None:
    """A later ordered read does not hide an earlier write that is not ordered."""
    ops = Ops()
    ops.aten(0, write(7, 0, 8))
    ops.aten(0, read(7, 8, 16))
    ops.aten(1, write(7))

    assert race_indices(ops) == [(0, 2), (1, 2)]


def test_a_freed_block_has_no_history() -> None:
    """Its next use is judged by the memory's lifetime."""
    ops = Ops()
    ops.aten(0, write(7))
    ops.free(0, 7)
    ops.alloc(1, 7)
    ops.aten(1, write(7))

    assert race_indices(ops) == []


def test_ranks_share_no_memory() -> None:
    """The same number of a block on two ranks is two blocks."""
    ops = Ops()
    ops.aten(0, write(7))
    other = Ops(rank=1)
    other.aten(1, write(7))

    assert analyse([*ops, *other], make(["races"]), 2).findings == ()


def test_the_report_says_both_ops_the_bytes_and_the_missing_edge() -> None:
    """A reader can fix the program from the report alone."""
    ops = Ops()
    ops.add(Kind.STREAM, "compute", 0)
    ops.alloc(0, 7, 64)
    ops.wait_stream(1, 0)
    ops.aten(0, write(7, 0, 32), name="copy_in")
    ops.record(0, event=5)
    ops.aten(1, read(7, 16, 64), name="all_gather")

    (finding,) = ops.findings("races")

    assert str(finding) == (
        "Race: rank 0: 'all_gather' on stream 1 reads block 7"
        " while 'copy_in' on stream 0 (compute) may still write it\n"
        "  op 3  copy_in  on stream 0 (compute)  rank 0  program.py:3\n"
        "  op 5  all_gather  on stream 1  rank 0  program.py:5\n"
        "  bytes [16, 32) of block 7 (64 bytes, allocated at op 1 (program.py:1))\n"
        "  nothing orders op 3 before op 5:"
        " stream 1 last waited for stream 0 at op 2 (program.py:2)\n"
        "  missing edge: stream 1 must wait for event 5, recorded at op 4 (program.py:4)"
    )


def test_two_collectives_ordered_by_their_communicator_alone_are_marked() -> None:
    """The order of issue on a communicator protects no memory."""
    ops = Ops()
    ops.collective(1, write(7))
    ops.collective(2, write(7))

    (finding,) = ops.findings("races")

    assert any("only_communicator_order" in line for line in finding.detail)


def test_many_views_of_one_block_are_forgotten_when_all_streams_are_past_them() -> None:
    """A block that is used in ever new ways costs bounded memory and stays exact."""
    ops = Ops()
    for index in range(1500):
        ops.aten(0, write(7, index, index + 1))
        ops.synchronize()
    ops.aten(1, write(7, 0, 4))
    ops.aten(0, write(7, 3, 4))

    assert race_indices(ops) == [(3000, 3001)]


# ---------------------------------------------------------------------- against naive oracles


def bytes_of(access: Access) -> set[int]:
    """Return every byte that an access touches."""
    if access.strides is None:
        return set(range(access.lo, access.hi))
    itemsize, sizes, strides = access.strides
    starts = {access.lo}
    for size, stride in zip(sizes, strides, strict=True):
        starts = {start + i * stride * itemsize for start in starts for i in range(size)}
    return {start + byte for start in starts for byte in range(itemsize)}


@dataclass
class NaiveOrder:
    """Happens-before as plain sets of op numbers: no clocks, nothing forgotten."""

    streams: dict[int, set[int]] = field(default_factory=dict)
    events: dict[int, set[int]] = field(default_factory=dict)
    host: set[int] = field(default_factory=set)

    def before(self, op: Op) -> set[int]:
        """Take one op in; return the ops that are done before it starts."""
        mine = self.streams.setdefault(op.stream, set()) if op.stream >= 0 else set()
        mine |= self.host
        match op.kind:
            case Kind.ATEN:
                earlier = set(mine)
                mine.add(op.index)
                return earlier
            case Kind.RECORD_EVENT:
                self.events[op.other] = set(mine)
            case Kind.WAIT_EVENT:
                mine |= self.events.get(op.other, set())
            case Kind.WAIT_STREAM:
                mine |= self.streams.get(op.other, set())
            case Kind.HOST_WAIT_EVENT:
                self.host |= self.events.get(op.other, set())
            case Kind.HOST_WAIT_STREAM:
                for stream, done in self.streams.items():
                    if op.other in (-1, stream):
                        self.host |= done
            case _:
                pass
        return set(mine)


def naive_races(ops: Ops) -> set[tuple[int, int]]:
    """Compare every pair of accesses of every pair of ops."""
    order = NaiveOrder()
    before = [order.before(op) for op in ops]
    freed = {(op.index, op.other) for op in ops if op.kind is Kind.FREE}
    return {
        (one.index, two.index)
        for two in ops
        for one in ops[: two.index]
        for a in one.accesses
        for b in two.accesses
        if a.storage == b.storage
        and (a.write or b.write)
        and one.index not in before[two.index]
        and bytes_of(a) & bytes_of(b)
        and not any((i, a.storage) in freed for i in range(one.index, two.index))
    }


STREAMS = st.integers(0, 2)
EVENTS = st.integers(0, 2)
VIEWS = st.one_of(
    st.tuples(st.integers(0, 6), st.integers(1, 4)).map(lambda v: (v[0], v[0] + v[1], None)),
    st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(1, 3)).map(
        lambda v: (v[0], v[0] + (v[1] - 1) * v[2] + 1, (1, (v[1],), (v[2],)))
    ),
)


@st.composite
def accesses(draw: st.DrawFn) -> Access:
    """A view of one of two small blocks."""
    lo, hi, strides = draw(VIEWS)
    return Access(draw(st.integers(0, 1)), lo, hi, draw(st.booleans()), strides)


@st.composite
def programs(draw: st.DrawFn) -> Ops:
    """Any short program of one rank."""
    ops = Ops()
    for _ in range(draw(st.integers(2, 14))):
        match draw(
            st.sampled_from(["work", "work", "work", "record", "wait", "stream", "host", "free"])
        ):
            case "work":
                ops.aten(draw(STREAMS), *draw(st.lists(accesses(), min_size=1, max_size=2)))
            case "record":
                ops.record(draw(STREAMS), draw(EVENTS))
            case "wait":
                ops.wait(draw(STREAMS), draw(EVENTS))
            case "stream":
                ops.wait_stream(draw(STREAMS), draw(STREAMS))
            case "host":
                if draw(st.booleans()):
                    ops.synchronize(draw(st.integers(-1, 2)))
                else:
                    ops.synchronize_event(draw(EVENTS))
            case _:
                ops.free(0, draw(st.integers(0, 1)))
    return ops


@given(programs())
def test_every_op_that_races_is_found_and_no_other(ops: Ops) -> None:
    """The pruned checker agrees with comparing every pair over the whole happens-before relation."""
    naive = naive_races(ops)
    found = set(race_indices(ops))

    assert found <= naive
    assert {later for _, later in found} == {later for _, later in naive}


@given(accesses(), accesses())
def test_views_overlap_exactly_where_they_share_a_byte(one: Access, two: Access) -> None:
    """Compared with the sets of their bytes."""
    expected = bool(bytes_of(one) & bytes_of(two))

    assert overlaps(one.lo, one.hi, one.strides, two.lo, two.hi, two.strides) is expected


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=3),
    st.integers(0, 12),
    st.sampled_from([1, 2, 4]),
)
def test_views_of_any_shape_overlap_where_they_share_a_byte(
    one: list[tuple[int, int]], two: list[tuple[int, int]], offset: int, itemsize: int
) -> None:
    """Any number of dimensions, expanded and overlapping ones included."""

    def view(dims: list[tuple[int, int]], lo: int) -> Access:
        extent = sum((size - 1) * stride for size, stride in dims) + 1
        sizes, strides = zip(*dims, strict=True)
        return Access(0, lo, lo + extent * itemsize, True, (itemsize, sizes, strides))

    a, b = view(one, 0), view(two, offset)
    expected = bool(bytes_of(a) & bytes_of(b))

    assert overlaps(a.lo, a.hi, a.strides, b.lo, b.hi, b.strides) is expected
