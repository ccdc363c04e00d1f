"""Capture: what takes a stream into a CUDA graph and what brings it back."""

from fsdp_sim.op import Kind
from tests.sim.ops import Ops, read, write

CALLER, GATHER, REDUCE = 0, 1, 2


def step(*, fork: bool = True, reduce_fork: bool = True, join: bool = True) -> Ops:
    """A step of one unit: forward gathers, backward reduces, completion joins."""
    ops = Ops()
    ops.push("fsdp_core::forward root")
    if fork:
        ops.wait_stream(GATHER, CALLER)
    ops.alloc(GATHER, 7, annotation="fsdp_core::unshard root")
    ops.collective(GATHER, write(7), annotation="fsdp_core::unshard root")
    ops.wait_stream(CALLER, GATHER)
    ops.aten(CALLER, read(7))
    ops.pop_range("fsdp_core::forward root")
    ops.push("fsdp_core::backward root")
    if reduce_fork:
        ops.wait_stream(REDUCE, CALLER)
    ops.alloc(REDUCE, 8, annotation="fsdp_core::reduce_gradients root")
    ops.wait_stream(REDUCE, CALLER)
    ops.collective(REDUCE, write(8), annotation="fsdp_core::reduce_gradients root")
    ops.pop_range("fsdp_core::backward root")
    ops.push("fsdp_core::complete")
    if join:
        ops.wait_stream(CALLER, REDUCE)
    ops.pop_range("fsdp_core::complete")
    return ops


def names(ops: Ops) -> list[tuple[str, str]]:
    """Return the two ops of each finding."""
    return [(f.ops[0].name, f.ops[1].name) for f in ops.findings("capture")]


def test_a_step_that_forks_and_joins_can_be_captured() -> None:
    """Nothing is missing."""
    assert names(step()) == []


def test_a_gather_that_is_not_behind_the_start_is_outside_the_capture() -> None:
    """Its allocation comes first; the wait that takes it in takes the gather in too."""
    assert names(step(fork=False)) == [("fsdp_core::forward root", "alloc")]


def test_a_wait_that_changes_no_clock_still_joins_a_capture() -> None:
    """All work is known to be done, but only the wait takes the stream in."""
    ops = Ops()
    ops.aten(CALLER, write(7))
    ops.synchronize()
    ops.extend(step())

    assert ops.findings("capture") == ()


def test_an_allocation_alone_must_be_inside() -> None:
    """A reduction's staging memory is taken before its stream waits for the gradients."""
    assert names(step(reduce_fork=False)) == [("fsdp_core::forward root", "alloc")]


def test_a_stream_that_does_not_come_back_is_found() -> None:
    """A capture ends only when all its streams are joined."""
    (finding,) = step(join=False).findings("capture")

    assert finding.kind == "CaptureUnsafe"
    assert [site.name for site in finding.ops] == ["all_gather", "fsdp_core::complete"]
    assert "missing edge: stream 0 must wait for stream 2 after op 11" in finding.detail


def test_a_wait_right_before_the_start_belongs_to_the_step() -> None:
    """Nothing ran between them, so the capture may begin before it; behind other work it may not."""
    for is_work_between in (False, True):
        ops = Ops()
        ops.wait_stream(GATHER, CALLER)
        if is_work_between:
            ops.aten(CALLER, write(9))
        ops.push("fsdp_core::forward root")
        ops.alloc(GATHER, 7, annotation="fsdp_core::unshard root")

        assert len(ops.findings("capture")) == is_work_between


def test_an_event_recorded_before_the_start_takes_nothing_in() -> None:
    """It is a snapshot of work outside."""
    ops = Ops()
    ops.record(CALLER, event=3)
    ops.aten(CALLER, write(9))
    ops.push("fsdp_core::forward root")
    ops.wait(GATHER, event=3)
    ops.alloc(GATHER, 7, annotation="fsdp_core::unshard root")

    assert len(ops.findings("capture")) == 1


def test_an_event_recorded_inside_takes_its_waiters_in() -> None:
    """Also through a third stream."""
    ops = Ops()
    ops.push("fsdp_core::forward root")
    ops.record(CALLER, event=3)
    ops.wait(REDUCE, event=3)
    ops.wait_stream(GATHER, REDUCE)
    ops.alloc(GATHER, 7, annotation="fsdp_core::unshard root")

    assert ops.findings("capture") == ()


def test_an_evaluation_ends_without_a_completion() -> None:
    """The next forward starts anew and must fork anew."""
    ops = Ops()
    for waits in (True, False):
        ops.push("fsdp_core::forward root")
        if waits:
            ops.wait_stream(GATHER, CALLER)
        ops.alloc(GATHER, 7, annotation="fsdp_core::unshard root")
        ops.free(GATHER, 7)
        ops.pop_range("fsdp_core::forward root")

    assert len(ops.findings("capture")) == 1


def test_microbatches_are_one_step() -> None:
    """A backward that is not the last leaves its reductions in flight, and recomputes forwards."""
    ops = Ops()
    for _ in range(2):
        ops.extend(op for op in step() if not op.name.startswith("fsdp_core::complete"))
        ops.pop()  # its join

    assert ops.findings("capture") == ()


def test_the_programs_own_streams_are_its_own_business() -> None:
    """A loader that copies the next batch meanwhile is in nobody's way."""
    ops = Ops()
    ops.push("fsdp_core::forward root")
    ops.add(Kind.ATEN, "copy_", 5, (write(9),), annotation="fsdp_core::forward root")
    ops.aten(5, write(10))

    assert ops.findings("capture") == ()


