"""FsdpContext: roots, names, orders, streams, recorded passes, completion, recovery, counters."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp_core
from fsdp_core import (
    ConfigError,
    FsdpContext,
    FsdpModule,
    MixedPrecisionPolicy,
    Phase,
    PrefetchOrder,
    RuntimePolicy,
    SchedulePolicy,
    StateError,
    collectives,
)
from fsdp_core.context import _collect_backward_order, _collect_fsdp_children
from fsdp_core.context_stats import ContextStats
from tests.cases.programs import (
    SHARDED,
    ZERO_1,
    Row,
    Training,
    assert_resting,
    batch,
    check_parity,
    check_values,
    fill,
    gathered,
    linear,
    local_rows,
    loss_of,
    mesh_of,
    ops_by_step,
    shard,
)
from tests.core.worlds import need_gpu, on_ranks, unsharded


class Tree(nn.Module):
    """A root with two children, of which the left one has a child of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left = Row(inner=linear())
        self.right = Row("a")

    def forward(self, x: Tensor) -> Tensor:
        """Call both."""
        return self.right(self.left(x))


def step(model: nn.Module, rank: int, number: int) -> None:
    """One forward and backward."""
    loss_of(model(batch(rank, number)), rank).backward()


def alone(body: Callable[[], Any]) -> Any:
    """Run something on one simulated rank."""
    return on_ranks(lambda _rank: body(), 1)[0]


def events(context: FsdpContext) -> list[tuple[str, str]]:
    """Names and phases of the execution order."""
    return [
        (context.module_name(event.module), event.phase.value) for event in context.execution_order
    ]


# ---------------------------------------------------------------------- construction


@pytest.mark.everywhere
def test_a_context_has_the_streams_that_its_policy_says() -> None:
    """One stream for each kind of work, or the very same object where the policy unites them."""

    def body() -> None:
        plain = FsdpContext()
        united = FsdpContext(runtime_policy=RuntimePolicy(overlap_allgather_reduction=False))
        outer = FsdpContext(runtime_policy=RuntimePolicy(overlap_outer_communication=True))

        assert plain.allgather_stream is not plain.inner_reduction_stream
        assert plain.outer_reduction_stream is plain.inner_reduction_stream
        assert united.allgather_stream is united.inner_reduction_stream
        assert outer.outer_reduction_stream is not outer.inner_reduction_stream

    alone(body)


def test_a_new_context_is_in_its_last_microbatch_and_not_finalized() -> None:
    """What users read before anything ran."""
    context = alone(FsdpContext)

    assert context.is_last_microbatch
    assert not context.is_finalized
    assert not context.is_recording_execution_order
    assert not context.use_symmetric_memory
    assert not context.caller_managed_grad_sync
    assert len(context.execution_order) == 0


def test_without_a_device_a_context_takes_the_cpu_where_there_is_no_gpu() -> None:
    """A simulated world has none."""
    assert alone(FsdpContext).device == torch.device("cpu")


@pytest.mark.everywhere
def test_without_a_device_a_context_takes_the_current_gpu() -> None:
    """By its index, so that a change of the current device moves nothing."""
    need_gpu()

    def body(_rank: int) -> bool:
        return FsdpContext().device == torch.device("cuda", torch.cuda.current_device())

    assert on_ranks(body, 1) == [True]


@pytest.mark.parametrize("device", ["meta", "mps"])
def test_a_device_that_cannot_compute_units_is_refused(device: str) -> None:
    """Only CPU and CUDA devices run units."""
    with pytest.raises(ConfigError, match=f"^a context needs a cpu or cuda device, got {device}; "):
        FsdpContext(device)


@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    """A simulated world hides CUDA, as a machine without a GPU has none."""

    def body() -> str:
        with pytest.raises(ConfigError) as caught:
            FsdpContext(device)
        return str(caught.value)

    assert alone(body) == (
        f"a context needs a device that this process has, got {device!r} and 0 CUDA devices; pass "
        "device='cpu', or use a PyTorch that is built for the GPUs of this machine"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": 7}, "a context needs a cpu or cuda device, got 7; name one, or leave it out"),
        (
            {"device": "gpu"},
            "a context needs a cpu or cuda device, got 'gpu'; name one, or leave it out",
        ),
        (
            {"runtime_policy": True},
            "runtime_policy must be a RuntimePolicy, got True; pass one of that type",
        ),
        (
            {"parameter_to_owner": [1]},
            "parameter_to_owner must be a dict, got [1]; pass one of that type",
        ),
        (
            {"prefetch_order": "recorded"},
            "prefetch_order must be a PrefetchOrder, got 'recorded'; pass one of that type",
        ),
    ],
)
def test_an_argument_of_another_type_is_refused(options: dict[str, Any], message: str) -> None:
    """The error names the argument and its type."""
    with pytest.raises(TypeError) as caught:
        FsdpContext(**options)

    assert isinstance(caught.value, ConfigError)
    assert str(caught.value) == message


