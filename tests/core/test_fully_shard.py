"""fully_shard: every strategy against the unsharded run; what it refuses, changing nothing."""

import itertools
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_core
from fsdp_core import (
    BlockAtomic,
    ConfigError,
    FsdpModule,
    MixedPrecisionPolicy,
    Placements,
    RuntimePolicy,
    StateError,
    TensorAtomic,
)
from tests.cases.programs import (
    SHARDED,
    Row,
    Training,
    assert_equal,
    batch,
    check_values,
    fill,
    integers,
    linear,
    local_rows,
    loss_of,
    mesh_of,
    shard,
)
from tests.core.worlds import device_type, on_ranks, world_size

R, P, S = Replicate(), Partial("avg"), Shard(0)
STRATEGIES: dict[str, tuple[tuple[Placement, ...], ...]] = {
    "no_shard": ((R,), (P,), (R,)),
    "zero_1": ((R,), (P,), (S,)),
    "zero_2": ((R,), (S,), (S,)),
    "zero_3": ((S,), (S,), (S,)),
    "no_shard_2d": ((R, R), (P, P), (R, R)),
    "hsdp": ((R, S), (P, S), (R, S)),
    "hfsdp": ((R, S), (P, S), (S, S)),
    "zero_1_outer_zero_2_inner": ((R, R), (P, S), (S, S)),
    "all_sharded_2d": ((S, S), (S, S), (S, S)),
}


def placements_of(name: str) -> Placements:
    """The placements of a strategy on all axes of its mesh."""
    roles = STRATEGIES[name]
    return Placements(tuple(range(len(roles[0]))), *roles)


