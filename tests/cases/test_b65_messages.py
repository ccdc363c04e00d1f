"""B65: every error says what must hold, what was seen, where, and what to do."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor

import fsdp_core
import fsdp_sim
from fsdp_core import (
    BlockAtomic,
    ConfigError,
    FsdpContext,
    FsdpMuon,
    Placements,
    PrefetchOrder,
    SchedulePolicy,
    StateError,
    microbatch,
)
from tests.cases.programs import SHARDED, Row, batch, fill, linear, loss_of, mesh_of, shard

PACKAGE = Path(fsdp_core.__file__).parent
ERRORS = ("ConfigError", "ConfigTypeError", "UnsupportedError", "StateError", "StateValueError")
STATE_ERRORS = ("StateError", "StateValueError")
# They are raised about buffers and plans, below the units, whose rule is the message itself.
LOW_LEVEL = ("dbuffer.py", "gather_scatter.py")

# ---------------------------------------------------------------------- every message, by its text


def text_of(node: ast.expr) -> str:
    """A message with its placeholders."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(map(text_of, values))
        case ast.BinOp(left=left, right=right):
            return text_of(left) + text_of(right)
        case _:
            return f"{{{ast.unparse(node)}}}"


def messages() -> Iterator[tuple[str, str, str]]:
    """Every place that makes an error of fsdp_core: file and line, kind, message."""
    for path in sorted(PACKAGE.glob("*.py")):
        functions = [
            n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)
        ]
        for function in functions:
            yield from _messages_in(path, function)


def _messages_in(path: Path, function: ast.FunctionDef) -> Iterator[tuple[str, str, str]]:
    assigned: dict[int, str] = {}
    for node in ast.walk(function):
        if (
            isinstance(node, (ast.Assign, ast.AugAssign))
            and "msg" in ast.unparse(node).split(" ")[0]
        ):
            assigned[node.lineno] = text_of(node.value)
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ERRORS
        ):
            before = [text for line, text in sorted(assigned.items()) if line <= node.lineno]
            message = before[-1] if before else text_of(node.args[0])
            yield f"{path.name}:{node.lineno}", node.func.id, message


def test_every_message_says_what_was_seen() -> None:
    """pytorch#98484: got, or why it cannot be; a part of a message may come from elsewhere."""
    silent = [
        f"{place}: {message}"
        for place, _, message in messages()
        if not any(
            said in message
            for said in ("got", "cannot", "never", "needs", "not built", "has no", "{problem}")
        )
    ]

    assert silent == []


def test_every_error_of_state_says_what_to_do() -> None:
    """DeepSpeed#6870, #5828: an action, behind a semicolon."""
    passive = [
        f"{place}: {message}"
        for place, kind, message in messages()
        if kind in STATE_ERRORS and ";" not in message and place.split(":")[0] not in LOW_LEVEL
    ]

    assert passive == []


# They are raised where there is no rank or step yet, or no unit any more.
WITHOUT_PLACE = ("register_module", "finalize", "_before_backward")


def unplaced(path: Path) -> Iterator[str]:
    """Every place in a file that raises an error of state without saying on which rank and when."""
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef) or function.name in WITHOUT_PLACE:
            continue
        for node in ast.walk(function):
            raises = isinstance(node, ast.Raise) and node.exc is not None
            text = ast.unparse(node) if raises else ""
            if any(f"{error}(" in text for error in STATE_ERRORS) and ".located(" not in text:
                yield f"{path.name}:{function.name}: {text}"


def test_every_error_of_a_unit_says_on_which_rank_and_when() -> None:
    """pytorch#98484: wherever a context is at hand, whichever variant of a failure it is."""
    names = ("hooks", "module", "unit", "weights", "gradients", "context")
    files = [PACKAGE / f"{name}.py" for name in names]

    assert [place for path in files for place in unplaced(path)] == []


# ---------------------------------------------------------------------- errors of units, as raised


def two_units(**options: Any) -> tuple[nn.Module, FsdpContext]:
    """Units `layers.first` and `layers.last` under a root."""
    model = nn.ModuleDict({"layers": Row("first", "last")})
    fill(model)
    return model, shard(model, "layers.first", "layers.last", "", **options)


def step(model: nn.Module, rank: int) -> None:
    """A forward and backward of the units."""
    loss_of(model.get_submodule("layers")(batch(rank)), rank).backward()


def step_in_window(model: nn.Module, context: FsdpContext, rank: int) -> None:
    """The same, with more microbatches to come."""
    with microbatch(context, is_last=False):
        step(model, rank)


def last(model: nn.Module) -> Any:
    """The unit that the failures are about."""
    return model.get_submodule("layers.last")