def test_symmetric_memory_is_refused_by_name() -> None:
    """It is not built; nothing that was asked for is left out in silence."""
    with pytest.raises(ConfigError) as caught:
        FsdpContext("cpu", RuntimePolicy(use_symmetric_memory=True))

    assert isinstance(caught.value, NotImplementedError)
    assert str(caught.value) == "use_symmetric_memory is not built, got True; leave it False"


@pytest.mark.everywhere
def test_roots_and_names_are_known_from_finalize_on() -> None:
    """Before it nothing is a root, and names cannot be asked for."""

    def body() -> None:
        model = Tree()
        with fsdp_core.fully_shard_context() as context:
            fsdp_core.fully_shard(model.left, mesh_of(1), SHARDED)
            fsdp_core.fully_shard(model, mesh_of(1), SHARDED)

            assert not context.is_root(model)
            with pytest.raises(StateError):
                context.module_name(model)
        assert context.is_root(model)
        assert not context.is_root(model.left)
        assert context.module_name(model) == ""
        assert context.module_name(model.left) == "left"

    alone(body)


@pytest.mark.everywhere
def test_backward_enters_outer_units_before_inner_and_last_children_first() -> None:
    """Forward is the walk of the tree; backward is not its reverse."""

    def body() -> list[tuple[str, str]]:
        model = Tree()
        return events(shard(model, "left.inner", "left", "right", "", mesh=(1,)))

    assert alone(body) == [
        *((name, "forward") for name in ("", "left", "left.inner", "right")),
        *((name, "backward") for name in ("", "right", "left", "left.inner")),
    ]


@pytest.mark.everywhere
def test_walks_of_the_tree_stop_at_units_or_go_through_them() -> None:
    """Children are the nearest units below; the order of backward is of all, last children first."""
    model = Tree()
    left, inner, right = model.left, model.left.get_submodule("inner"), model.right
    units = {inner: None, left: None, right.get_submodule("a"): None}
    children: dict[nn.Module, None] = {}
    order: dict[nn.Module, None] = {}

    _collect_fsdp_children(model, units, children)
    _collect_backward_order(model, units, order)

    assert list(children) == [left, right.get_submodule("a")]
    assert list(order) == [right.get_submodule("a"), left, inner]


@pytest.mark.everywhere
def test_a_context_holds_roots_and_names_weakly_and_in_order() -> None:
    """By the names that tools written for the same interface read."""

    def body() -> None:
        first, second = Row("a"), Row("b")
        context = shard(nn.ModuleList([first, second]), "0.a", "0", "1.b", "1", mesh=(1,))

        assert list(context._roots) == [first, second]
        assert list(context._module_names.values()) == ["", "a", "", "b"]
        assert not context._post_backward_hook_registered
        del first, second
        assert list(context._roots) == []
        assert list(context._module_names) == []

    alone(body)


@pytest.mark.everywhere
def test_orders_of_several_roots_are_joined() -> None:
    """Roots forward as they were sharded, backward the other way round; names start at each."""

    def body() -> tuple[list[str], list[tuple[str, str]]]:
        first, second = Row("a"), Row("b")
        model = nn.ModuleList([first, second])
        context = shard(model, "0.a", "0", "1.b", "1", mesh=(1,))
        assert context.is_root(first)
        assert context.is_root(second)
        numbers = {id(first): "first", id(second): "second"}
        seen = [
            numbers.get(id(event.module), context.module_name(event.module))
            for event in context.execution_order
        ]
        return seen, events(context)

    assert alone(body)[0] == [
        *("first", "a", "second", "b"),
        *("second", "b", "first", "a"),
    ]


@pytest.mark.everywhere
def test_finalize_twice_and_registration_behind_it_are_refused() -> None:
    """Construction ends once."""

    def body() -> None:
        context = shard(model := linear(), "", mesh=(1,))

        with pytest.raises(StateError, match=r"^a context is finalized once"):
            context.finalize()
        assert isinstance(model, FsdpModule)
        with pytest.raises(StateError, match=r"^units must be registered inside the construction"):
            context.register_module(model, model.fsdp_unit)

    alone(body)


@pytest.mark.everywhere
def test_a_deleted_model_leaves_an_empty_order() -> None:
    """The context holds no module; its order and roots are empty then."""

    def body() -> None:
        context = shard(linear(), "", mesh=(1,))

        assert list(context.execution_order) == []
        context.reset()

    alone(body)


