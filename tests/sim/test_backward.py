"""Backward: which stream autograd runs what on, and what it orders by itself, rule by rule."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fsdp_sim.engine import patches
from fsdp_sim.op import Kind, Op
from tests.sim.litmus import cpu, findings, is_racy, on_one_rank, ops_of


def streams_of(ops: list[Op], *names: str) -> list[int]:
    """Return the streams of the ops called one of ``names``, in order."""
    return [op.stream for op in ops if op.kind is Kind.ATEN and op.name in names]


def on(stream: Any, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Run ``function`` on ``stream``, ordered with the current stream on both sides."""
    current = cpu.current_stream()
    stream.wait_stream(current)
    with cpu.stream(stream):
        out = function(*inputs)
    current.wait_stream(stream)
    return out


def leaf(value: float = 3.0) -> Tensor:
    """Return a leaf of four elements."""
    return torch.full((4,), value, requires_grad=True)


# ---------------------------------------------------------------------- the stream of a node


def test_a_node_runs_on_the_stream_of_its_forward_op() -> None:
    """Backward of an op of a side stream runs there, though backward is called elsewhere."""

    def program() -> None:
        side = cpu.Stream()
        y = on(side, torch.sin, leaf() * 2)
        y.sum().backward()

    ops = ops_of(program)

    assert streams_of(ops, "sin", "cos") == [1, 1]
    assert streams_of(ops, "mul.Tensor")[0] == 0


def test_a_graph_of_one_stream_is_left_alone() -> None:
    """Without a second stream autograd makes no waits and no node is watched."""

    def program() -> None:
        x = leaf()
        side = cpu.Stream()
        with cpu.stream(side), torch.no_grad():
            torch.ones(4)
        (x * x).sum().backward()

    assert not [op for op in ops_of(program) if op.name == "autograd"]


def test_a_whole_graph_on_one_side_stream_runs_there() -> None:
    """Called from the default stream, a graph made on a side stream runs on that side stream."""

    def program() -> None:
        x, side = leaf(), cpu.Stream()
        y = on(side, lambda x: x.sin().sum(), x)
        y.backward()

    assert streams_of(ops_of(program), "cos") == [1]
    assert findings(program) == ()


def test_ops_of_several_side_streams_go_back_to_each() -> None:
    """Each node finds its own stream again."""

    def program() -> None:
        one, two = cpu.Stream(), cpu.Stream()
        y = on(two, torch.exp, on(one, torch.sin, leaf()))
        y.sum().backward()

    ops = ops_of(program)

    assert streams_of(ops, "sin") == streams_of(ops, "cos") == [1]
    assert streams_of(ops, "exp") == [2]
    assert findings(program) == ()


# ---------------------------------------------------------------------- what autograd orders


def test_a_consumer_waits_for_a_producer_on_another_stream() -> None:
    """Gradients that cross streams are ordered by autograd."""

    def program() -> None:
        side = cpu.Stream()
        on(side, torch.sin, leaf().exp()).exp().sum().backward()

    assert findings(program) == ()


def test_a_node_without_ops_carries_the_order() -> None:
    """A view on a side stream between two nodes of the default stream loses no edge."""

    def program() -> None:
        one, two = cpu.Stream(), cpu.Stream()
        x = on(one, torch.sin, leaf())
        y = on(two, lambda x: x.view(2, 2), x)
        on(one, torch.exp, y).sum().backward()

    assert findings(program) == ()


def test_the_root_waits_for_the_callers_stream() -> None:
    """A gradient computed on the caller's stream may be given to a root of another stream."""

    def program() -> None:
        side = cpu.Stream()
        y = on(side, torch.sin, leaf())
        y.backward(torch.full((4,), 2.0).mul(3))

    assert findings(program) == ()


