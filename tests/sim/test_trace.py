"""Traces: digests, differences, and the forms they are written in."""

import json
import os
import sys
from pathlib import Path
from subprocess import run

import pytest
from hypothesis import given

from fsdp_sim.analysis import analyse
from fsdp_sim.checkers import make
from fsdp_sim.errors import ConfigError
from fsdp_sim.op import Kind, Op, Source
from fsdp_sim.schedule import Schedule
from fsdp_sim.trace import LAST_OPS_KEPT, Trace, diff, op_text
from tests.sim.ops import Ops, read, write
from tests.sim.test_races import programs


def step(rank: int = 0, *, kernel: str = "mm", extra_temporary: bool = False) -> Ops:
    """One gather that overlaps compute, with the wait that joins them."""
    ops = Ops(rank)
    ops.add(Kind.STREAM, "default", 0)
    ops.add(Kind.STREAM, "gather", 1)
    ops.alloc(1, 0, nbytes=64, annotation="fsdp_core::unshard fc1")
    ops.collective(1, write(0), annotation="fsdp_core::unshard fc1")
    ops.record(1, event=0)
    if extra_temporary:
        ops.alloc(0, 1, nbytes=8)
        ops.aten(0, write(1, 0, 8), name="zeros")
        ops.free(0, 1)
    ops.wait(0, event=0)
    ops.aten(0, read(0, 0, 52, (4, (4,), (4,))), write(2), name=kernel)
    return ops


def test_the_digest_needs_no_op_kept() -> None:
    """It is the same whether the trace was asked for or not."""
    kept, dropped = Trace(1), Trace(1, keep_ops=False)
    for op in step():
        kept.extend([op])
        dropped.extend([op])

    assert kept.digest == dropped.digest
    assert kept.order_digest == dropped.order_digest


def test_the_digest_is_fixed_by_rank_order_not_by_interleaving() -> None:
    """Which rank the scheduler ran first is in the schedule, not in the digest."""
    first, second = step(0), step(1)
    turns = [op for pair in zip(first, second) for op in pair]

    assert Trace.of(turns, 2).digest == Trace.of([*second, *first], 2).digest


def test_swapped_ranks_have_another_digest() -> None:
    """What a rank did counts for that rank."""
    one, other = step(0), Ops(1)
    mirrored = [*Ops(0), *step(1)]

    assert Trace.of([*one, *other], 2).digest != Trace.of(mirrored, 2).digest


def test_kernels_and_temporaries_change_the_digest_but_not_the_order_digest() -> None:
    """Another torch version computes with other operators in the same order of communication."""
    base = Trace.of(step(), 1)

    for other in (step(kernel="addmm"), step(extra_temporary=True)):
        trace = Trace.of(other, 1)
        assert trace.digest != base.digest
        assert trace.order_digest == base.order_digest


@pytest.mark.parametrize("dropped", [2, 3, 4, 5])
def test_every_op_of_the_order_changes_the_order_digest(dropped: int) -> None:
    """A labelled allocation, a collective, a record, a wait."""
    ops = [op for op in step() if op.index != dropped]

    assert Trace.of(ops, 1).order_digest != Trace.of(step(), 1).order_digest


def test_sources_roles_and_ticks_are_in_no_digest() -> None:
    """Editing a comment above a line changes nothing."""
    moved = step()
    for op in moved:
        op.source = None
        op.tick += 5
    moved[0].name = "another role"

    assert Trace.of(moved, 1).digest == Trace.of(step(), 1).digest