# ---------------------------------------------------------------------- completion


def test_two_roots_complete_in_one_callback() -> None:
    """However many roots a backward enters, the context completes once."""

    def build() -> nn.Module:
        return fill(Row(first=Row("a"), second=Row("b")))

    report = check_parity(Training(build, step, ("first", "second"), steps=2))

    assert [rank[1].stats["steps"] for rank in report.results] == [2, 2]


@pytest.mark.everywhere
def test_a_completion_hook_needs_a_running_backward() -> None:
    """Elsewhere nobody would call it."""

    def body() -> None:
        context = shard(linear(), "", mesh=(1,))

        with pytest.raises(StateError, match=r"^register_post_backward_hook needs a running"):
            context.register_post_backward_hook()

    alone(body)


@pytest.mark.everywhere
def test_a_reduction_that_nobody_would_wait_for_is_refused() -> None:
    """Outside a backward pass only a caller who manages synchronisation may reduce."""

    def body() -> None:
        context = shard(linear(), "", mesh=(1,))
        managed = shard(
            linear(), "", mesh=(1,), runtime_policy=RuntimePolicy(caller_managed_grad_sync=True)
        )

        managed.validate_grad_sync()
        with pytest.raises(StateError, match=r"^a reduction must be issued inside a backward pass"):
            context.validate_grad_sync()

    alone(body)


@pytest.mark.everywhere
def test_a_caller_who_manages_synchronisation_waits_by_hand() -> None:
    """Units come to rest by themselves; only the wait is left to the caller."""

    def body(rank: int) -> None:
        policy = RuntimePolicy(caller_managed_grad_sync=True)
        context = shard(model := fill(Row("a", "b")), "a", "b", "", runtime_policy=policy)
        step(model, rank, 0)

        assert_resting(model)
        assert context.has_unwaited_reductions
        context.finish_grad_sync()
        assert not context.has_unwaited_reductions

    on_ranks(body, 2)


@pytest.mark.everywhere
@pytest.mark.parametrize("use", ["step", "clip"])
def test_what_uses_gradients_waits_for_a_caller_who_did_not(use: str) -> None:
    """An optimizer's step and a clipped norm are behind all reductions by themselves."""

    def body(rank: int) -> None:
        policy = RuntimePolicy(caller_managed_grad_sync=True)
        context = shard(model := fill(Row("a", "b")), "a", "b", "", runtime_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        fsdp_core.fully_shard_optimizer(optimizer)
        step(model, rank, 0)
        assert context.has_unwaited_reductions
        if use == "step":
            optimizer.step()
        else:
            fsdp_core.clip_grad_norm_(model.parameters(), 1.0)
        assert not context.has_unwaited_reductions

    on_ranks(body, 2)


@pytest.mark.everywhere
def test_the_microbatch_flag_is_restored_even_by_exceptions() -> None:
    """Scopes nest, and each puts back what was before."""

    def body() -> None:
        context = shard(model := linear(), "", mesh=(1,))
        seen = []
        with fsdp_core.microbatch(context, is_last=False):
            with fsdp_core.microbatch(context, is_last=True):
                seen.append(context.is_last_microbatch)
            seen.append(context.is_last_microbatch)
            with pytest.raises(StateError), fsdp_core.microbatch(context, is_last=True):
                context.register_post_backward_hook()
            seen.append(context.is_last_microbatch)
        seen.append(context.is_last_microbatch)

        assert seen == [True, False, False, True]
        del model

    alone(body)


@pytest.mark.everywhere
def test_a_microbatch_needs_a_finalized_context() -> None:
    """Inside the construction scope there is no microbatch."""

    def body() -> None:
        with (
            fsdp_core.fully_shard_context() as context,
            pytest.raises(StateError, match=r"^a unit must not run inside the construction scope"),
            fsdp_core.microbatch(context, is_last=True),
        ):
            pass

    alone(body)


@pytest.mark.everywhere
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"context": 3}, "context must be a FsdpContext, got 3; pass one of that type"),
        ({"is_last": "no"}, "is_last must be a bool, got 'no'; pass one of that type"),
    ],
)
def test_a_microbatch_of_another_type_is_refused(arguments: dict[str, Any], message: str) -> None:
    """The word "no" would be true."""

    def body() -> str:
        with fsdp_core.fully_shard_context() as context:
            pass
        with (
            pytest.raises(TypeError) as caught,
            fsdp_core.microbatch(**({"context": context, "is_last": True} | arguments)),  # type: ignore[arg-type]
        ):
            pass
        return str(caught.value)

    assert alone(body) == message