def test_the_callers_stream_waits_for_all_leaves() -> None:
    """Gradients may be read behind backward where it was called, and not elsewhere."""

    def program(reader: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            x, side = leaf(), cpu.Stream()
            on(side, lambda x: x.sin().sum(), x).backward()
            with cpu.stream(reader()):
                assert x.grad is not None
                x.grad.add(1)

        return run

    assert not is_racy(program(lambda: cpu.current_stream()))
    assert is_racy(program(lambda: cpu.Stream()))


def test_final_callbacks_run_behind_the_leaves_on_the_callers_stream() -> None:
    """The leaves are joined before callbacks queued during backward run."""
    seen: list[bool] = []

    def program() -> None:
        x, side = leaf(), cpu.Stream()
        caller = cpu.current_stream()

        def callback() -> None:
            seen.append(cpu.current_stream() == caller)
            assert x.grad is not None
            x.grad.add(1)

        def queue(grad: Tensor) -> None:
            patches.queue_backward_callback(callback)

        y = on(side, torch.sin, x)
        y.register_hook(queue)
        y.sum().backward()

    assert findings(program) == ()
    assert seen == [True]


def test_what_is_launched_inside_a_hook_on_a_third_stream_is_not_joined() -> None:
    """Autograd joins the streams of leaves, and no others."""

    def program() -> None:
        x, side, third = leaf(), cpu.Stream(), cpu.Stream()
        kept: list[Tensor] = []

        def hook(grad: Tensor) -> None:
            third.wait_stream(cpu.current_stream())
            with cpu.stream(third):
                kept.append(grad.mul(2))

        y = on(side, torch.sin, x)
        y.register_hook(hook)
        y.sum().backward()
        kept[0].add(1)

    assert is_racy(program)


def test_gradients_that_cross_streams_are_kept_from_reuse() -> None:
    """Autograd records the consumer's stream on a gradient, so its early death is harmless."""

    def program() -> None:
        side = cpu.Stream()
        x = leaf()
        y = on(side, lambda x: x.sin().sin(), x.exp())
        y.exp().sum().backward()
        torch.zeros(4)

    assert any(op.kind is Kind.RECORD_STREAM for op in ops_of(program))
    assert findings(program) == ()


# ---------------------------------------------------------------------- adding gradients up


def test_gradients_are_added_up_on_the_consumers_stream() -> None:
    """Two users on two streams: the sum is made where their input was made."""

    def program() -> None:
        one, two = cpu.Stream(), cpu.Stream()
        x = leaf().exp()
        (on(one, torch.sin, x) + on(two, torch.cos, x)).sum().backward()

    ops = ops_of(program)
    backward = ops[[op.name for op in ops].index("sum") :]

    assert streams_of(backward, "add.Tensor", "add_.Tensor") == [0]
    assert findings(program) == ()


def test_sums_for_consumers_on_different_streams_are_made_on_each() -> None:
    """One producer completes two sums, each on its own consumer's stream."""

    def program() -> None:
        one, two, three = cpu.Stream(), cpu.Stream(), cpu.Stream()
        x = leaf()
        a, b = on(one, torch.sin, x), on(two, torch.sin, x)
        first = on(three, torch.mul, a, b)
        second = torch.mul(a, b)
        (first + second).sum().backward()

    ops = ops_of(program)
    backward = ops[[op.name for op in ops].index("sum") :]
    sums = streams_of(backward, "add.Tensor", "add_.Tensor")

    assert sorted(sums) == [1, 1, 2]  # of a, of the leaf (first used there), and of b
    assert findings(program) == ()


def test_a_leaf_accumulates_where_it_was_first_used() -> None:
    """The second backward adds into .grad on the stream of the leaf's first use."""

    def program() -> None:
        x, side = leaf(), cpu.Stream()
        for _ in range(2):
            on(side, torch.sin, x).exp().sum().backward()

    ops = ops_of(program)
    last = max(i for i, op in enumerate(ops) if op.name == "cos")

    assert streams_of(ops[last:], "add_.Tensor") == [1]
    assert findings(program) == ()


def test_a_leaf_whose_node_is_kept_keeps_its_stream() -> None:
    """A node held from a use on one stream stays there, whatever stream uses the leaf later."""

    def program() -> list[int]:
        x, side = leaf(), cpu.Stream()
        kept = on(side, torch.sin, x)
        kept.exp().sum().backward(retain_graph=True)
        x.cos().sum().backward()
        return []

    ops = ops_of(program)
    last = max(i for i, op in enumerate(ops) if op.name == "sin")

    assert streams_of(ops[last:], "add_.Tensor") == [1]
    assert findings(program) == ()


# ---------------------------------------------------------------------- hooks and contexts


@pytest.mark.parametrize("on_side", [False, True])
def test_a_graph_that_has_run_dies_with_its_last_reference(on_side: bool) -> None:
    """What a node keeps is freed at once, as without the simulator, and not when garbage is collected."""

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, kept: Any) -> Tensor:
            ctx.kept = kept
            return x * 2

        @staticmethod
        def backward(_ctx: Any, *gradients: Tensor) -> Any:
            return gradients[0] * 2, None

    def program() -> bool:
        kept = torch.nn.Identity()
        seen = weakref.ref(kept)
        on(cpu.Stream(), torch.sin, leaf())  # backward has several streams to tell apart
        x = leaf()
        y = on(cpu.Stream(), torch.sin, x) if on_side else x
        Keeps.apply(y, kept).sum().backward()  # type: ignore[no-untyped-call]
        del kept
        return seen() is None

    assert on_one_rank(program)