def reshard_inside(rank: int) -> None:
    """Reshard a unit by hand while its forward runs."""
    model, _ = two_units()
    step(model, rank)
    last(model).register_forward_pre_hook(lambda module, _args: module.reshard())
    step(model, rank)


def load_inside(rank: int) -> None:
    """Load a state dict while a forward runs."""
    model, _ = two_units()
    step(model, rank)
    state = last(model).state_dict()
    last(model).register_forward_pre_hook(
        lambda module, _args: module.load_state_dict(state) and None
    )
    step(model, rank)


def enter_twice(rank: int) -> None:
    """A forward that calls itself."""
    model, _ = two_units()
    step(model, rank)
    last(model).register_forward_pre_hook(lambda module, args: module(*args) and None)
    step(model, rank)


def step_mid_window(rank: int) -> None:
    """An optimizer's step with half of the gradients that were declared."""
    model = nn.ModuleDict({"layers": Row("first", "last")})
    twice = SchedulePolicy(grad_accumulation_count=2)
    with fsdp_core.fully_shard_context():
        fsdp_core.fully_shard(model.get_submodule("layers.first"), mesh_of(2), SHARDED)
        fsdp_core.fully_shard(last(model), mesh_of(2), SHARDED, schedule_policy=twice)
        fsdp_core.fully_shard(model, mesh_of(2), SHARDED)
    optimizer = fsdp_core.fully_shard_optimizer(torch.optim.SGD(last(model).parameters(), lr=1.0))
    step(model, rank)
    optimizer.step()


def change_dtype(rank: int) -> None:
    """Convert a sharded module."""
    model, _ = two_units()
    step(model, rank)
    last(model).to(torch.float64)


def write_between(rank: int) -> None:
    """Load between a forward and its backward."""
    model, _ = two_units()
    step(model, rank)
    loss = loss_of(model.get_submodule("layers")(batch(rank)), rank)
    last(model).load_state_dict(last(model).state_dict())
    loss.backward()


def copy(rank: int) -> None:
    """Copy a unit."""
    model, _ = two_units()
    step(model, rank)
    last(model).__reduce_ex__(4)


def load_by_assignment(rank: int) -> None:
    """Load so that parameters would be replaced."""
    model, _ = two_units()
    step(model, rank)
    last(model).load_state_dict(last(model).state_dict(prefix="layers.last."), assign=True)


def load_whole(rank: int) -> None:
    """Load what an unsharded model saves."""
    model, _ = two_units()
    step(model, rank)
    state = model.state_dict()
    state["layers.last.weight"] = torch.zeros(2, 2)
    model.load_state_dict(state)


def replace(rank: int) -> None:
    """Assign a parameter."""
    model, _ = two_units()
    step(model, rank)
    last(model).weight = nn.Parameter(torch.zeros(2, 2))
    step(model, rank)


def write_full(rank: int) -> None:
    """Write gathered weights."""
    model, _ = two_units()
    step(model, rank)
    last(model).unshard()
    nn.init.zeros_(last(model).weight)
    last(model).reshard()


def record_backward(rank: int) -> None:
    """A backward that is to have a backward."""
    model, _ = two_units()
    step(model, rank)
    x = batch(rank).requires_grad_()
    y = model.get_submodule("layers")(x)
    torch.autograd.grad(y.sum(), x, create_graph=True)


def replace_gradient(rank: int) -> None:
    """Put a gradient of other rows in the place of one."""
    model, _ = two_units()
    step(model, rank)
    weight = last(model).weight
    mesh = weight.device_mesh
    weight.grad = distribute_tensor(torch.zeros(2, 2), mesh, [Replicate()])
    step(model, rank)


def call_encode(rank: int) -> None:
    """Enter through a method that nobody registered."""

    class Encoder(nn.Linear):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    model = nn.ModuleDict({"layers": Row(first=linear(), last=Encoder(2, 2, bias=False))})
    shard(model, "layers.first", "layers.last", "")
    step(model, rank)
    last(model).encode(batch(rank))


def step_without_last(rank: int) -> None:
    """An optimizer's step in a window that nobody ended."""
    model, context = two_units(mesh=(1, 2))
    step(model, rank)
    optimizer = fsdp_core.fully_shard_optimizer(torch.optim.SGD(last(model).parameters(), lr=1.0))
    model.zero_grad()
    with microbatch(context, is_last=False):
        loss_of(model.get_submodule("layers")(batch(rank)), rank).backward()
    optimizer.step()


def step_unreduced(rank: int) -> None:
    """An optimizer's step on gradients that were put on full parameters by hand."""
    model, _ = two_units()
    step(model, rank)
    last(model).unshard()
    last(model).weight.grad = torch.ones(2, 2)
    last(model).reshard()
    torch.optim.SGD(last(model).parameters(), lr=1.0).step()