@pytest.mark.everywhere
def test_a_microbatch_around_a_forward_alone_is_refused() -> None:
    """Its backward outside would read the wrong flag."""

    def body() -> None:
        context = shard(model := linear(), "", mesh=(1,))
        with (
            pytest.raises(StateError, match=r"^the backward of a microbatch must run inside its"),
            fsdp_core.microbatch(context, is_last=False),
        ):
            model(batch(0))

    alone(body)


@pytest.mark.everywhere
def test_a_last_microbatch_without_a_backward_completes_the_window() -> None:
    """What earlier ones reduced is brought to the optimizer even if the last used nothing."""

    def body(rank: int) -> Tensor:
        context = shard(model := fill(linear(4, 2)), "", placements=ZERO_1)
        with fsdp_core.microbatch(context, is_last=False):
            step(model, rank, 0)
        with fsdp_core.microbatch(context, is_last=True), torch.no_grad():
            model(batch(rank))
        rows = local_rows(model, grads=True)["weight"]
        assert rows is not None
        return rows

    rows = torch.cat(on_ranks(body, 2))

    expected = fill(linear(4, 2))
    for rank in range(2):
        step(expected, rank, 0)
    assert isinstance(expected.weight.grad, Tensor)
    assert torch.equal(rows, expected.weight.grad / 2)


# ---------------------------------------------------------------------- prefetch and counters


def train(units: Sequence[str], steps: int = 1, **options: Any) -> list[ContextStats]:
    """Train a row of three layers on two ranks; return rank 0's counters after each step."""
    training = Training(lambda: fill(Row("a", "b", "c")), step, units, steps, options=options)
    report = check_parity(training)
    return [ContextStats(**each.stats) for each in report.results[0]]


def test_counters_count_what_was_done() -> None:
    """Each unit is gathered once forward and once backward, and reduced once; one is on demand."""
    first, second = train(("a", "b", "c", ""), steps=2)

    assert (first.steps, second.steps) == (1, 2)
    assert (first.gathers, second.gathers) == (6, 12)
    assert (first.reductions, second.reductions) == (3, 6)
    assert (first.prefetches, first.used_prefetches, first.unused_prefetches) == (6, 6, 0)
    assert (second.prefetches, second.used_prefetches, second.unused_prefetches) == (12, 12, 0)
    assert first.on_demand_gathers == 0
    assert first.full_nbytes == 0
    # Two units of 4 fp32 weights at a time: the current one and the prefetched one.
    assert first.peak_full_nbytes == 2 * 4 * 4


class TwoDtypes(nn.Module):
    """An fp32 layer and an fp64 one."""

    def __init__(self) -> None:
        super().__init__()
        self.single, self.double_ = linear(), linear().double()

    def forward(self, x: Tensor) -> Tensor:
        """Call both."""
        y: Tensor = self.double_(self.single(x).double())
        return y


@pytest.mark.everywhere
def test_each_dtype_of_a_unit_is_counted() -> None:
    """They are collectives of their own, and gathered on demand together."""

    def body(rank: int) -> tuple[int, int, int]:
        policy = MixedPrecisionPolicy(main_params_dtype=None)
        context = shard(model := fill(TwoDtypes()), "", mixed_precision_policy=policy)
        loss_of(model(batch(rank)), rank).backward()
        stats = context.stats
        return stats.gathers, stats.on_demand_gathers, stats.reductions

    # Gathered forward and backward, reduced once.
    assert on_ranks(body, 2) == [(4, 2, 2)] * 2


@pytest.mark.everywhere
def test_bytes_of_full_weights_are_counted_while_they_exist() -> None:
    """From a unit's gather to its end; the highest value stays."""

    def body(_rank: int) -> list[tuple[int, int]]:
        stats = shard(model := fill(Row("a", "b")), "a", "b", "").stats
        seen = []
        for verb in ("unshard", "reshard"):
            for name in ("a", "b"):
                getattr(model.get_submodule(name), verb)()
                seen.append((stats.full_nbytes, stats.peak_full_nbytes))
        return seen

    # A unit has 4 fp32 weights.
    assert on_ranks(body, 2) == [[(16, 16), (32, 32), (16, 32), (0, 32)]] * 2


def test_without_a_budget_every_gather_is_on_demand() -> None:
    """A budget of 0 issues none early."""
    policy = SchedulePolicy(forward_prefetch_size=0, backward_prefetch_size=0)
    (stats,) = train(("a", "b", "c", ""), schedule_policy=policy)

    assert (stats.prefetches, stats.on_demand_gathers) == (0, 6)
    assert stats.peak_full_nbytes == 4 * 4