def test_a_hook_sees_the_stream_of_its_node() -> None:
    """Tensor hooks, leaf hooks and node hooks see the stream on which their node runs."""

    def program() -> list[int]:
        x, side = leaf(), cpu.Stream()
        seen: list[int] = []

        def look(*_: Any) -> None:
            seen.append(cpu.current_stream().stream_id)

        y = on(side, torch.sin, x)
        z = y.exp()
        x.register_post_accumulate_grad_hook(look)
        x.register_hook(look)
        y.register_hook(look)
        z.register_hook(look)
        assert y.grad_fn is not None
        y.grad_fn.register_hook(look)
        z.sum().backward()
        return seen

    assert on_one_rank(program) == [0, 1, 1, 1, 1]


def test_a_stream_context_inside_a_hook_holds() -> None:
    """A context that a hook opens selects its stream for the hook's ops, and no longer."""

    def program() -> list[bool]:
        x, side, third = leaf(), cpu.Stream(), cpu.Stream()
        seen: list[bool] = []

        def hook(grad: Tensor) -> None:
            with cpu.stream(third):
                torch.ones(4)
                seen.append(cpu.current_stream() == third)
            seen.append(cpu.current_stream() == side)

        y = on(side, torch.sin, x)
        y.register_hook(hook)
        y.sum().backward()
        return seen

    assert on_one_rank(program) == [True, True]


def test_a_stream_that_a_hook_selects_for_good_lasts_as_long_as_its_node() -> None:
    """The next node, and the caller behind backward, have their own streams."""

    def program() -> bool:
        x, side, default = leaf(), cpu.Stream(), cpu.current_stream()
        y = x.exp()
        z = y.sin()
        assert z.grad_fn is not None
        z.grad_fn.register_hook(lambda *_: cpu.set_stream(side))
        z.sum().backward()
        return cpu.current_stream() == default

    assert on_one_rank(program)


@pytest.mark.parametrize("on_side", [False, True])
def test_the_callers_stream_is_current_again_after_an_exception(on_side: bool) -> None:
    """A hook that raises ends backward; the caller's stream is as it was."""

    def program() -> bool:
        x, side, default = leaf(), cpu.Stream(), cpu.current_stream()

        def fail(grad: Tensor) -> None:
            cpu.set_stream(side)
            raise ValueError("out")

        y = on(side, torch.sin, x) if on_side else x.sin()
        y.register_hook(fail)
        with pytest.raises(ValueError, match=r"^out$"):
            y.sum().backward()
        return cpu.current_stream() == default

    assert on_one_rank(program)


# ---------------------------------------------------------------------- other ways to run backward


def test_grad_returns_gradients_that_the_caller_may_use() -> None:
    """``torch.autograd.grad`` joins the streams of what it returns, leaf or not."""

    def program() -> None:
        x, side = leaf(), cpu.Stream()
        y = on(side, torch.exp, x)
        z = on(side, torch.sin, y)
        for wanted in (x, y):
            (grad,) = torch.autograd.grad(z.sum(), wanted, retain_graph=True)
            grad.add(1)

    assert findings(program) == ()


def test_backward_of_backward_runs_where_backward_ran() -> None:
    """Nodes made during a backward pass belong to the streams on which it made them."""

    def program() -> None:
        x, side = leaf(), cpu.Stream()
        y = on(side, lambda x: x * x * x, x)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert second.tolist() == [18.0] * 4

    assert findings(program) == ()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_regions_on_a_side_stream(reentrant: bool) -> None:
    """Recomputation and its backward run on the stream of the region."""

    def program() -> None:
        x, side = leaf(), cpu.Stream()

        def region(x: Tensor) -> Tensor:
            return checkpoint(lambda x: x.sin().exp(), x, use_reentrant=reentrant)

        on(side, region, x.exp()).exp().sum().backward()
        assert x.grad is not None
        x.grad.add(1)

    assert findings(program) == ()
    assert set(streams_of(ops_of(program), "sin", "cos")) == {1}


def test_backward_called_on_a_side_stream() -> None:
    """A graph of the default stream runs there; the caller's stream is joined, the default not."""

    def program() -> None:
        x, side = leaf(), cpu.Stream()
        y = x.sin().sum()
        side.wait_stream(cpu.current_stream())
        with cpu.stream(side):
            y.backward()
            assert x.grad is not None
            x.grad.add(1)

    assert streams_of(ops_of(program), "cos") == [0]
    assert findings(program) == ()


def test_gradients_are_those_of_plain_autograd() -> None:
    """Watching nodes changes no value."""

    def program() -> list[float]:
        x, side = leaf(2.0), cpu.Stream()
        y = on(side, lambda x: x * x, x)
        z = (y * x + on(side, lambda y: y * 3, y)).sum()
        z.backward()
        assert x.grad is not None
        grads: list[float] = x.grad.tolist()
        return grads

    assert on_one_rank(program) == [24.0] * 4  # 3 x^2 + 6 x at x = 2