def test_the_digest_is_the_same_under_every_hash_seed() -> None:
    """No hash of a text or a set's order is in it."""
    program = "from tests.sim.test_trace import *; print(Trace.of(step(), 1).digest)"
    digests = {
        run(
            [sys.executable, "-W", "ignore", "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }

    assert digests == {Trace.of(step(), 1).digest}


def test_diff_names_the_first_entry_that_differs() -> None:
    """Both ops, one under the other."""
    found = diff(Trace.of(step(), 1), Trace.of(step(kernel="addmm"), 1))

    assert str(found) == (
        "rank 0 differs at entry 4:\n"
        "  rank 0  op 6  stream 0  mm  reads 0[0:52 strided]  writes 2[0:64]  program.py:6\n"
        "  rank 0  op 6  stream 0  addmm  reads 0[0:52 strided]  writes 2[0:64]  program.py:6"
    )


def test_diff_of_order_passes_over_what_is_not_in_the_order() -> None:
    """As the order digest does."""
    assert diff(Trace.of(step(), 1), Trace.of(step(kernel="addmm"), 1), order_only=True) is None


def test_diff_names_the_end_of_the_shorter_trace() -> None:
    """One run stopped early."""
    found = diff(Trace.of(step(), 1), Trace.of(step()[:-1], 1))

    assert found is not None
    assert "(the end)" in str(found)


@given(programs(), programs())
def test_traces_differ_exactly_when_their_digests_do(one: Ops, other: Ops) -> None:
    """Diff and digest look at the same entries."""
    a, b = Trace.of(one, 1), Trace.of(other, 1)

    assert (diff(a, b) is None) == (a.digest == b.digest)
    assert (diff(a, b, order_only=True) is None) == (a.order_digest == b.order_digest)


@given(programs())
def test_a_stored_trace_gives_the_same_findings(
    tmp_path_factory: pytest.TempPathFactory, ops: Ops
) -> None:
    """Checkers do not care where ops come from."""
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    Trace.of(ops, 1).save(path)
    loaded = Trace.load(path)

    assert [strip(op) for op in loaded.ops] == [strip(op) for op in ops]
    assert analyse(loaded.ops, make(), 1).findings == analyse(ops, make(), 1).findings


def strip(op: Op) -> str:
    """Return an op without what the clocks write into it."""
    tick, op.tick = op.tick, 0
    text = repr(op)
    op.tick = tick
    return text


def test_a_trace_is_read_back_with_its_schedule_and_calls(tmp_path: Path) -> None:
    """Every field of every kind of op survives."""
    user = Source("train.py", 3)
    ops = step()
    ops[-1].source = Source("torch/library.py", 7, user)
    trace = Trace.of(ops, 1)
    trace.schedule = Schedule.parse("v1;w1;seed7;3>1")
    trace.save(tmp_path / "run.jsonl")

    loaded = Trace.load(tmp_path / "run.jsonl")

    assert loaded.schedule == trace.schedule
    assert loaded.ops == trace.ops
    assert loaded.ops[-1].source is not None
    assert loaded.ops[-1].source.user == user


HEADER = (
    '{"schema":"fsdp_sim.trace","version":4,"world_size":2,"ranks":[0,1],"stands":%s,"schedule":null,'
    '"torch":"","digest":"","order_digest":""}'
)
STAND = '{"rank":0,"is_ended":true,"is_host_wait":false,"describe":"has ended","waits_for":[]}'


@pytest.mark.parametrize(
    ("line", "replacement", "named"),
    [
        (0, "[]", ":1 must be a JSON object"),
        (0, '{"schema":"other"}', ":1 must be the header of a trace"),
        (0, '{"schema":"fsdp_sim.trace","version":9}', ":1 must be of version 4, got 9"),
        (0, HEADER % '[{"rank":0}]', ":1 stands must say of each rank where its host stood"),
        (0, HEADER % f"[{STAND}]", ":1 stands must be of all ranks in order, or none"),
        (2, "{", ":3 must be JSON"),
        (2, '{"rank":0}', ":3 must have the field 'index'"),
        (2, '{"rank":0,"index":1,"kind":"sum","name":"x","stream":0}', "'sum' is not a valid Kind"),
        (
            2,
            '{"rank":3,"index":1,"kind":"aten","name":"x","stream":0}',
            ":3 rank must be one of [0], got 3",
        ),
        (2, '{"rank":"0","index":1,"kind":"aten","name":"x","stream":0}', "field 'rank' must be"),
        (
            2,
            '{"rank":0,"index":1,"kind":"aten","name":"x","stream":0,"run":"rm"}',
            ":3 must have no field 'run'",
        ),
        (
            2,
            '{"rank":0,"index":1,"kind":"aten","name":"x","stream":0,"accesses":[[1]]}',
            ":3 must be an op",
        ),
        (3, "", ":4 must be JSON"),
    ],
)
def test_a_malformed_line_is_refused_by_number(
    tmp_path: Path, line: int, replacement: str, named: str
) -> None:
    """The error says where and what."""
    path = tmp_path / "run.jsonl"
    Trace.of(step(), 1).save(path)
    lines = path.read_text().splitlines()
    lines[line] = replacement
    path.write_text("\n".join(lines))

    with pytest.raises(ConfigError) as caught:
        Trace.load(path)

    assert named in str(caught.value)


def test_a_changed_trace_is_refused(tmp_path: Path) -> None:
    """Its digest is not the one it was written with."""
    path = tmp_path / "run.jsonl"
    Trace.of(step(), 1).save(path)
    path.write_text("\n".join(path.read_text().splitlines()[:-1]))

    with pytest.raises(ConfigError, match=r"it was changed after it was written$"):
        Trace.load(path)


def test_only_the_last_ops_are_kept_when_no_trace_was_asked_for(tmp_path: Path) -> None:
    """And what needs all of them says so."""
    trace = Trace(1, keep_ops=False)
    ops = Ops()
    trace.extend([ops.aten(0, write(0)) for _ in range(LAST_OPS_KEPT + 1)])

    assert len(trace.ops) == LAST_OPS_KEPT
    with pytest.raises(ConfigError, match=r"pass trace=True"):
        trace.save(tmp_path / "run.jsonl")


def test_a_trace_beyond_its_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the number in it."""
    monkeypatch.setattr("fsdp_sim.trace.TRACE_OPS_MAX", 3)

    with pytest.raises(Exception, match=r"a trace keeps 3 ops at most"):
        Trace.of(step(), 1)


def test_a_line_of_text_says_what_an_op_did() -> None:
    """Each kind in its own words."""
    ops = step()

    assert op_text(ops[2]) == (
        "rank 0  op 2  stream 1  alloc  [fsdp_core::unshard fc1]  block 0 of 64 bytes  program.py:2"
    )
    assert op_text(ops[5]) == "rank 0  op 5  stream 0  wait_event  event 0  program.py:5"
    assert Trace.of(ops, 1).to_text().count("\n") == len(ops) - 1


def test_the_timeline_has_a_row_a_stream_and_an_arrow_a_wait(tmp_path: Path) -> None:
    """Perfetto shows ranks as processes and streams as threads."""
    Trace.of([*step(0), *step(1)], 2).to_chrome(tmp_path / "run.json")
    document = json.loads((tmp_path / "run.json").read_text())
    events = document["traceEvents"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = {(e["pid"], e["tid"], e["name"]): e for e in events if e["ph"] == "X"}
    starts, ends = ([e for e in events if e["ph"] == phase] for phase in "sf")

    assert document["distributedInfo"]["world_size"] == 2
    assert rows[1, 1] == "stream 1: gather"
    gather = spans[1, 1, "all_gather [fsdp_core::unshard fc1]"]
    assert spans[1, 0, "mm"]["ts"] >= gather["ts"] + gather["dur"]
    assert [(e["pid"], e["tid"]) for e in starts] == [(0, 1), (1, 1)]
    assert [(e["pid"], e["tid"]) for e in ends] == [(0, 0), (1, 0)]
    assert all(gather["ts"] <= e["ts"] < gather["ts"] + gather["dur"] for e in starts[1:])