@pytest.mark.parametrize(("budget", "ahead"), [(1, 1), (4, 1), (5, 2), (100, 2)])
def test_a_budget_counts_elements_and_may_overshoot_by_its_last_unit(
    budget: int, ahead: int
) -> None:
    """Units are gathered early as long as those counted so far stay below the budget."""
    policy = SchedulePolicy(forward_prefetch_size=budget, backward_prefetch_size=0)
    training = Training(
        lambda: fill(Row("a", "b", "c")), step, ("a", "b", "c"), options={"schedule_policy": policy}
    )
    ops = ops_by_step(check_parity(training))[0]

    # All three are roots: each gathers what follows in the order.
    names = gathered(ops)
    first_use = next(
        i for i, op in enumerate(ops) if op.name == "fsdp_core::forward <root> (root 1)"
    )
    before = gathered(ops[:first_use])
    assert len(before) == 1 + ahead
    assert names[0] == "<root> (root 0)"


@pytest.mark.everywhere
def test_evaluation_gathers_within_its_root_and_moves_no_cursor() -> None:
    """A forward without gradients leaves everything at rest, whatever was prefetched."""

    def body(rank: int) -> None:
        context = shard(model := fill(Row("a", "b", "c")), "a", "b", "c", "")
        with torch.no_grad():
            model(batch(rank))
            model(batch(rank), calls=("a", "b"))

        assert_resting(model)
        assert context.execution_order.position == 0
        assert context.stats.unused_prefetches == 1

    on_ranks(body, 2)


@pytest.mark.everywhere
def test_a_deviation_is_warned_of_once_for_each_change_of_order() -> None:
    """The warning names step, expected and actual unit; repeating the deviation is silent."""

    def body(rank: int) -> list[str]:
        context = shard(model := fill(Row("a", "b", "c")), "a", "b", "c", "")
        seen = []
        for skip in (False, True, True, False, True):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                calls = ("a", "c") if skip else None
                loss_of(model(batch(rank), calls=calls), rank).backward()
            seen.append([str(each.message) for each in caught])
        assert context.stats.steps == 5
        return [message for messages in seen for message in messages]

    messages = on_ranks(body, 2)[0]

    start = "unit 'b' was expected to enter its forward next, got the forward of 'c'"
    assert [each.split("; ")[0] for each in messages] == [f"step 1: {start}", f"step 4: {start}"]