FAILURES = [
    load_by_assignment,
    load_whole,
    replace,
    write_full,
    record_backward,
    replace_gradient,
    call_encode,
    step_without_last,
    step_unreduced,
    reshard_inside,
    load_inside,
    enter_twice,
    step_mid_window,
    change_dtype,
    write_between,
    copy,
]


@pytest.mark.parametrize("fail", FAILURES, ids=lambda each: each.__name__)
@pytest.mark.filterwarnings("ignore:step")
def test_an_error_of_a_unit_names_it_and_says_on_which_rank_in_which_step(
    fail: Callable[[int], None],
) -> None:
    """fairscale#918: the unit's full name, the rank and the step, beside the message."""

    def program(rank: int) -> None:
        with pytest.raises(StateError) as caught:
            fail(rank)
        error = caught.value
        assert error.fqn is not None
        assert error.fqn.removesuffix(".weight") == "layers.last"
        assert "layers.last" in str(error) or fail is copy
        assert any(f"on rank {rank}, in step " in note for note in error.__notes__)
        assert "; " in str(error)

    report = fsdp_sim.simulate(program, 2, strict=False, checkers=["collective_match"])

    assert report.results == [None, None]


# ---------------------------------------------------------------------- errors of configuration


def cut_a_block(model: nn.Module) -> None:
    """Rows that must stay together, in a parameter that ends in the middle of some."""
    blocks = (BlockAtomic(4),)
    shard(model, "layers.last", placements=Placements((0,), blocks, blocks, blocks))


def orthogonalise_nothing(model: nn.Module) -> None:
    """A matrix without elements, which nobody can own."""
    last(model).empty = nn.Parameter(torch.zeros(0, 4))
    shard(model, "layers.first", "layers.last", "")
    FsdpMuon([last(model).weight, last(model).empty], lr=1.0)


def optimise_full(model: nn.Module) -> None:
    """An optimizer that is built while the weights are gathered."""
    shard(model, "layers.first", "layers.last", "")
    last(model).unshard()
    fsdp_core.fully_shard_optimizer(torch.optim.SGD(last(model).parameters()))


@pytest.mark.parametrize(
    ("fail", "fqn"),
    [
        (cut_a_block, "weight"),
        (orthogonalise_nothing, "layers.last.empty"),
        (optimise_full, "layers.last.weight"),
    ],
    ids=["block", "muon", "optimizer"],
)
def test_an_error_of_configuration_names_the_parameter(
    fail: Callable[[nn.Module], None], fqn: str
) -> None:
    """Not its number in a buffer; in full, once the construction scope has given names."""

    def program(_rank: int) -> None:
        with pytest.raises(ConfigError) as caught:
            fail(nn.ModuleDict({"layers": Row("first", "last")}))
        assert caught.value.fqn == fqn
        assert repr(fqn) in str(caught.value)

    fsdp_sim.simulate(program, 2)


# ---------------------------------------------------------------------- where they point


def test_a_diverging_pass_names_both_units_and_the_step() -> None:
    """Under RECORDED, where the order is a promise."""

    def program(rank: int) -> str:
        model, context = two_units(prefetch_order=PrefetchOrder.RECORDED)
        step(model, rank)
        with pytest.raises(StateError) as caught:
            model.get_submodule("layers")(batch(rank), ["last", "first"])
        assert any(f"on rank {rank}, in step 1" in note for note in caught.value.__notes__)
        context.reset()
        return str(caught.value)

    for message in fsdp_sim.simulate(program, 2).results:
        assert "step 1: a pass must repeat the recorded one, got layers.last forward" in message
        assert "expected layers.first forward" in message


def test_an_error_inside_a_window_says_that_it_is_not_its_last_microbatch() -> None:
    """Where gradients are accumulated."""

    def program(rank: int) -> list[str]:
        model, context = two_units()
        last(model).register_forward_pre_hook(lambda module, _args: module.reshard())
        with pytest.raises(StateError) as caught:
            step_in_window(model, context, rank)
        return list(caught.value.__notes__)

    for rank, notes in enumerate(fsdp_sim.simulate(program, 2, strict=False).results):
        assert f"on rank {rank}, in step 0, not in the last microbatch of its window" in notes


@pytest.mark.filterwarnings("ignore:step")
def test_layers_without_a_gradient_can_be_listed() -> None:
    """By the names of their parameters."""

    def program(rank: int) -> tuple[list[str], list[str]]:
        model, context = two_units()
        before = context.parameters_without_grad()
        loss_of(model.get_submodule("layers")(batch(rank), ["first"]), rank).backward()
        return before, context.parameters_without_grad()

    expected = (["layers.first.weight", "layers.last.weight"], ["layers.last.weight"])
    assert fsdp_sim.simulate(program, 2).results == [expected, expected]
