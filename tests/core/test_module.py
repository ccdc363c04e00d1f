"""Units: one countdown, phases, hand-driven units, units of several modules, delayed gradients."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdp_core
from fsdp_core import (
    FsdpModule,
    Phase,
    RuntimePolicy,
    SchedulePolicy,
    StateError,
)
from fsdp_core import device as accelerator
from fsdp_sim.op import Kind, Op
from tests.cases.programs import (
    STEP,
    Row,
    Training,
    assert_resting,
    batch,
    check_parity,
    check_values,
    entered,
    fill,
    gathered,
    linear,
    local_rows,
    loss_of,
    ops_by_step,
    put_together,
    reduced,
    shard,
)
from tests.core.worlds import device_type, on_ranks

MANAGED: dict[str, Any] = {"runtime_policy": RuntimePolicy(caller_managed_grad_sync=True)}


def step(model: nn.Module, rank: int, number: int) -> None:
    """One forward and backward."""
    loss_of(model(batch(rank, number)), rank).backward()


def unit(model: nn.Module, name: str = "") -> FsdpModule:
    """A sharded module."""
    module = model.get_submodule(name)
    assert isinstance(module, FsdpModule)
    return module


def assert_mean(grad: Tensor | None, summed: nn.Module) -> None:
    """Check a gradient against that of a layer that had the batches of both ranks."""
    total = summed.get_parameter("weight").grad
    assert total is not None
    assert grad is not None
    assert torch.equal(grad, total / 2)


# ---------------------------------------------------------------------- repeated modules


class Repeats(nn.Module):
    """Calls a shared layer as often as asked, each time checkpointed as asked."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = linear(), linear(), linear()
        self.mode = ""

    def forward(self, x: Tensor, uses: int) -> Tensor:
        """Run first, shared `uses` times, last; fold nothing, the weights are small."""
        x = self._call(self.first, x)
        for _ in range(uses):
            x = self._call(self.shared, x)
        return self._call(self.last, x)

    def _call(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.mode in ("reentrant", "non_reentrant"):
            x = checkpoint(layer, x, use_reentrant=self.mode == "reentrant")
        else:
            x = layer(x)
        return torch.remainder(x, 3.0)


@pytest.mark.everywhere
@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize(
    "mode", ["none", "reentrant", "non_reentrant", "whole reentrant", "whole non_reentrant"]
)
def test_a_repeated_module_trains_as_unsharded(mode: str, *, wrapped: bool) -> None:
    """Used twice, once and three times in two microbatches each: three reductions a microbatch."""

    def uses_step(model: nn.Module, rank: int, number: int) -> None:
        inner = model.get_submodule("inner") if wrapped else model
        assert isinstance(inner, Repeats)
        inner.mode = mode
        for micro in range(2):
            x = batch(rank, 2 * number + micro).requires_grad_()
            call = partial(model, uses=(2, 1, 3)[number])
            y = checkpoint(call, x, use_reentrant="non" not in mode) if "whole" in mode else call(x)
            loss_of(y, rank).backward()
            assert x.grad is not None

    def build() -> nn.Module:
        return fill(Wrap(Repeats()) if wrapped else Repeats())

    prefix = "inner." if wrapped else ""
    names = [prefix + each for each in ("first", "shared", "last")]
    for steps in check_values(Training(build, uses_step, (*names, ""), steps=3, rests=True)):
        assert [each.stats["reductions"] for each in steps] == [6, 12, 18]


class Wrap(nn.Module):
    """A root around one module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, uses: int) -> Tensor:
        """Call it."""
        out: Tensor = self.inner(x, uses)
        return out


@pytest.mark.everywhere
def test_a_unit_entered_from_inside_its_own_forward_is_refused() -> None:
    """The error names the unit and says what works instead; the unit rests behind it."""

    class Recursive(nn.Module):
        """Calls itself once."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, x: Tensor, depth: int = 1) -> Tensor:
            """Call itself if depth is left."""
            call = self if depth > 0 else self.forward
            y: Tensor = call(x, abs(depth) - 1) if depth else self.layer(x)
            return y

    def body(rank: int) -> str:
        shard(model := fill(Recursive()), "")
        with pytest.raises(StateError) as caught:
            model(batch(rank))
        assert_resting(model)
        model(batch(rank), -1).sum().backward()
        assert_resting(model)
        return str(caught.value)

    message = (
        "a module must not be called inside its own forward, got FsdpRecursive of unit '<root>' "
        "again; call self.forward(...) there, which finds the weights gathered, or context.reset() "
        "after an interrupt"
    )
    assert on_ranks(body, 2) == [message] * 2


# ---------------------------------------------------------------------- several modules


def test_a_unit_of_several_modules_is_gathered_once_for_all_of_them() -> None:
    """From the first that runs to the last one's end; in backward the same."""
    report = check_parity(
        Training(lambda: fill(Row("a", "b", "c")), step, (("a", "b"), "c", ""), steps=2)
    )
    for ops in ops_by_step(report):
        assert gathered(ops) == ["a+b", "c", "c", "a+b"]
        assert reduced(ops) == ["c", "a+b"]


@pytest.mark.everywhere
def test_a_unit_of_several_modules_of_which_some_run_rests_when_the_root_ends() -> None:
    """Nobody waits for the others for ever."""

    def body(rank: int) -> None:
        shard(model := fill(Row("a", "b", "c")), ("a", "b"), "c", "")
        with torch.no_grad():
            model(batch(rank), calls=("a", "c"))
        assert_resting(model)

    on_ranks(body, 2)


# ---------------------------------------------------------------------- declared counts


def declared(count: int) -> dict[str, Any]:
    """Options of a unit with a declared number of gradients."""
    return {"schedule_policy": SchedulePolicy(grad_accumulation_count=count)}


@pytest.mark.everywhere
def test_a_declared_count_reduces_when_that_many_gradients_have_come() -> None:
    """Over several backward passes; the sum of all is reduced once."""

    def body(rank: int) -> Any:
        context = shard(model := fill(linear()), "", **declared(3))
        reductions = []
        for number in range(3):
            step(model, rank, number)
            reductions.append(context.stats.reductions)
            assert_phases(model)
        return reductions, local_rows(model, grads=True)

    def assert_phases(model: nn.Module) -> None:
        assert unit(model).phase is Phase.RESTING
        assert not unit(model).fsdp_unit.is_unsharded

    results = on_ranks(body, 2)

    expected = fill(linear())
    for rank in range(2):
        for number in range(3):
            step(expected, rank, number)
    assert [reductions for reductions, _ in results] == [[0, 0, 1]] * 2
    assert_mean(put_together([grads for _, grads in results])["weight"], expected)


@pytest.mark.everywhere
def test_a_declared_count_is_of_the_whole_unit() -> None:
    """Two gradients of one parameter and one of another fill a window of three."""

    def body(rank: int) -> Any:
        model = fill(Row("a", "b"))
        context = shard(model, "", **declared(3))
        reductions = []
        for calls in (("a", "b"), ("a",)):
            loss_of(model(batch(rank), calls=calls), rank).backward()
            reductions.append(context.stats.reductions)
        return reductions, local_rows(model, grads=True)

    results = on_ranks(body, 2)

    expected = fill(Row("a", "b"))
    for rank in range(2):
        for calls in (("a", "b"), ("a",)):
            loss_of(expected(batch(rank), calls=calls), rank).backward()
    assert [reductions for reductions, _ in results] == [[0, 1]] * 2
    grads = put_together([grads for _, grads in results])
    for name in ("a", "b"):
        assert_mean(grads[f"{name}.weight"], expected.get_submodule(name))


@pytest.mark.everywhere
def test_a_validation_forward_disturbs_no_count() -> None:
    """Neither in the middle of a window, nor between a forward and its backward."""

    def body(rank: int) -> Any:
        context = shard(model := fill(Row("a", "b")), "", **declared(4))
        reductions = []
        for number in range(2):
            loss = loss_of(model(batch(rank, number)), rank)
            with torch.no_grad():
                model(batch(rank, number + 2))
            loss.backward()
            with torch.no_grad():
                model(batch(rank, number + 3))
            reductions.append(context.stats.reductions)
        return reductions, local_rows(model, grads=True)

    results = on_ranks(body, 2)

    expected = fill(Row("a", "b"))
    for rank in range(2):
        for number in range(2):
            step(expected, rank, number)
    assert [reductions for reductions, _ in results] == [[0, 1]] * 2
    grads = put_together([grads for _, grads in results])
    for name in ("a", "b"):
        assert_mean(grads[f"{name}.weight"], expected.get_submodule(name))


@pytest.mark.everywhere
def test_a_partly_filled_window_cannot_be_used() -> None:
    """The optimizer is refused, with how many gradients have come."""

    def body(rank: int) -> None:
        shard(model := fill(linear()), "", **declared(2))
        optimizer = torch.optim.SGD(model.parameters())
        fsdp_core.fully_shard_optimizer(optimizer)
        step(model, rank, 0)
        with pytest.raises(
            ValueError, match=r"'<root>' mid-flight with 1/2 gradients of \['weight'\];"
        ):
            optimizer.step()
        step(model, rank, 1)
        optimizer.step()

    on_ranks(body, 2)


@pytest.mark.everywhere
@pytest.mark.parametrize("frozen", [False, True])
def test_more_gradients_than_declared_are_refused(*, frozen: bool) -> None:
    """In one backward pass, whether the unit is over or frozen weights keep it; next, all is well."""

    def body(rank: int) -> None:
        model = fill(Row("a", "b", "c"))
        model.get_submodule("c").requires_grad_(not frozen)
        context = shard(model, "", **declared(1))
        with pytest.raises(StateError) as caught:
            step(model, rank, 0)
        assert str(caught.value).startswith(
            f"grad_accumulation_count of unit '<root>' must count every gradient of a window, got 1 "
            f"declared and one more for {'a.weight' if frozen else 'b.weight'!r} in the same backward "
            f"pass; declare as many as come, or None"
        )
        context.reset()
        model(batch(rank), calls=("a",)).sum().backward()
        assert_resting(model)

    on_ranks(body, 2)


@pytest.mark.everywhere
def test_a_count_on_a_unit_without_trainable_parameters_is_refused() -> None:
    """It could never be reached."""

    def body() -> None:
        with pytest.raises(ValueError, match=r"^grad_accumulation_count needs a trainable param"):
            shard(Row("a").requires_grad_(requires_grad=False), "", mesh=(1,), **declared(1))

    on_ranks(lambda _rank: body(), 1)


# ---------------------------------------------------------------------- delayed weight gradients


class DelayedLinear(nn.Linear):
    """A linear layer whose backward gives the input's gradient alone; `backward_dw` the weight's."""

    def __init__(self) -> None:
        super().__init__(2, 2, bias=False)
        self.weight.skip_backward_post_hook = True  # type: ignore[attr-defined]
        self.hooks: list[Callable[[], None]] = []
        self.saved: list[tuple[Tensor, Tensor]] = []

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Have `hook` called when the weight's gradient is there."""
        self.hooks.append(hook)

    def forward(self, x: Tensor) -> Tensor:
        """Return x times the weight."""
        y: Tensor = InputGradientOnly.apply(x, self.weight, self.saved)  # type: ignore[no-untyped-call]
        return y

    def backward_dw(self) -> None:
        """Put the weight's gradient in place."""
        for x, grad in self.saved:
            new = grad.t() @ x
            self.weight.grad = new if self.weight.grad is None else self.weight.grad + new
        self.saved.clear()
        for hook in self.hooks:
            hook()


class InputGradientOnly(torch.autograd.Function):
    """A product whose backward keeps what the weight's gradient needs for later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, saved: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return x times the weight."""
        ctx.save_for_backward(x, weight)
        ctx.saved_for_dw = saved
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the input's gradient."""
        x, weight = ctx.saved_tensors
        ctx.saved_for_dw.append((x.detach(), grads[0].detach()))
        return grads[0] @ weight, None, None


@pytest.mark.everywhere
def test_a_delayed_gradient_completes_its_unit_when_it_comes() -> None:
    """The unit stays in BACKWARD behind autograd's pass; its weights are freed all the same."""

    def body(rank: int) -> Any:
        delayed = DelayedLinear()
        model = fill(nn.Sequential(delayed, linear()))
        context = shard(model, "0", "1", **MANAGED)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        fsdp_core.fully_shard_optimizer(optimizer)
        x = batch(rank).requires_grad_()
        loss_of(model(x), rank).backward()
        phases = [unit(model, "0").phase, unit(model, "1").phase]
        full_nbytes = context.stats.full_nbytes
        with pytest.raises(StateError, match=r"got none yet for \['weight'\]"):
            optimizer.step()
        delayed.backward_dw()
        context.finish_grad_sync()
        assert_resting(model)
        optimizer.step()
        return phases, full_nbytes, local_rows(model)

    results = on_ranks(body, 2)

    expected = fill(nn.Sequential(linear(), linear()))
    optimizer = torch.optim.SGD(expected.parameters(), lr=1.0)
    for rank in range(2):
        (loss_of(expected(batch(rank)), rank) / 2).backward()
    optimizer.step()
    assert [each[:2] for each in results] == [([Phase.BACKWARD, Phase.RESTING], 0)] * 2
    weights = put_together([rows for *_, rows in results])
    for name, parameter in expected.named_parameters():
        got = weights[name]
        assert got is not None
        assert torch.equal(got, parameter)


@pytest.mark.everywhere
def test_delayed_gradients_of_one_unit_may_come_in_another_order_on_each_rank() -> None:
    """The last of them completes the unit, whichever it is."""

    def body(rank: int) -> Any:
        layers = [DelayedLinear(), DelayedLinear()]
        context = shard(model := fill(nn.Sequential(*layers)), "", **MANAGED)
        loss_of(model(batch(rank).requires_grad_()), rank).backward()
        reductions = []
        for layer in layers if rank == 0 else reversed(layers):
            layer.backward_dw()
            reductions.append(context.stats.reductions)
        context.finish_grad_sync()
        assert_resting(model)
        return reductions, local_rows(model, grads=True)

    results = on_ranks(body, 2)

    expected = fill(nn.Sequential(linear(), linear()))
    for rank in range(2):
        loss_of(expected(batch(rank)), rank).backward()
    assert [reductions for reductions, _ in results] == [[0, 1]] * 2
    grads = put_together([grads for _, grads in results])
    for name in ("0", "1"):
        assert_mean(grads[f"{name}.weight"], expected.get_submodule(name))


@pytest.mark.everywhere
def test_a_delayed_gradient_behind_the_pass_needs_a_caller_who_waits() -> None:
    """Without one the reduction would be waited for by nobody."""

    def body(rank: int) -> None:
        model = DelayedLinear()
        shard(fill(model), "", mesh=(1,))
        loss_of(model(batch(rank).requires_grad_()), rank).backward()
        with pytest.raises(StateError, match=r"^a reduction must be issued inside a backward pass"):
            model.backward_dw()

    on_ranks(body, 1)


@pytest.mark.everywhere
def test_a_forward_before_the_delayed_gradient_is_refused() -> None:
    """The unit is not at rest yet; the error names it and both phases."""

    def body(rank: int) -> None:
        shard(model := fill(DelayedLinear()), "", mesh=(1,), **MANAGED)
        loss_of(model(batch(rank).requires_grad_()), rank).backward()
        with pytest.raises(StateError, match=r"got BACKWARD to FORWARD for '<root>'"):
            model(batch(rank))

    on_ranks(body, 1)


@pytest.mark.everywhere
def test_tied_and_delayed_parameters_are_refused() -> None:
    """Nobody would add their gradients up."""

    def body() -> None:
        model = nn.ModuleDict({"a": DelayedLinear(), "b": DelayedLinear()})
        model["b"].weight = model["a"].weight
        with pytest.raises(ValueError, match=r"^a parameter with a delayed gradient must have one"):
            shard(model, "", mesh=(1,))

    on_ranks(lambda _rank: body(), 1)


# ---------------------------------------------------------------------- hooks and transforms of users


@pytest.mark.everywhere
def test_a_forward_hook_finds_full_weights_whenever_it_was_registered() -> None:
    """Before sharding or behind it; what it makes of the weights has its gradient."""

    def multiply(module: nn.Module, _args: Any, y: Tensor) -> Tensor:
        return y * module.get_parameter("weight").sum()

    def add(module: nn.Module, _args: Any, y: Tensor) -> Tensor:
        return y + module.get_parameter("weight")[0]

    def build() -> nn.Module:
        (model := linear()).register_forward_hook(multiply)
        return fill(model)

    def step(model: Any, rank: int, number: int) -> None:
        if not hasattr(model, "added"):
            model.added = model.register_forward_hook(add)
        loss_of(model(batch(rank, number)), rank).backward()

    check_values(Training(build, step, ("",), steps=2))


@pytest.mark.everywhere
@pytest.mark.parametrize("name", ["grad", "vjp", "jacrev"])
def test_a_unit_does_not_run_inside_a_transform_that_differentiates_backwards(name: str) -> None:
    """Backward passes of autograd alone gather weights; the unit rests behind the refusal."""
    transform: Any = getattr(torch.func, name)

    def body(rank: int) -> str:
        shard(model := fill(linear()), "", mesh=(1,))
        x = batch(rank)
        arguments = (lambda x: model(x).sum(), *((x,) if name == "vjp" else ()))
        with pytest.raises(StateError) as caught:
            transform(*arguments) if name == "vjp" else transform(*arguments)(x)
        assert_resting(model)
        return str(caught.value)

    message = (
        "a unit must not run inside torch.func.grad, vjp or jacrev, got unit '<root>', whose weights "
        "are gathered for backward passes of autograd alone; use torch.autograd.grad"
    )
    assert on_ranks(body, 1) == [message]


@pytest.mark.everywhere
def test_a_unit_runs_inside_vmap() -> None:
    """One call for all rows, and a backward as ever."""

    def step(model: nn.Module, rank: int, number: int) -> None:
        y = torch.func.vmap(model)(batch(rank, number, rows=3))
        loss_of(y, rank).backward()

    check_values(Training(lambda: fill(linear()), step, ("",)))


# ---------------------------------------------------------------------- driven by hand

BY_HAND: dict[str, Any] = {"schedule_policy": SchedulePolicy(register_hooks=False)}


@pytest.mark.everywhere
def test_interleaved_microbatches_of_a_hand_driven_unit_have_parity() -> None:
    """Forward of one and backward of another between unshards and reshards that are counted."""

    def body(rank: int) -> Any:
        context = shard(model := fill(linear()), "", **BY_HAND)
        one = unit(model)
        losses = []
        for number in range(3):
            one.unshard()
            losses.append(loss_of(model(batch(rank, number)), rank))
            if number:
                one.unshard()
                losses[number - 1].backward()
                one.reshard()
                assert one.fsdp_unit.is_unsharded
            one.reshard()
            assert not one.fsdp_unit.is_unsharded
        one.unshard()
        losses[2].backward()
        one.reshard()
        assert_resting(model)
        return context.stats.reductions, local_rows(model, grads=True)

    results = on_ranks(body, 2)

    expected = fill(linear())
    for rank in range(2):
        for number in range(3):
            step(expected, rank, number)
    assert [reductions for reductions, _ in results] == [3, 3]
    assert_mean(put_together([grads for _, grads in results])["weight"], expected)


@pytest.mark.everywhere
def test_unshard_and_reshard_are_idempotent() -> None:
    """A second gather is not issued, and a second release is no error."""

    def body(_rank: int) -> None:
        context = shard(model := fill(linear()), "")
        one = unit(model)
        one.unshard()
        one.unshard()
        assert context.stats.gathers == 1
        assert not isinstance(model.weight, DTensor)
        one.reshard()
        one.reshard()
        assert isinstance(model.weight, DTensor)
        assert_resting(model)

    on_ranks(body, 2)


@pytest.mark.everywhere
def test_recursive_verbs_reach_every_unit_of_the_tree() -> None:
    """From the root down, each once."""

    def body(_rank: int) -> None:
        context = shard(model := fill(Row("a", "b")), "a", "b", "")
        unit(model).unshard(recurse=True)
        assert context.stats.gathers == 2
        unit(model).reshard(recurse=True)
        assert_resting(model)

    on_ranks(body, 2)


@pytest.mark.everywhere
def test_unshard_may_prefetch_in_either_direction() -> None:
    """The unit that follows in the order is gathered early."""

    def body(_rank: int) -> None:
        context = shard(model := fill(Row("a", "b", "c")), "a", "b", "c", "")
        unit(model, "b").unshard(prefetch="forward")
        assert unit(model, "c").fsdp_unit.is_unsharded
        unit(model, "b").unshard(prefetch="backward")
        assert unit(model, "a").fsdp_unit.is_unsharded
        assert context.stats.prefetches == 2
        unit(model).reshard(recurse=True)

    on_ranks(body, 2)


@pytest.mark.everywhere
def test_resharding_a_unit_that_runs_is_refused() -> None:
    """By hand, inside its own forward: the error names the phase."""

    def body(rank: int) -> None:
        shard(model := fill(Row("a")), "a", "")
        one = unit(model, "a")

        def early(_module: nn.Module, _args: Any) -> None:
            one.reshard()

        handle = one.register_forward_pre_hook(early)  # type: ignore[attr-defined]
        with pytest.raises(
            StateError, match=r"^a unit must be RESTING to be resharded by hand, got F"
        ):
            model(batch(rank))
        handle.remove()
        assert_resting(model)

    on_ranks(body, 2)


@pytest.mark.everywhere
def test_a_callback_is_called_once_for_each_backward_of_its_unit() -> None:
    """With the module, behind its reduction; also for a unit without hooks or parameters."""

    def body(rank: int) -> None:
        seen: list[str] = []
        model = fill(Row(a=linear(), empty=nn.Identity()))
        context = shard(model, "a", "empty", **BY_HAND)

        def note(module: nn.Module) -> None:
            seen.append(next(name for name, each in model.named_modules() if each is module))

        for name in ("a", "empty"):
            unit(model, name).register_post_backward_hook(note)
        unit(model, "a").unshard()
        step(model, rank, 0)
        unit(model, "a").reshard()

        assert sorted(seen) == ["a", "empty"]
        assert context.stats.reductions == 1

    on_ranks(body, 2)


# ---------------------------------------------------------------------- annotations


def test_ranges_are_nested_and_balanced() -> None:
    """Each unit's forward and backward opens once and closes, root outside of children."""
    ops = ops_by_step(check_parity(Training(lambda: fill(Row("a", "b")), step, ("a", "b", ""))))[0]

    assert list(entered(ops, "forward")) == ["<root>", "a", "b"]
    assert list(entered(ops, "backward")) == ["<root>", "b", "a"]
    depth = 0
    for op in ops:
        if op.name.startswith("fsdp_core::") and not op.name.startswith(STEP):
            depth += {Kind.RANGE_PUSH: 1, Kind.RANGE_POP: -1}.get(op.kind, 0)
            assert depth >= 0
    assert depth == 0


@pytest.mark.usefixtures("lone_process")
def test_ranges_of_nvtx_close_inside_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for its library: each scope that ends is the innermost that is open."""
    opened: list[str] = []
    outline: list[str] = []
    open_range = accelerator._nvtx_range

    def push(label: str) -> None:
        operation = label.removeprefix("fsdp_core::")
        if operation.startswith(("forward", "backward")):
            outline.append("  " * len(opened) + operation)
        opened.append(label)

    @contextmanager
    def watched(label: str) -> Iterator[None]:
        with open_range(label):
            yield
            assert opened[-1] == label

    monkeypatch.setattr(accelerator, "_NVTX_LISTENS", True)
    monkeypatch.setattr(accelerator, "_nvtx_range", watched)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", opened.pop)
    shard(model := fill(Row("a", "b")), "a", "b", "", mesh=(1,))
    step(model, 0, 0)

    assert not opened
    assert outline == [
        "forward <root>",
        "  forward a",
        "  forward b",
        "backward <root>",
        "  backward b",
        "  backward a",
    ]


@pytest.mark.usefixtures("lone_process")
def test_no_range_is_opened_when_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step asks, and that is all."""

    def opened(label: str) -> NoReturn:
        pytest.fail(f"{label} was opened")

    monkeypatch.setattr(accelerator, "_nvtx_range", opened)
    monkeypatch.setattr(accelerator, "record_function", opened)
    shard(model := fill(Row("a", "b")), "a", "b", "", mesh=(1,))
    step(model, 0, 0)


def ranges(step: Callable[[nn.Module, int, int], None], *units: str, model: nn.Module) -> list[Op]:
    """The ranges of rank 0 in one step, opened or closed."""
    ops = ops_by_step(check_parity(Training(lambda: deepcopy(model), step, units)))[0]
    return [op for op in ops if op.kind in (Kind.RANGE_PUSH, Kind.RANGE_POP)]


def test_each_root_has_its_own_ranges() -> None:
    """Forward in the order of calls, backward the other way round; the numbers tell them apart."""
    model = fill(Row(first=Row("a"), second=Row("b")))
    ops = ranges(step, "first", "second", model=model)

    roots = ["<root> (root 0)", "<root> (root 1)"]
    assert list(entered(ops, "forward")) == roots
    assert list(entered(ops, "backward")) == roots[::-1]
    for root in roots:
        assert_balanced(ops, f"fsdp_core::forward {root}")
        assert_balanced(ops, f"fsdp_core::backward {root}")


def assert_balanced(ops: Sequence[Op], label: str, times: int = 1) -> None:
    """A range is opened, and closed as often."""
    pushes = [op for op in ops if op.name == label and op.kind is Kind.RANGE_PUSH]
    pops = [op for op in ops if op.name == label and op.kind is Kind.RANGE_POP]
    assert len(pushes) == len(pops) == times


def test_a_frozen_unit_whose_input_wants_a_gradient_has_one_range_backward() -> None:
    """It closes though no gradient of its own tells when."""
    model = fill(Row("a", "b"))
    model.get_parameter("b.weight").requires_grad = False

    assert_balanced(ranges(step, "a", "b", "", model=model), "fsdp_core::backward b")


def test_a_frozen_first_layer_has_no_range_backward() -> None:
    """Backward never reaches it."""
    model = fill(Row("a", "b"))
    model.get_parameter("a.weight").requires_grad = False
    ops = ranges(step, "a", "b", "", model=model)

    assert_balanced(ops, "fsdp_core::forward a")
    assert "a" not in entered(ops, "backward")


def test_a_tied_weight_does_not_open_a_second_range() -> None:
    """Its unit is entered once in each pass, whatever uses it."""

    def twice(model: nn.Module, rank: int, number: int) -> None:
        step(model, rank, number)
        step(model, rank, number + 1)

    model = fill(Row("a", "b"))
    model.get_submodule("b").register_parameter("weight", model.get_parameter("a.weight"))
    ops = ranges(twice, "", model=model)

    assert_balanced(ops, "fsdp_core::forward <root>", times=2)
    assert_balanced(ops, "fsdp_core::backward <root>", times=2)


def test_weights_may_be_kept_from_forward_to_backward() -> None:
    """One gather for each unit and step; loading between passes is still seen."""
    policy = SchedulePolicy(reshard_after_forward=False)
    report = check_parity(
        Training(
            lambda: fill(Row("a", "b")),
            step,
            ("a", "b", ""),
            steps=2,
            options={"schedule_policy": policy},
        )
    )
    for ops in ops_by_step(report):
        assert gathered(ops) == ["a", "b"]


@pytest.mark.everywhere
def test_a_moved_model_keeps_its_shards() -> None:
    """`model.to` of the same device changes nothing; another dtype is refused by name."""

    def body(rank: int) -> None:
        shard(model := fill(Row("a")), "a", "")
        before = model.get_parameter("a.weight")
        model.to(device_type())
        assert model.get_parameter("a.weight") is before
        with pytest.raises(StateError, match=r"got a conversion of unit 'a' from torch.float32 on"):
            model.half()
        step(model, rank, 0)

    on_ranks(body, 2)


@pytest.mark.everywhere
def test_state_dicts_hold_shards_whatever_ran() -> None:
    """Also while weights are kept for backward; the pass goes on behind it."""

    def body(rank: int) -> None:
        policy = SchedulePolicy(reshard_after_forward=False)
        shard(model := fill(linear()), "", schedule_policy=policy)
        loss = loss_of(model(batch(rank)), rank)
        state = model.state_dict()
        assert isinstance(state["weight"], DTensor)
        loss.backward()
        assert_resting(model)

    on_ranks(body, 2)