@pytest.mark.parametrize("order", PrefetchOrder)
def test_a_unit_of_modules_far_apart_is_gathered_ahead_of_each_in_either_order(
    order: PrefetchOrder,
) -> None:
    """Forward keeps it from its first module to its last; backward gathers it for each."""
    names = ("a", "b", "c", "d")
    training = Training(
        lambda: fill(Row(*names)),
        step,
        (("a", "d"), "b", "c", ""),
        steps=2,
        options={"prefetch_order": order},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = check_parity(training)

    forward, backward = ["a+d", "b", "c"], ["a+d", "c", "b", "a+d"]
    assert gathered(ops_by_step(report)[1]) == forward + backward
    assert report.results[0][1].stats["unused_prefetches"] == 0


def test_a_unit_of_neighbours_gathers_the_unit_behind_them_while_the_first_runs() -> None:
    """Its own further events are passed over: it is there already."""
    training = Training(lambda: fill(Row("a", "b", "c")), step, (("a", "b"), "c", ""))
    (ops,) = ops_by_step(check_parity(training))

    names = [op.name for op in ops if op.name.startswith("fsdp_core::")]
    entered = [i for i, name in enumerate(names) if name == "fsdp_core::forward a+b"]
    assert entered[0] < names.index("fsdp_core::unshard c") < entered[1]


@pytest.mark.everywhere
def test_a_module_of_a_unit_of_several_that_is_not_called_is_not_missed() -> None:
    """No warning: nothing is wasted, the unit was gathered for the others."""

    def body(rank: int) -> None:
        shard(model := fill(Row("a", "b", "c")), ("a", "b"), "c", "")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss_of(model(batch(rank), calls=("a", "c")), rank).backward()

    on_ranks(body, 2)


@pytest.mark.everywhere
def test_a_unit_of_several_modules_that_is_skipped_is_missed() -> None:
    """Where none of them is called, as a unit of one module is; once for each change of order."""

    def body(rank: int) -> list[str]:
        shard(model := fill(Row("a", "b", "c", "d")), "a", ("b", "c"), "d", "")
        seen = []
        for calls in (("a", "d"), ("a", "d"), ("a", "b", "d"), ("a", "c", "d"), "abcd"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loss_of(model(batch(rank), calls=calls), rank).backward()
            seen.append(" ".join(str(each.message) for each in caught)[:80])
        return seen

    warned = (
        "step 0: unit 'b+c' was expected to enter its forward next, got the forward of 'd'; pref"
    )
    assert on_ranks(body, 2) == [[warned[:80], "", "", "", ""]] * 2


# ---------------------------------------------------------------------- recorded passes


RECORDED: dict[str, Any] = {"prefetch_order": PrefetchOrder.RECORDED}


def test_a_recorded_pass_is_gathered_on_demand_and_then_ahead() -> None:
    """The first pass issues nothing early; later ones prefetch each occurrence's successor."""
    training = Training(
        lambda: fill(Row("a", "b")),
        lambda model, rank, number: loss_of(
            model(batch(rank, number), calls=("a", "b", "a")), rank
        ).backward(),
        ("a", "b", ""),
        steps=3,
        options=RECORDED,
    )
    stats = [ContextStats(**each.stats) for each in check_parity(training).results[0]]

    assert stats[0].prefetches == 0
    assert stats[1].prefetches > 0
    assert stats[2].unused_prefetches == 0
    assert stats[2].prefetches - stats[1].prefetches == stats[1].prefetches


@pytest.mark.everywhere
def test_a_recorded_pass_tells_the_modules_of_one_unit_apart() -> None:
    """The error names the module that was expected, and the one that was called."""

    def body(rank: int) -> None:
        shard(model := fill(Row("a", "b")), ("a", "b"), "", **RECORDED)
        loss_of(model(batch(rank)), rank).backward()
        with pytest.raises(
            StateError,
            match=r"got a\+b \(module 'b'\) forward at .*, expected a\+b \(module 'a'\) forward",
        ):
            model(batch(rank), calls=("b", "a"))

    on_ranks(body, 2)


@pytest.mark.everywhere
def test_a_recorded_pass_repeats_a_shared_unit_in_each_microbatch() -> None:
    """Each occurrence is an event of its own; three microbatches go through the pass three times."""
    calls = ("first", "second", "second")

    def window(model: nn.Module, rank: int, number: int) -> None:
        for micro in range(3):
            loss = loss_of(model(batch(rank, number), calls=calls), rank)
            if isinstance(model, FsdpModule):
                with fsdp_core.microbatch(model.context, is_last=micro == 2):
                    loss.backward()
                assert events(model.context) == [
                    *((name, "forward") for name in ("", *calls)),
                    *((name, "backward") for name in ("", *reversed(calls))),
                ]
            else:
                loss.backward()

    check_values(
        Training(
            lambda: fill(Row("first", "second")),
            window,
            ("first", "second", ""),
            steps=2,
            options=RECORDED,
        )
    )


def test_what_is_gathered_ahead_stays_for_the_second_use_of_a_unit() -> None:
    """Two summed forwards: their backward enters each unit twice, and gathers it once for each."""

    def summed(model: nn.Module, rank: int, number: int) -> None:
        first, second = model(batch(rank, number)), model(batch(rank, number + 1))
        loss_of(first + second, rank).backward()

    policy = SchedulePolicy(forward_prefetch_size=9, backward_prefetch_size=9)
    options = {**RECORDED, "schedule_policy": policy}
    training = Training(
        lambda: fill(Row("a", "b", "c")), summed, ("a", "b", "c", ""), steps=2, options=options
    )
    report = check_parity(training)

    assert sorted(gathered(ops_by_step(report)[1])) == sorted(("a", "b", "c") * 4)
    assert report.results[0][1].stats["unused_prefetches"] == 0


@pytest.mark.everywhere
def test_recording_ends_with_the_first_completed_backward() -> None:
    """Forwards without one record on; evaluation takes no part."""

    def body(rank: int) -> None:
        context = shard(model := fill(Row("a", "b")), "a", "b", "", **RECORDED)
        before = context.is_recording_execution_order
        with torch.no_grad():
            model(batch(rank))
        assert len(context.execution_order) == 0
        step(model, rank, 0)

        assert (before, context.is_recording_execution_order) == (True, False)
        assert events(context) == [
            *(("", "forward"), ("a", "forward"), ("b", "forward")),
            *(("", "backward"), ("b", "backward"), ("a", "backward")),
        ]
        assert context.execution_order.position == 0

    on_ranks(body, 2)


def recorded(rank: int) -> tuple[FsdpContext, nn.Module]:
    """A row of two units that has recorded one pass."""
    context = shard(model := fill(Row("a", "b")), "a", "b", "", **RECORDED)
    step(model, rank, 0)
    return context, model


@pytest.mark.everywhere
def test_a_pass_unlike_the_recorded_one_is_refused_before_a_gather() -> None:
    """The error has position, expected and actual event, and the last ones before."""

    def body(rank: int) -> None:
        context, model = recorded(rank)
        on_demand = context.stats.on_demand_gathers
        with pytest.raises(StateError) as caught:
            model(batch(rank), calls=("b", "a"))

        assert str(caught.value) == (
            "step 1: a pass must repeat the recorded one, got b forward at position 1 of 6, "
            "expected a forward; before it came [<root> forward]; call context.reset() and repeat "
            "the recorded pass, or use REGISTRATION; run validation under torch.no_grad()"
        )
        assert caught.value.fqn == "b"
        assert context.stats.on_demand_gathers == on_demand
        assert_resting(model)

    on_ranks(body, 2)


@pytest.mark.everywhere
def test_a_second_backward_in_a_recorded_pass_is_refused() -> None:
    """Two losses one after the other cannot be repeated; the error says what can."""

    def body(rank: int) -> None:
        _, model = recorded(rank)
        loss = loss_of(model(batch(rank)), rank)
        loss.backward(retain_graph=True)
        with pytest.raises(StateError, match=r"^step 2: RECORDED needs one backward call per pass"):
            loss.backward()

    on_ranks(body, 2)


@pytest.mark.everywhere
def test_a_recorded_pass_that_ends_early_is_refused() -> None:
    """A pass must repeat all of the recorded one."""

    def body(rank: int) -> None:
        _, model = recorded(rank)
        model.get_submodule("a").register_forward_hook(lambda _module, _args, y: y.detach())
        loss = loss_of(model(batch(rank)), rank)
        expected = r"^step 1: a pass must repeat the recorded one, got its end at position 5 of 6,"
        with pytest.raises(StateError, match=expected):
            loss.backward()
        assert_resting(model)

    on_ranks(body, 2)


@pytest.mark.everywhere
def test_a_forward_that_raised_is_taken_back_from_the_recording() -> None:
    """The retried pass is what is recorded, and later passes repeat it."""

    class Fails(nn.Module):
        """Raises when told to."""

        fails = True

        def forward(self, x: Tensor) -> Tensor:
            """Pass x through, or raise."""
            if self.fails:
                raise RuntimeError("planned")
            return x

    def body(rank: int) -> list[tuple[str, str]]:
        model = fill(Row(a=linear(), fails=Fails()))
        context = shard(model, "a", "", mesh=(1,), **RECORDED)
        with pytest.raises(RuntimeError, match=r"^planned$"):
            model(batch(rank))
        model.get_submodule("fails").fails = False  # type: ignore[assignment]
        step(model, rank, 0)
        step(model, rank, 1)
        return events(context)

    expected = [("", "forward"), ("a", "forward"), ("", "backward"), ("a", "backward")]
    assert on_ranks(body, 1) == [expected]


def test_ranks_that_recorded_different_passes_all_raise_the_same_error() -> None:
    """The first position that differs, and what each rank ran there; then recording goes on."""

    def body(rank: int) -> str:
        context = shard(model := fill(Row("a", "b")), "a", "b", **RECORDED)
        calls = ("a", "b") if rank == 0 else ("b", "a")
        with pytest.raises(StateError) as caught:
            loss_of(model(batch(rank), calls=calls), rank).backward()
        assert context.is_recording_execution_order
        return str(caught.value)

    import fsdp_sim

    report = fsdp_sim.simulate(body, 2, checkers=("races",), strict=False)
    assert report.results[0] == report.results[1]
    assert report.results[0] == (
        "all ranks must run the same pass under RECORDED, got a difference at position 0: rank 0: "
        "<root> (root 0) forward, rank 1: <root> (root 1) forward; make the order of calls the "
        "same on all ranks"
    )


@pytest.mark.everywhere
def test_hooks_cannot_be_left_out_under_recorded() -> None:
    """Nobody would say when such a unit runs."""

    def body() -> None:
        with fsdp_core.fully_shard_context(**RECORDED), pytest.raises(ConfigError) as caught:
            fsdp_core.fully_shard(
                linear(), mesh_of(1), SHARDED, schedule_policy=SchedulePolicy(register_hooks=False)
            )
        assert str(caught.value).startswith("PrefetchOrder.RECORDED needs the hooks of every unit")

    alone(body)


# ---------------------------------------------------------------------- recovery


class Breaks(nn.Module):
    """Raises in backward when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        """Return x, with a hook on its gradient."""
        y = x * 1
        if y.requires_grad:
            y.register_hook(self._hook)
        return y

    def _hook(self, _grad: Tensor) -> None:
        if self.fails:
            raise RuntimeError("planned")


@pytest.mark.everywhere
@pytest.mark.parametrize("order", [PrefetchOrder.REGISTRATION, PrefetchOrder.RECORDED])
@pytest.mark.parametrize("by_hand", [False, True])
def test_the_step_after_a_broken_backward_has_parity(
    *, order: PrefetchOrder, by_hand: bool
) -> None:
    """By reset(), or by the next forward, which warns; gradients of the broken pass are gone."""

    def broken_step(model: nn.Module, rank: int, number: int) -> None:
        if number == 1 and isinstance(first := model.get_submodule("a"), FsdpModule):
            context, breaks = first.context, model.get_submodule("breaks")
            breaks.fails = True  # type: ignore[assignment]
            with pytest.raises(RuntimeError, match=r"^planned$"):
                step(model, rank, 0)
            breaks.fails = False  # type: ignore[assignment]
            if by_hand:
                context.reset()
                assert context.parameters_without_grad() == ["a.weight", "c.weight"]
                step(model, rank, number)
            else:
                with pytest.warns(
                    UserWarning, match=r"^the last backward pass of this FsdpContext"
                ):
                    step(model, rank, number)
        else:
            step(model, rank, number)

    def build() -> nn.Module:
        return fill(Row(a=linear(), breaks=Breaks(), c=linear()))

    training = Training(
        build, broken_step, ("a", "c", ""), steps=3, options={"prefetch_order": order}
    )
    check_values(training)


@pytest.mark.everywhere
def test_a_reset_waits_for_the_reductions_of_the_broken_pass() -> None:
    """Who kept a gradient of it may read what it holds."""

    def body(rank: int) -> list[Tensor]:
        breaks = Breaks()
        context = shard(model := fill(Row(breaks=breaks, c=linear())), "c")
        breaks.fails = True
        with pytest.raises(RuntimeError, match=r"^planned$"):
            loss_of(model(batch(rank).requires_grad_()), rank).backward()
        kept = model.get_parameter("c.weight").grad
        context.reset()
        assert isinstance(kept, DTensor)
        return [kept.to_local().clone()]

    def whole() -> Tensor:
        model = fill(Row(breaks=Breaks(), c=linear()))
        for rank in range(2):
            loss_of(model(batch(rank)), rank).backward()
        grad = model.get_parameter("c.weight").grad
        assert grad is not None
        return grad / 2

    rows = [kept for (kept,) in on_ranks(body, 2)]

    assert torch.equal(torch.cat(rows), unsharded(whole))


@pytest.mark.everywhere
@pytest.mark.parametrize("at", range(5))
def test_the_step_after_a_collective_that_raised_has_parity(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of a step it is: two gathers forward, one more backward, two reductions."""
    left: dict[int, int] = {}

    def raising(collective: Callable[..., None]) -> Callable[..., None]:
        def raise_once(*args: Any) -> None:
            rank = dist.get_rank()
            if rank in left:
                left[rank] -= 1
                if left[rank] < 0:
                    del left[rank]
                    raise RuntimeError("planned")
            collective(*args)

        return raise_once

    def broken_step(model: nn.Module, rank: int, number: int) -> None:
        if number == 1 and isinstance(first := model.get_submodule("a"), FsdpModule):
            left[rank] = at
            with pytest.raises(RuntimeError, match=r"^planned$"):
                step(model, rank, 0)
            first.context.reset()
        step(model, rank, number)

    for name in ("all_gather_single", "reduce_scatter_single"):
        monkeypatch.setattr(collectives, name, raising(getattr(collectives, name)))
    check_values(Training(lambda: fill(Row("a", "b")), broken_step, ("a", "b", ""), steps=3))


@pytest.mark.everywhere
def test_parameters_without_gradients_are_listed_by_name() -> None:
    """Frozen ones are not missed."""

    def body(rank: int) -> None:
        model = fill(Row("a", "b"))
        model.get_submodule("b").requires_grad_(False)
        context = shard(model, "a", "b", "")
        assert context.parameters_without_grad() == ["a.weight"]
        step(model, rank, 0)
        assert context.parameters_without_grad() == []

    on_ranks(body, 2)


@pytest.mark.everywhere
def test_a_unit_is_in_its_forward_phase_in_a_forward_hook_and_rests_between_passes() -> None:
    """The public property says what a unit is doing."""

    def body(rank: int) -> None:
        shard(model := fill(Row("a")), "a", "")
        a = model.get_submodule("a")
        assert isinstance(a, FsdpModule)
        seen: list[Phase] = []
        a.register_forward_hook(lambda *_: seen.append(a.phase))
        step(model, rank, 0)

        assert seen == [Phase.FORWARD]
        assert a.phase is Phase.RESTING

    on_ranks(body, 2)