def mesh_shape(name: str) -> tuple[int, ...]:
    """Four ranks, or as many as there are, on as many axes as the strategy has."""
    size = world_size(4)
    outer = 2 if size % 2 == 0 else 1
    return (size,) if len(STRATEGIES[name][0]) == 1 else (outer, size // outer)


def reference(
    build: Callable[[], nn.Module], world_size: int, steps: int, microbatches: int
) -> dict[str, Tensor]:
    """The weights of the unsharded run: each rank's batches in turn, gradients averaged."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for number in range(steps):
        for micro in range(microbatches):
            for rank in range(world_size):
                y = model(batch(rank, number * microbatches + micro))
                (loss_of(y, rank) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: each.detach() for name, each in model.named_parameters()}


# ---------------------------------------------------------------------- strategies


@pytest.mark.everywhere
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_trains_as_the_unsharded_model(
    name: str, microbatches: int, *, set_to_none: bool
) -> None:
    """Two steps, accumulated or not, whichever way gradients are zeroed: the same bits."""

    def body(rank: int) -> dict[str, Tensor | None]:
        model = fill(nn.Sequential(linear(5, 2), linear(2, 5)))
        context = shard(model, "0", "1", "", mesh=mesh_shape(name), placements=placements_of(name))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        fsdp_core.fully_shard_optimizer(optimizer)
        for number in range(2):
            for micro in range(microbatches):
                with fsdp_core.microbatch(context, is_last=micro == microbatches - 1):
                    y = model(batch(rank, number * microbatches + micro))
                    loss_of(y, rank).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return whole_by_name(model)

    def build() -> nn.Module:
        return fill(nn.Sequential(linear(5, 2), linear(2, 5)))

    expected = reference(build, world_size(4), 2, microbatches)
    for weights in on_ranks(body, world_size(4)):
        assert_equal(weights, dict(expected))


@pytest.mark.everywhere
@pytest.mark.parametrize("parameter", [R, S, P, BlockAtomic(2), TensorAtomic()], ids=repr)
def test_placements_that_are_not_refused_train_as_unsharded(parameter: Placement) -> None:
    """Whatever the three roles are on one axis: refused when they are said, or the right bits."""
    kinds = (R, S, P, Partial("sum"), BlockAtomic(2), TensorAtomic())
    expected = reference(lambda: fill(linear(6, 2)), 2, 1, 1)
    for gradient, optimizer in itertools.product(kinds, kinds):
        try:
            placements = Placements((0,), (parameter,), (gradient,), (optimizer,))
        except ConfigError:
            continue
        step = partial(one_step, placements=placements)
        for weights in on_ranks(step, 2):
            assert_equal(weights, dict(expected))


def one_step(rank: int, placements: Placements) -> dict[str, Tensor | None]:
    """One step of one layer with SGD; the second rank owns it where it stays whole."""
    model = fill(linear(6, 2))
    shard(model, "", placements=placements, parameter_to_owner={model.get_parameter("weight"): 1})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    fsdp_core.fully_shard_optimizer(optimizer)
    loss_of(model(batch(rank)), rank).backward()
    optimizer.step()
    return whole_by_name(model)


def whole_by_name(model: nn.Module) -> dict[str, Tensor | None]:
    """All parameters, whole, by their names in the model."""
    tensors = {}
    for prefix, module in model.named_modules():
        if isinstance(module, FsdpModule):
            for name, tensor in whole_of_unit(module).items():
                tensors[f"{prefix}.{name}" if prefix else name] = tensor
    return tensors


def whole_of_unit(module: FsdpModule) -> dict[str, Tensor | None]:
    """The parameters of one unit, whole."""
    tensors: dict[str, Tensor | None] = {}
    for group in module.fsdp_unit.groups:
        full = group.gather_main_weight()
        for index, member in enumerate(group.members):
            tensors[member.fqn] = full.get_tensor_view(index)
    return tensors


@pytest.mark.everywhere
@pytest.mark.parametrize("name", STRATEGIES)
def test_two_last_backwards_add_up(name: str) -> None:
    """Backwards that are both flagged last, without zero_grad between, lose nothing."""

    def body(rank: int) -> list[Tensor]:
        model = linear()
        shard(model, "", mesh=mesh_shape(name), placements=placements_of(name))
        for _ in range(2):
            (model(torch.ones(1, 2)) * (rank + 1)).sum().backward()
        assert isinstance(model, FsdpModule)
        full = model.fsdp_unit.groups[0].final_grad.redistribute([R] * len(mesh_shape(name)))
        return [full.get_tensor_view(0)]

    # The mean over ranks of rank + 1, twice: world + 1.
    for (grad,) in on_ranks(body, world_size(4)):
        assert torch.equal(grad, torch.full((2, 2), world_size(4) + 1.0))


@pytest.mark.everywhere
@pytest.mark.parametrize("name", STRATEGIES)
def test_two_backwards_of_which_none_is_last_add_up(name: str) -> None:
    """What earlier microbatches left is shown as gradients, not yet reduced over partial axes."""

    def body(rank: int) -> Tensor:
        model = linear()
        context = shard(model, "", mesh=mesh_shape(name), placements=placements_of(name))
        for _ in range(2):
            with fsdp_core.microbatch(context, is_last=False):
                (model(torch.ones(1, 2)) * (rank + 1)).sum().backward()
        context.finish_grad_sync()  # nobody waits by himself before the last one
        grad = model.weight.grad
        assert isinstance(grad, DTensor)
        assert grad.placements == STRATEGIES[name][1]
        # One copy of each element for each coordinate of the axes that are not sharded.
        mesh = mesh_shape(name)
        copies = prod(n for n, p in zip(mesh, grad.placements, strict=True) if p != S)
        return grad.to_local().sum() / copies

    # The mean over ranks of rank + 1, twice, in each of four elements.
    assert sum(on_ranks(body, world_size(4))) == 4 * (world_size(4) + 1)


@pytest.mark.everywhere
def test_an_outer_unit_owns_what_the_inner_one_does_not() -> None:
    """Names are relative to the unit; an outer unit without parameters of its own has no group."""

    class Outer(nn.Module):
        """A layer, and a bias beside it."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()
            self.bias = nn.Parameter(torch.ones(2))

    def body(_rank: int) -> list[list[str]]:
        model = Row(outer=Outer())
        shard(model, "outer.inner", "outer", "", mesh=(1,))
        units = [model.get_submodule(name) for name in ("outer.inner", "outer", "")]
        owned = []
        for module in units:
            assert isinstance(module, FsdpModule)
            owned.append([member.fqn for g in module.fsdp_unit.groups for member in g.members])
        return owned

    assert on_ranks(body, 1) == [[["weight"], ["bias"], []]]


@pytest.mark.everywhere
def test_frozen_parameters_have_a_group_without_gradients() -> None:
    """Beside that of the trainable ones; they get no buffer to reduce into."""

    def body(rank: int) -> list[tuple[list[str], bool]]:
        model = fill(Row("a", "b"))
        model.get_submodule("b").requires_grad_(False)
        shard(model, "")
        loss_of(model(batch(rank)), rank).backward()
        assert isinstance(model, FsdpModule)
        return [
            ([member.fqn for member in group.members], group._main_grad is not None)
            for group in model.fsdp_unit.groups
        ]

    assert on_ranks(body, 2) == [[(["a.weight"], True), (["b.weight"], False)]] * 2


class Casts(TorchDispatchMode):
    """Counts copies from fp32 to bf16."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count what casts, and run it."""
        if func is torch.ops.aten.copy_.default:
            self.count += (args[0].dtype, args[1].dtype) == (torch.bfloat16, torch.float32)
        return func(*args, **(kwargs or {}))


@pytest.mark.everywhere
@pytest.mark.parametrize("name", ["zero_1", "zero_2"])
def test_whole_weights_are_cast_and_gathered_once_for_each_step_of_the_optimizer(name: str) -> None:
    """Three steps of three microbatches: three casts and three gathers, not nine."""

    def body(rank: int) -> tuple[int, int]:
        model = fill(linear(4, 2))
        policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
        placements = placements_of(name)
        context = shard(model, "", placements=placements, mixed_precision_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        fsdp_core.fully_shard_optimizer(optimizer)
        with Collectives() as collectives, Casts() as casts:
            for _ in range(3):
                for micro in range(3):
                    with fsdp_core.microbatch(context, is_last=micro == 2):
                        model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return casts.count, collectives.counts["all-gather"]

    assert on_ranks(body, 2) == [(3, 3)] * 2


class Collectives(TorchDispatchMode):
    """Counts the collectives of this rank, by kind."""

    KINDS = {  # noqa: RUF012 - nobody changes it
        "_allgather_base_": "all-gather",
        "_reduce_scatter_base_": "reduce-scatter",
        "allreduce_": "all-reduce",
    }

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = dict.fromkeys(self.KINDS.values(), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count what is a collective, and run it."""
        if func.namespace == "c10d":
            self.counts[self.KINDS[func.__name__.removesuffix(".default")]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.everywhere
@pytest.mark.parametrize(
    ("name", "gathers", "scatters", "reductions"),
    [
        ("no_shard", 0, 0, 1),
        ("zero_1", 1, 1, 0),
        ("zero_2", 1, 3, 0),
        ("zero_3", 6, 3, 0),
        ("no_shard_2d", 0, 0, 2),
        ("hsdp", 6, 3, 1),
        ("hfsdp", 7, 4, 0),
        ("zero_1_outer_zero_2_inner", 2, 4, 0),
        ("all_sharded_2d", 12, 6, 0),
    ],
)
def test_collectives_of_a_window_of_three_microbatches(
    name: str, gathers: int, scatters: int, reductions: int
) -> None:
    """What each strategy exchanges for one unit in one step, by kind, and no more."""

    def body(rank: int) -> dict[str, int]:
        model = fill(linear(4, 2))
        context = shard(model, "", mesh=mesh_shape(name), placements=placements_of(name))
        with Collectives() as collectives:
            for micro in range(3):
                with fsdp_core.microbatch(context, is_last=micro == 2):
                    loss_of(model(batch(rank)), rank).backward()
        return collectives.counts

    expected = {"all-gather": gathers, "reduce-scatter": scatters, "all-reduce": reductions}
    assert on_ranks(body, world_size(4)) == [expected] * world_size(4)


@pytest.mark.everywhere
@pytest.mark.parametrize("policy", [{}, {"overlap_outer_communication": True}])
def test_the_outer_reduction_may_have_a_stream_of_its_own(policy: dict[str, bool]) -> None:
    """The values are the same, and nothing is unordered."""

    def build() -> nn.Module:
        return fill(Row("a", "b"))

    check_values(
        Training(
            build,
            lambda model, rank, number: loss_of(model(batch(rank, number)), rank).backward(),
            ("a", "b", ""),
            steps=2,
            mesh=mesh_shape("hsdp"),
            options={"runtime_policy": RuntimePolicy(**policy)},
        )
    )


@pytest.mark.everywhere
def test_a_divisor_divides_each_contribution_once() -> None:
    """On top of the mean, and not again what was accumulated before."""

    def body(rank: int) -> Tensor:
        model = linear()
        context = shard(model, "", grad_divisor=4)
        for is_last in (False, True):
            with fsdp_core.microbatch(context, is_last=is_last):
                (model(torch.ones(1, 2)) * 8 * (rank + 1)).sum().backward()
        grad = local_rows(model, grads=True)["weight"]
        assert grad is not None
        return grad

    # The mean of 8 and 16 over a divisor of 4, twice.
    assert torch.equal(torch.cat(on_ranks(body, 2)), torch.full((2, 2), 6.0))


@pytest.mark.everywhere
def test_experts_on_a_sub_mesh_train_as_on_one_process() -> None:
    """Two experts, each on two of four ranks, see the tokens of all; the dense layer is on all.

    An expert sums the gradients of its tokens from all ranks, so the mean over its two ranks is
    divided by two once more.
    """

    def tokens(rank: int) -> Tensor:
        return integers(2, 2, start=rank)

    def body(rank: int) -> tuple[Tensor, Tensor, int]:
        mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("expert_dp", "ep"))
        expert_rank = rank % 2
        model = nn.ModuleDict({"dense": linear(), "expert": linear()})
        fill(model["dense"])
        with torch.no_grad():
            model["expert"].get_parameter("weight").copy_(integers(2, 2, start=expert_rank + 3))
        with fsdp_core.fully_shard_context():
            fsdp_core.fully_shard(model["dense"], mesh_of(4), SHARDED)
            fsdp_core.fully_shard(model["expert"], mesh["expert_dp"], SHARDED, grad_divisor=2)
        y = model["dense"](tokens(rank))
        # Token 0 goes to expert 0, token 1 to expert 1; both ranks of a pair exchange them.
        sent = Exchange.apply(y, mesh["ep"].get_group())  # type: ignore[no-untyped-call]
        model["expert"](sent).sum().backward()
        dense, expert = (local_rows(model[each], grads=True)["weight"] for each in model)
        assert dense is not None
        assert expert is not None
        return dense, expert, expert_rank

    results = on_ranks(body, 4)

    dense = fill(linear())
    experts = [linear(), linear()]
    for number, expert in enumerate(experts):
        with torch.no_grad():
            expert.weight.copy_(integers(2, 2, start=number + 3))
    for rank in range(4):
        y = dense(tokens(rank))
        loss = experts[0](y[:1]).sum() + experts[1](y[1:]).sum()
        (loss / 4).backward()
    dense_grad = dense.get_parameter("weight").grad
    assert dense_grad is not None
    assert torch.equal(torch.cat([grad for grad, _, _ in results]), dense_grad)
    for number, expert in enumerate(experts):
        rows = [grad for _, grad, expert_rank in results if expert_rank == number]
        assert expert.weight.grad is not None
        assert torch.equal(torch.cat(rows), expert.weight.grad)


class Exchange(torch.autograd.Function):
    """Bring token t of both ranks of a pair to rank t; gradients go back."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, pair: Any) -> Tensor:
        """Exchange rows [2, width]."""
        ctx.pair = pair
        out = torch.empty_like(y)
        dist.all_to_all_single(out, y.contiguous(), group=pair)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Exchange the gradients back."""
        out = torch.empty_like(grads[0])
        dist.all_to_all_single(out, grads[0].contiguous(), group=ctx.pair)
        return out, None


# ---------------------------------------------------------------------- precision


@pytest.mark.everywhere
@pytest.mark.parametrize("name", ["zero_1", "zero_3", "no_shard"])
def test_four_dtypes_are_independent(name: str) -> None:
    """Main weights, main gradients, reductions and compute each have the dtype asked for."""
    policy = MixedPrecisionPolicy(
        main_params_dtype=torch.float64,
        main_grads_dtype=torch.float32,
        grad_comm_dtype=torch.float16,
        compute_dtype=torch.bfloat16,
    )

    def body(rank: int) -> list[Any]:
        model = fill(linear(4, 2))
        seen: list[torch.dtype] = []
        mesh, placements = mesh_shape(name), placements_of(name)
        shard(model, "", mesh=mesh, placements=placements, mixed_precision_policy=policy)
        model.register_forward_hook(lambda _m, _a, y: seen.append(y.dtype))
        loss_of(model(batch(rank).bfloat16()).float(), rank).backward()
        weight = dict(model.named_parameters())["weight"]
        assert isinstance(weight, DTensor)
        assert isinstance(weight.grad, DTensor)
        return [weight.dtype, weight.grad.dtype, *seen]

    expected = [torch.float64, torch.float32, torch.bfloat16]
    assert on_ranks(body, world_size(4)) == [expected] * world_size(4)


@pytest.mark.everywhere
def test_compute_weights_follow_main_weights_that_were_written_in_place() -> None:
    """Whoever writes them, the next forward sees it, also where weights are kept whole."""

    def body(rank: int) -> list[float]:
        seen = []
        for name in ("zero_3", "zero_1", "no_shard"):
            model = fill(linear())
            policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
            placements = placements_of(name)
            shard(model, "", placements=placements, mixed_precision_policy=policy)
            with torch.no_grad():
                model(batch(rank).bfloat16())
                for parameter in model.parameters():
                    parameter.fill_(3.0)
                seen.append(model(torch.ones(1, 2).bfloat16()).sum().item())
        return seen

    assert on_ranks(body, 2) == [[12.0] * 3] * 2


# ---------------------------------------------------------------------- refusals


def refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    """Check that a call raises an error with exactly this message."""
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message


def on_one(body: Callable[[], None]) -> None:
    """Run something on one simulated rank."""
    on_ranks(lambda _rank: body(), 1)


@pytest.mark.everywhere
def test_sharding_outside_a_scope_is_refused() -> None:
    """There is no context to belong to."""
    on_one(
        lambda: refused(
            lambda: fsdp_core.fully_shard(linear(), mesh_of(1), SHARDED),
            StateError,
            "fully_shard must be called inside `with fully_shard_context()`, got a call outside; "
            "open one around the calls for all units",
        )
    )


@pytest.mark.everywhere
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: nn.Parameter(torch.tensor(1.0)),
            "parameter 'p' must have at least one dim, got a scalar; reshape it to (1,)",
        ),
        (
            lambda: nn.Parameter(torch.ones(2, dtype=torch.complex64)),
            (
                "parameter 'p' must have a real floating dtype, got torch.complex64; register its real "
                "and imaginary parts as two parameters, and torch.complex() them in the forward"
            ),
        ),
        (
            lambda: nn.Parameter(torch.ones(2, 0)),
            "parameter 'p' must have rows with elements, got shape (2, 0); use a shape of (0,), or leave it out",
        ),
        (
            nn.UninitializedParameter,
            (
                "parameter 'p' must have a shape, got an uninitialised one of Module; call the lazy "
                "module once before fully_shard"
            ),
        ),
    ],
)
def test_parameters_that_cannot_be_sharded_are_refused(
    make: Callable[[], nn.Parameter], message: str
) -> None:
    """The error names the parameter; the module stays what it was."""

    def body() -> None:
        model = nn.Module()
        parameter = model.p = make()
        with fsdp_core.fully_shard_context():
            refused(lambda: fsdp_core.fully_shard(model, mesh_of(1), SHARDED), ConfigError, message)
        assert type(model) is nn.Module
        assert model.p is parameter
        assert not model._forward_pre_hooks

    on_one(body)


@pytest.mark.everywhere
@pytest.mark.parametrize("divisor", [0, -1, float("nan"), float("inf"), True, "2"])
def test_a_divisor_that_is_no_positive_number_is_refused(divisor: Any) -> None:
    """Before any buffer is built."""

    def body() -> None:
        with fsdp_core.fully_shard_context():
            refused(
                lambda: fsdp_core.fully_shard(linear(), mesh_of(1), SHARDED, grad_divisor=divisor),
                ConfigError,
                f"grad_divisor must be a finite positive number, got {divisor!r}; pass 1 to divide by the mesh's size alone",
            )

    on_one(body)


@pytest.mark.everywhere
def test_a_failed_child_leaves_its_parameters_to_the_parent() -> None:
    """Nothing of the failed call remains: the parent owns everything and trains."""

    def build() -> nn.Module:
        return fill(Row("a"))

    def body(rank: int) -> None:
        model = build()
        with fsdp_core.fully_shard_context() as context:
            with pytest.raises(ConfigError):
                fsdp_core.fully_shard(model.get_submodule("a"), mesh_of(2), SHARDED, grad_divisor=0)
            fsdp_core.fully_shard(model, mesh_of(2), SHARDED)
        assert isinstance(model, FsdpModule)
        assert [member.fqn for member in model.fsdp_unit.members] == ["a.weight"]
        loss_of(model(batch(rank)), rank).backward()
        assert context.stats.reductions == 1

    on_ranks(body, 2)


@pytest.mark.everywhere
def test_modules_of_one_class_become_units_of_one_class() -> None:
    """Made once, whatever the context: what a class keeps for its instances stays shared."""

    def body() -> None:
        first, second = Row("a"), Row("a")
        shard(first, "", mesh=(1,))
        shard(second, "", mesh=(1,))
        assert type(first) is type(second)
        assert isinstance(first, FsdpModule)

    on_one(body)


@pytest.mark.everywhere
def test_a_module_that_is_a_unit_already_is_refused() -> None:
    """It stays the unit that the first call made."""

    def body() -> None:
        module = linear()
        with fsdp_core.fully_shard_context():
            fsdp_core.fully_shard(module, mesh_of(1), SHARDED)
            refused(
                lambda: fsdp_core.fully_shard(module, mesh_of(1), SHARDED),
                ConfigError,
                f"a module is sharded once, got a {type(module).__name__} that is a unit already; "
                f"drop the second call",
            )
        assert isinstance(module, FsdpModule)

    on_one(body)


@pytest.mark.everywhere
def test_a_module_below_a_unit_of_another_context_is_refused() -> None:
    """The error speaks of contexts: to change the order of the calls would not help."""

    def body() -> None:
        model = nn.Sequential(linear())
        shard(model, "", mesh=(1,))
        with fsdp_core.fully_shard_context():
            refused(
                lambda: fsdp_core.fully_shard(model[0], mesh_of(1), SHARDED),
                ConfigError,
                "a parameter belongs to one unit, got 'weight' of Linear, which is '0.weight' of the "
                "unit FsdpSequential already; that unit is of another context; shard the whole model "
                "inside one `with fully_shard_context()`",
            )

    on_one(body)


@pytest.mark.everywhere
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placements": None}, "placements must be a Placements, got None; pass one of that type"),
        ({"mesh": "dp"}, "mesh must be a DeviceMesh, got 'dp'; pass one of that type"),
        (
            {"mixed_precision_policy": torch.bfloat16},
            "mixed_precision_policy must be a MixedPrecisionPolicy, got torch.bfloat16; pass one of that type",
        ),
        (
            {"schedule_policy": 2},
            "schedule_policy must be a SchedulePolicy, got 2; pass one of that type",
        ),
    ],
)
def test_an_argument_of_another_type_is_refused(options: dict[str, Any], message: str) -> None:
    """The error names the argument and its type; the module stays what it was."""

    def body() -> None:
        arguments: dict[str, Any] = {"module": linear(), "mesh": mesh_of(1), "placements": SHARDED}
        arguments |= options
        with fsdp_core.fully_shard_context():
            refused(lambda: fsdp_core.fully_shard(**arguments), TypeError, message)
        assert type(arguments["module"]) is nn.Linear

    on_one(body)


def test_no_tensor_of_integers_can_require_a_gradient() -> None:
    """PyTorch sees to it, so fully_shard keeps every parameter of integers whole, as it is."""
    counts = nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False)
    weight = nn.Parameter(torch.ones(2))

    with pytest.raises(RuntimeError, match="only Tensors of floating point dtype"):
        counts.requires_grad_()
    with pytest.raises(RuntimeError, match="must be floating point or complex dtype"):
        weight.data = counts.data


@pytest.mark.everywhere
def test_a_mesh_of_another_device_type_is_refused() -> None:
    """The context computes on one device type."""

    def body() -> None:
        mesh = mesh_of(1)
        mesh._device_type = "cuda"
        with fsdp_core.fully_shard_context(device="cpu"):
            refused(
                lambda: fsdp_core.fully_shard(linear(), mesh, SHARDED),
                ConfigError,
                "the mesh must be on the context's device type 'cpu', got 'cuda'; pass device= to "
                "fully_shard_context or build another mesh",
            )

    on_one(body)


@pytest.mark.everywhere
@pytest.mark.parametrize("name", ["use_symmetric_memory", "unify_communication_stream"])
def test_keywords_of_the_earlier_interface_name_their_successor(name: str) -> None:
    """They are refused, not ignored."""

    def body() -> None:
        keywords: dict[str, Any] = {name: True}
        with (
            pytest.raises(ConfigError, match=rf"^{name} is said by runtime_policy=RuntimePolicy\("),
            fsdp_core.fully_shard_context(**keywords),
        ):
            pass

    on_one(body)


@pytest.mark.everywhere
def test_an_unknown_keyword_is_a_type_error() -> None:
    """As of any function."""

    def body() -> None:
        keywords: dict[str, Any] = {"stream": None}
        with (
            pytest.raises(TypeError, match=r"unexpected keyword argument 'stream'$"),
            fsdp_core.fully_shard_context(**keywords),
        ):
            pass

    on_one(body)


@pytest.mark.everywhere
def test_what_is_no_module_is_refused() -> None:
    """A list of names is none; an empty one has nothing to shard."""

    def body() -> None:
        with fsdp_core.fully_shard_context():
            candidates: tuple[Any, ...] = ([], "layer", None)
            for candidate in candidates:
                with pytest.raises(ConfigError, match=r"^fully_shard needs a module or a sequence"):
                    fsdp_core.fully_shard(candidate, mesh_of(1), SHARDED)

    on_one(body)


@pytest.mark.everywhere
def test_a_module_with_a_name_that_is_added_is_refused() -> None:
    """A property would hide the module's own attribute."""

    def body() -> None:
        model = linear()
        model.phase = "mine"  # type: ignore[assignment]
        with (
            fsdp_core.fully_shard_context(),
            pytest.raises(ConfigError, match=r"got a Linear that has 'phase' already; rename it$"),
        ):
            fsdp_core.fully_shard(model, mesh_of(1), SHARDED)

    on_one(body)


# ---------------------------------------------------------------------- owner maps


WHOLE_TENSORS = Placements((0,), *((TensorAtomic(),),) * 3)


@pytest.mark.everywhere
def test_whole_tensors_train_on_their_owners() -> None:
    """Each rank holds the tensors that the map gives it, and nothing of the others."""

    def body(rank: int) -> tuple[list[tuple[int, ...]], dict[str, Tensor | None]]:
        model = fill(nn.Sequential(linear(3, 2), linear(2, 3)))
        owners = {model.get_parameter("0.weight"): 1, model.get_parameter("1.weight"): 0}
        shard(model, "", placements=WHOLE_TENSORS, parameter_to_owner=owners)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        fsdp_core.fully_shard_optimizer(optimizer)
        loss_of(model(batch(rank)), rank).backward()
        optimizer.step()
        rows = local_rows(model).values()
        return [tuple(each.shape) for each in rows if each is not None], whole_by_name(model)

    (first, weights), (second, _) = on_ranks(body, 2)

    def build() -> nn.Module:
        return fill(nn.Sequential(linear(3, 2), linear(2, 3)))

    assert first == [(0, 2), (2, 3)]
    assert second == [(3, 2), (0, 3)]
    assert_equal(weights, dict(reference(build, 2, 1, 1)))


@pytest.mark.everywhere
@pytest.mark.parametrize(
    ("owner", "message"),
    [
        (
            None,
            "got on rank 1: none for 'weight'; give each an int in [0, 2)",
        ),
        (True, "got on rank 1: True for 'weight', which is no int"),
        (-1, "got on rank 1: -1 for 'weight', which is not in [0, 2)"),
        (2, "got on rank 1: 2 for 'weight', which is not in [0, 2)"),
        (
            1,
            "parameter_to_owner must be the same on all ranks, got for parameter 'weight' rank 0: ",
        ),
    ],
)
def test_a_wrong_owner_map_is_the_same_error_on_every_rank(owner: Any, message: str) -> None:
    """Also on those whose own map is right, and before anything is built."""

    def body(rank: int) -> str:
        model = linear()
        owners = {model.weight: 0 if rank == 0 else owner}
        if owner is None and rank == 1:
            owners = {}
        with pytest.raises(ConfigError) as caught:
            shard(model, "", placements=WHOLE_TENSORS, parameter_to_owner=owners)
        assert type(model) is nn.Linear
        return str(caught.value)

    first, second = on_ranks(body, 2)

    assert first == second
    assert message in first
