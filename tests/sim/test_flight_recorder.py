"""Flight recorder: dumps that PyTorch's own analysis understands."""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_sim.op import Call, Kind
from fsdp_sim.trace import Trace
from fsdp_sim.views.flight_recorder import dump
from tests.sim.frtrace import analysed
from tests.sim.ops import Ops


def issue(ops: Ops, name: str, sequence: int, *sizes: int, **more: Any) -> None:
    """Issue one rank's part of an operation of two ranks."""
    call = Call((0, 1), "0", sequence, name, more.pop("reduce_op", None), "float32", sizes, **more)
    ops.add(Kind.COLLECTIVE, name, 0, call=call)


def trace_of(ranks: Sequence[Ops]) -> Trace:
    """Return the trace of all ranks."""
    return Trace.of([op for ops in ranks for op in ops], len(ranks))


def test_matching_collectives_pass_the_check(tmp_path: Path) -> None:
    """Every kind, flat and as lists, even and uneven."""
    ranks = Ops(0), Ops(1)
    for ops in ranks:
        issue(ops, "all_gather", 0, 8)
        issue(ops, "reduce_scatter", 1, 8, reduce_op="SUM")
        issue(ops, "all_reduce", 2, 8, reduce_op="SUM")
        issue(ops, "all_gather", 3, 8, 4)
        issue(ops, "broadcast", 4, 8, root=1)
        issue(ops, "gather", 5, 8, root=0)
        issue(ops, "scatter", 6, 8, root=1)
        issue(ops, "all_to_all", 7, 4, 4, 4, 4)
        issue(ops, "barrier", 8)
        issue(ops, "reduce_scatter", 9, 8, 4, reduce_op="SUM")

    collectives = analysed(trace_of(ranks), tmp_path).collectives

    assert [c.pass_check for c in collectives] == [True] * 10
    assert [c.collective_state for c in collectives] == ["completed"] * 10


def test_a_mismatch_is_named_by_rank(tmp_path: Path) -> None:
    """Another kind at the same position."""
    ranks = Ops(0), Ops(1)
    issue(ranks[0], "all_reduce", 0, 8, reduce_op="SUM")
    issue(ranks[1], "broadcast", 0, 8, root=0)

    (first, *_) = analysed(trace_of(ranks), tmp_path).collectives

    assert not first.pass_check
    assert list(first.mismatch_collectives) == [1]


def test_uneven_sizes_that_differ_are_a_mismatch(tmp_path: Path) -> None:
    """Of what each rank gives, in an all-gather of unequal tensors."""
    ranks = Ops(0), Ops(1)
    issue(ranks[0], "all_gather", 0, 8, 4)
    issue(ranks[1], "all_gather", 0, 4, 8)

    (first, *_) = analysed(trace_of(ranks), tmp_path).collectives

    assert not first.pass_check


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    """What one rank never issued is scheduled on the others."""
    ranks = Ops(0), Ops(1)
    for ops in ranks:
        issue(ops, "all_reduce", 0, 8, reduce_op="SUM")
    issue(ranks[0], "all_reduce", 1, 8, reduce_op="SUM")

    done, waiting = analysed(trace_of(ranks), tmp_path).collectives

    assert done.pass_check
    assert waiting.missing_ranks == {1}
    assert waiting.collective_state == "scheduled"


def test_messages_are_matched_in_pairs(tmp_path: Path) -> None:
    """A send and its recv."""
    ranks = Ops(0), Ops(1)
    issue(ranks[0], "send", 0, 8, peer=1)
    issue(ranks[1], "recv", 0, 8, peer=0)
    database = analysed(trace_of(ranks), tmp_path)

    assert [call.collective_type for call in database.ncclcalls] == ["nccl:send 0->1"] * 2
    assert all(collective.pass_check for collective in database.collectives)


def test_a_batch_of_messages_has_one_number_and_an_end(tmp_path: Path) -> None:
    """As PyTorch records `batch_isend_irecv`."""
    ops = Ops(0)
    for sequence, batch in enumerate((0, 0, 1)):
        issue(ops, "send", sequence, 8, peer=1, batch=batch)
    (path,) = dump(Trace.of(ops, 1), tmp_path)

    entries = [
        (entry["profiling_name"], entry["p2p_seq_id"])
        for entry in pickle.loads(path.read_bytes())["entries"]
    ]
    send, end = "nccl:send 0->1", "nccl:coalesced"
    assert entries == [(send, 1), (send, 1), (end, 1), (send, 2), (end, 2)]