def test_a_recomputed_forward_does_not_start_anew() -> None:
    """It is inside a backward pass, whatever unit's backward has begun: reentrant checkpoints."""
    ops = Ops()
    ops.push("fsdp_core::forward root")
    ops.pop_range("fsdp_core::forward root")
    ops.wait_stream(REDUCE, CALLER)
    for unit in ("second", "first"):
        ops.push(f"fsdp_core::recompute {unit}")
        ops.aten(CALLER, write(7))
        ops.pop_range(f"fsdp_core::recompute {unit}")
    ops.alloc(REDUCE, 8, annotation="fsdp_core::reduce_gradients second")

    assert ops.findings("capture") == ()


def two_forwards(*, joins_second: bool = True, is_trained: bool = True) -> Ops:
    """Forwards of two contexts, each with a gathering stream, and one backward through both."""
    ops = Ops()
    for stream, unit, joins in ((GATHER, "first", True), (REDUCE, "second", joins_second)):
        ops.push(f"fsdp_core::forward {unit}")
        if joins:
            ops.wait_stream(stream, CALLER)
        ops.alloc(stream, 7 + stream, annotation=f"fsdp_core::unshard {unit}")
        ops.pop_range(f"fsdp_core::forward {unit}")
    if is_trained:
        ops.push("fsdp_core::backward first")
    ops.alloc(GATHER, 20, annotation="fsdp_core::unshard first")
    return ops


def test_a_backward_may_use_what_either_of_two_forwards_took_in() -> None:
    """As where a generator's output goes through a discriminator of a context of its own."""
    assert names(two_forwards()) == []


def test_two_forwards_do_not_stand_in_for_each_other() -> None:
    """Each must take in what it uses itself, and only a backward may use what both did."""
    assert names(two_forwards(joins_second=False)) == [("fsdp_core::forward second", "alloc")]
    assert names(two_forwards(is_trained=False)) == [("fsdp_core::forward second", "alloc")]


def test_a_backward_may_come_behind_whole_steps_of_another_context() -> None:
    """Its forward, before them, took in what it uses."""
    ops = two_forwards(is_trained=False)
    ops.pop()
    step_of_second = ("forward second", "backward second", "complete")
    for name in (*step_of_second[1:], *step_of_second, "backward first"):
        ops.push(f"fsdp_core::{name}")
        ops.pop_range(f"fsdp_core::{name}")
    ops.alloc(GATHER, 20, annotation="fsdp_core::unshard first")

    assert ops.findings("capture") == ()


def test_gradients_inside_a_forward_do_not_end_the_step_around_it() -> None:
    """As where a model returns the gradient of an energy that its layers compute."""
    ops = Ops()
    ops.push("fsdp_core::forward root")
    ops.wait_stream(GATHER, CALLER)
    ops.push("fsdp_core::complete")
    ops.pop_range("fsdp_core::complete")
    ops.push("fsdp_core::forward inner")
    ops.alloc(GATHER, 7, annotation="fsdp_core::unshard inner")

    assert ops.findings("capture") == ()


def test_each_context_of_a_backward_completes_its_own_streams() -> None:
    """One after the other: what the first completion leaves, the second brings back."""
    for joins in (True, False):
        ops = step(join=False)
        ops.push("fsdp_core::complete")
        if joins:
            ops.wait_stream(CALLER, REDUCE)
        ops.pop_range("fsdp_core::complete")
        ops.extend(step())

        assert len(ops.findings("capture")) == (not joins)


def pass_of(reduce: int, *, completes: bool, joins: tuple[int, ...] = ()) -> Ops:
    """A forward and a backward of a context that reduces on a stream of its own."""
    ops = Ops()
    ops.push("fsdp_core::forward root")
    ops.pop_range("fsdp_core::forward root")
    ops.push("fsdp_core::backward root")
    ops.wait_stream(reduce, CALLER)
    ops.collective(reduce, write(10 + reduce), annotation="fsdp_core::reduce_gradients root")
    ops.pop_range("fsdp_core::backward root")
    if completes:
        ops.push("fsdp_core::complete")
        for stream in joins:
            ops.wait_stream(CALLER, stream)
        ops.pop_range("fsdp_core::complete")
    return ops


def accumulating(*, joins: bool = True, is_last_used: bool = True) -> Ops:
    """A context in the middle of a window while another completes; then its last microbatch."""
    first, second = 1, 2
    ops = pass_of(second, completes=True, joins=(second,))
    ops.extend(pass_of(first, completes=True, joins=(first,)))
    ops.extend(pass_of(first, completes=False))
    ops.extend(pass_of(second, completes=True, joins=(second,)))
    last = pass_of(first, completes=True, joins=(first,) if joins else ())
    ops.extend(op for op in last if is_last_used or op.kind is not Kind.COLLECTIVE)
    return ops


def test_a_completion_answers_for_the_streams_of_its_own_context() -> None:
    """Another may be in the middle of a window, and joins its reductions when that ends."""
    assert names(accumulating()) == []


def test_a_window_around_another_completion_must_still_be_joined() -> None:
    """Also what ran before that completion, and was not used again."""
    for is_last_used in (True, False):
        ops = accumulating(joins=False, is_last_used=is_last_used)

        assert names(ops) == [("all_gather", "fsdp_core::complete")]


def test_a_completion_that_forgets_one_of_its_streams_is_found() -> None:
    """Whether it never waits for it, or only in other steps."""
    for others in ((), (1, 2)):
        ops = pass_of(1, completes=True, joins=others)
        ops.extend(pass_of(2, completes=False))
        ops.extend(pass_of(1, completes=True, joins=(1,)))

        assert len(ops.findings("capture")) >= 1
