"""fully_shard: which unit owns what, owner maps, and what it refuses, changing nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_core
from fsdp_core import (
    BlockAtomic,
    ConfigError,
    FsdpModule,
    Placements,
    StateError,
    TensorAtomic,
)
from tests.cases.programs import (
    SHARDED,
    Row,
    assert_equal,
    batch,
    fill,
    linear,
    local_rows,
    loss_of,
    mesh_of,
    shard,
)
from tests.core.strategies import reference, whole_by_name
from tests.core.worlds import on_ranks

# ---------------------------------------------------------------------- units


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
def test_rows_that_make_no_whole_blocks_are_refused() -> None:
    """Of every axis: two rows and three rows ask for six."""
    kinds = (BlockAtomic(2), BlockAtomic(3))

    def body() -> None:
        with fsdp_core.fully_shard_context():
            refused(
                lambda: fsdp_core.fully_shard(
                    linear(8, 2), mesh_of(1, 1), Placements((0, 1), kinds, kinds, kinds)
                ),
                ConfigError,
                "parameter 'weight' must have a number of rows divisible by 6, as its BlockAtomic "
                "placements ask, got shape (8, 2); pad it, or use RowAtomic",
            )

    on_one(body)


@pytest.mark.everywhere
@pytest.mark.parametrize("divisor", [0, -1, float("nan"), float("inf"), -float("inf"), True, "2"])
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
