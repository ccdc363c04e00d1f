"""B65: every error says what must hold, what was seen, where, and what to do."""

import ast
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
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
    errors,
    microbatch,
)
from tests.cases.programs import SHARDED, Row, batch, fill, linear, loss_of, mesh_of, shard
from tests.cases.test_b62_delayed_gradients import MANAGED, Delayed

PACKAGE = Path(fsdp_core.__file__).parent
KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, Exception)
}
STATE = re.compile(r"\bState(Value)?Error\(")
SHAPE = re.compile(r"(?P<expected>.+?), got:? (?P<seen>.+?); (?P<action>.+)")
"""What must hold, what was seen, and what to do."""

# ---------------------------------------------------------------------- every message, by its source


@dataclass(frozen=True)
class Site:
    """A place that makes an error of fsdp_core.

    Attributes:
        place: file and function.
        line: in that file.
        kind: the error's class.
        text: its message, with its placeholders; one that comes from elsewhere is one.
        is_named: it carries the name of a unit, module or parameter.
    """

    place: str
    line: int
    kind: str
    text: str
    is_named: bool


def functions_of(tree: ast.AST) -> list[ast.FunctionDef]:
    """Every function and method, also those of a name that another one has."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def sites() -> Iterator[Site]:
    """Every such place, found in the source."""
    for path in sorted(PACKAGE.glob("*.py")):
        tree = ast.parse(path.read_text())
        functions = {each.name: each for each in functions_of(tree)}
        for function in functions_of(tree):
            for node in ast.walk(function):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Name)
                    and node.func.id in KINDS
                ):
                    is_named = any(keyword.arg == "fqn" for keyword in node.keywords)
                    for text in texts_of(node.args[0], function, functions):
                        place = f"{path.name}:{function.name}"
                        yield Site(place, node.lineno, node.func.id, text, is_named)


def texts_of(
    node: ast.expr, function: ast.FunctionDef, functions: dict[str, ast.FunctionDef]
) -> list[str]:
    """The messages that an expression may be: literals, what was assigned last, what is returned."""
    match node:
        case ast.Constant(value=str(value)):
            return [value]
        case ast.JoinedStr(values=values):
            return [
                "".join(text for each in values for text in texts_of(each, function, functions))
            ]
        case ast.Name(id=name):
            assigned = [
                each
                for each in ast.walk(function)
                if isinstance(each, ast.Assign)
                and each.lineno <= node.lineno
                and ast.unparse(each.targets[0]) == name
            ]
            last = max(assigned, key=lambda each: each.lineno)
            return texts_of(last.value, function, functions)
        case ast.Call(func=ast.Name(id=name)) if name in functions:
            helper = functions[name]
            returned = (each.value for each in ast.walk(helper) if isinstance(each, ast.Return))
            said = [each for each in returned if each is not None and ast.unparse(each) != "None"]
            return [text for each in said for text in texts_of(each, helper, functions)]
        case _:
            return [f"{{{ast.unparse(node)}}}"]


OF_PYTHON = {
    # what Python, pickle and PyTorch say of a wrong keyword, file and version
    "fully_shard.py": {"TypeError"},
    "checkpoint_reader.py": {"UnpicklingError"},
    "torch_private.py": {"ImportError"},
    # another rank's exception, of a class that may not travel
    "agreement.py": {"RuntimeError"},
}
"""Exceptions that are not fsdp_core's own, by the file that makes them."""


def test_the_walk_over_messages_leaves_out_no_error_that_is_made() -> None:
    """In whatever function, in none, or by whatever path its class is called."""
    made: set[tuple[str, int]] = set()
    others: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.glob("**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).split(".")[-1]
            if name in KINDS:
                made.add((path.name, node.lineno))
            elif name.endswith(("Error", "Exception", "Warning")):
                others.setdefault(path.name, set()).add(name)

    assert {(each.place.split(":")[0], each.line) for each in sites()} == made
    assert others == OF_PYTHON


def test_every_message_says_what_must_hold_what_was_seen_and_what_to_do() -> None:
    """pytorch#98484, DeepSpeed#6870, #5828: in this order, wherever fsdp_core raises."""
    found = list(sites())

    assert len(found) > 100
    assert [each for each in found if not SHAPE.fullmatch(each.text)] == []


ACTION = re.compile(
    r"add|allocate|assign|build|call|choose|compute|convert|copy|declare|do|drive|drop|end|finish|give|"
    r"have|install|keep|leave|load|make|move|name|open|order|pad|pass|put|redistribute|register|"
    r"rename|repeat|reshape|run|shard|split|turn|untie|use|write|if it does, pass|{{hint}}|{{remedy}}"
)
"""What an action begins with: it says what to do, not what holds. What is made apart says so there."""


def test_every_message_ends_with_something_to_do() -> None:
    """An explanation is none."""
    for each in sites():
        parts = each.text.partition(", got")[2].split("; ")[1:]

        assert any(re.match(rf"({ACTION.pattern})(\b|$)", part) for part in parts), each


BELOW_UNITS = {
    "collectives.py",
    "dbuffer.py",
    "device.py",
    "errors.py",
    "gather_scatter.py",
    "grad_norm.py",
    "layout.py",
    "layout_builder.py",
    "mixed_precision.py",
    "owner_planning.py",
    "placement.py",
    "runtime_policy.py",
    "schedule_policy.py",
}
"""Files that know arguments, ranks and numbered tensors; what calls them names the parameter."""
ABOUT_NO_UNIT = {
    # about a call, a scope or an argument of one
    "context.py:__init__",
    "context.py:end_microbatch",
    "context.py:ensure_finalized",
    "context.py:finalize",
    "context.py:module_name",
    "context.py:register_module",
    "context.py:register_post_backward_hook",
    "fully_shard.py:fully_shard",
    "fully_shard.py:fully_shard_context",
    "hooks.py:register_forward_method",
    "module.py:refuse_closure",
    # about all units, or ones that are gone
    "context.py:check_backward_ended",
    "context.py:ensure_has_model",
    "hooks.py:_before_backward",
    # about a module that has no name before the construction scope ends
    "fully_shard.py:_check_divisor",
    "fully_shard.py:_check_expectations",
    "fully_shard.py:_check_forwards",
    "fully_shard.py:_check_mesh",
    "fully_shard.py:_check_modules",
    "fully_shard.py:_check_policy",
    "fully_shard.py:_sharded_class",
    # about what belongs to no unit: directories, entries that a model lacks, other parameters
    "checkpoint_files.py:find",
    "checkpoint_files.py:make_room",
    "checkpoint_files.py:not_whole",
    "checkpoint_files.py:put_in_place",
    "checkpoint_reader.py:_read_metadata",
    "full_state.py:_check_full",
    "full_state.py:export_safetensors",
    "muon.py:_assign",
    "optimizer.py:_check_class",
    "optimizer.py:_find",
    "optimizer_entries.py:_held",
    "optimizer_entries.py:fit_options",
    "plain_optimizer.py:not_elementwise",
    # about several units, which the text names
    "agreement.py:agree_on_events",
    "agreement.py:agree_on_owners",
    "prefetcher.py:end_pass",
}


def test_every_error_about_a_unit_or_a_parameter_carries_its_name() -> None:
    """fairscale#918: as `fqn`, and in the message."""
    above = [each for each in sites() if each.place.split(":")[0] not in BELOW_UNITS]
    named = [each for each in above if each.is_named]
    nameless = {each.place for each in above if not each.is_named}

    assert [
        each for each in named if not re.search(r"\{[^{}]*(fqn|name|unit|describe)", each.text)
    ] == []
    assert nameless == ABOUT_NO_UNIT


# ---------------------------------------------------------------------- where it went wrong


@dataclass(frozen=True)
class Raised:
    """A statement that raises an error of state, and whether it says on which rank and when."""

    file: str
    function: str
    lines: range
    is_located: bool


def raises() -> Iterator[Raised]:
    """Every such statement; what a helper returns is raised by its caller."""
    trees = {path.name: ast.parse(path.read_text()) for path in sorted(PACKAGE.glob("*.py"))}
    makers = {
        function.name: ast.unparse(function)
        for tree in trees.values()
        for function in functions_of(tree)
        if any(
            isinstance(n, ast.Return) and STATE.search(ast.unparse(n)) for n in ast.walk(function)
        )
    }
    for file, tree in trees.items():
        for function in functions_of(tree):
            for node in ast.walk(function):
                if not isinstance(node, ast.Raise) or node.exc is None:
                    continue
                text = ast.unparse(node)
                made_by = [makers[name] for name in makers if f"{name}(" in text]
                if STATE.search(text) or ".located(" in text or made_by:
                    is_located = ".located(" in text or any(".located(" in m for m in made_by)
                    lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                    yield Raised(file, function.name, lines, is_located)


WITHOUT_PLACE = {
    # the construction scope: there is no step yet
    "context.py:finalize",
    "context.py:register_module",
    "fully_shard.py:fully_shard",
    "fully_shard.py:fully_shard_context",
    "parameter_group.py:_refuse_hook",
    # the model is gone
    "hooks.py:_before_backward",
    "module.py:complete_groups",
    "parameter_group.py:living_group",
    # below units
    "gather_scatter.py:_check_numel",
    # what calls them adds the place
    "agreement.py:agree_on_events",
    "phase.py:check_phase_change",
    "prefetcher.py:end_pass",
    "prefetcher.py:note",
}


def test_every_error_of_state_says_on_which_rank_and_when() -> None:
    """pytorch#98484: wherever a context is at hand."""
    unlocated = {f"{each.file}:{each.function}" for each in raises() if not each.is_located}

    assert unlocated == WITHOUT_PLACE


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


def run_before_a_delayed_gradient(rank: int) -> None:
    """A forward of a unit whose last backward is not over."""
    model = nn.ModuleDict({"layers": Row(first=linear(), last=Delayed())})
    shard(model, "layers.first", "layers.last", "", runtime_policy=MANAGED)
    step(model, rank)
    step(model, rank)


def run_lazily(rank: int) -> None:
    """A forward that returns before it has begun."""

    class Lazy(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            yield super().forward(x)

    model = nn.ModuleDict({"layers": Row(first=linear(), last=Lazy(2, 2))})
    shard(model, "layers.first", "layers.last", "")
    last(model)(batch(rank))


def return_weight(rank: int) -> None:
    """A forward that returns a view of its weight."""

    class Holder(nn.Linear):
        def forward(self, _x: torch.Tensor) -> torch.Tensor:
            return self.weight.t()

    model = nn.ModuleDict({"layers": Row(first=linear(), last=Holder(2, 2))})
    shard(model, "layers.first", "layers.last", "")
    step(model, rank)


def transform(rank: int) -> None:
    """Another differentiation than that of backward passes."""
    model, _ = two_units()
    torch.func.grad(lambda x: last(model)(x).sum())(batch(rank))


def declared(model: nn.Module, count: int) -> None:
    """Shard two units, of which the last is to get `count` gradients."""
    policy = SchedulePolicy(grad_accumulation_count=count)
    with fsdp_core.fully_shard_context():
        fsdp_core.fully_shard(model.get_submodule("layers.first"), mesh_of(2), SHARDED)
        fsdp_core.fully_shard(last(model), mesh_of(2), SHARDED, schedule_policy=policy)
        fsdp_core.fully_shard(model, mesh_of(2), SHARDED)


def declare_too_few(rank: int) -> None:
    """A backward that brings more gradients than were declared."""
    model = nn.ModuleDict({"layers": Row(first=linear(), last=nn.Linear(2, 2))})
    declared(model, 1)
    step(model, rank)


def step_mid_window(rank: int) -> None:
    """An optimizer's step with half of the gradients that were declared."""
    model = nn.ModuleDict({"layers": Row("first", "last")})
    declared(model, 2)
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


def lose_on_shards(rank: int) -> None:
    """A loss computed from a sharded parameter."""
    model, _ = two_units()
    step(model, rank)
    last(model).weight.sum().backward()


def step_on_other_rows(rank: int) -> None:
    """An optimizer's step on a gradient that has other rows than this rank holds."""
    model, _ = two_units()
    step(model, rank)
    optimizer = fsdp_core.fully_shard_optimizer(torch.optim.SGD(last(model).parameters(), lr=1.0))
    weight = last(model).weight
    weight.grad = distribute_tensor(torch.zeros(2, 2), weight.device_mesh, [Replicate()])
    optimizer.step()


def step_on_other_state(rank: int) -> None:
    """An optimizer's step with state that has other rows than this rank holds."""
    model, _ = two_units()
    optimizer = fsdp_core.fully_shard_optimizer(torch.optim.Adam(last(model).parameters()))
    step(model, rank)
    optimizer.step()
    optimizer.state[last(model).weight]["exp_avg"] = torch.zeros(2, 2)
    optimizer.step()


def step_on_other_momentum(rank: int) -> None:
    """A step of FsdpMuon with momentum that has other rows than this rank holds."""
    model, _ = two_units()
    optimizer = FsdpMuon([last(model).weight], lr=1.0)
    step(model, rank)
    optimizer.step()
    optimizer.state[last(model).weight]["momentum_buffer"] = torch.zeros(2, 2)
    optimizer.step()


def write_shared_state(rank: int) -> None:
    """Write in place what an optimizer counts for two parameters at once."""
    model = nn.ModuleDict({"layers": Row(first=linear(), last=nn.Linear(2, 2))})
    shard(model, "layers.first", "layers.last", "")
    optimizer = fsdp_core.fully_shard_optimizer(torch.optim.Adam(last(model).parameters()))
    step(model, rank)
    optimizer.step()
    optimizer.state[last(model).weight]["step"].zero_()
    optimizer.step()


def reduce_late(rank: int) -> None:
    """A gradient that comes when the backward pass is over."""
    model, _ = two_units()
    step(model, rank)
    unit = last(model).fsdp_unit
    unit.gradients.reduce()


def diverge(rank: int) -> None:
    """A pass unlike the recorded one."""
    model, _ = two_units(prefetch_order=PrefetchOrder.RECORDED)
    step(model, rank)
    model.get_submodule("layers")(batch(rank), ["last", "first"])


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
    run_before_a_delayed_gradient,
    run_lazily,
    return_weight,
    transform,
    declare_too_few,
    step_mid_window,
    change_dtype,
    write_between,
    copy,
    lose_on_shards,
    step_on_other_rows,
    step_on_other_state,
    step_on_other_momentum,
    write_shared_state,
    reduce_late,
    diverge,
]


@cache
def raised_by(fail: Callable[[int], None]) -> list[BaseException]:
    """What a failure raises on each of two ranks."""

    def program(rank: int) -> BaseException:
        with pytest.raises((StateError, ConfigError)) as caught:
            fail(rank)
        return caught.value

    report = fsdp_sim.simulate(program, 2, strict=False, checkers=["collective_match"])
    errors_raised: list[BaseException] = report.results
    return errors_raised


@pytest.mark.parametrize("fail", FAILURES, ids=lambda each: each.__name__)
@pytest.mark.filterwarnings("ignore:step")
def test_an_error_of_a_unit_names_it_and_says_on_which_rank_in_which_step(
    fail: Callable[[int], None],
) -> None:
    """fairscale#918: the unit's full name, the rank and the step, beside the message."""
    for rank, error in enumerate(raised_by(fail)):
        assert isinstance(error, (StateError, ConfigError))
        assert error.fqn is not None
        assert error.fqn.removesuffix(".weight") == "layers.last"
        assert "layers.last" in str(error)
        assert f"on rank {rank}, in step " in error.__notes__[0]
        assert SHAPE.fullmatch(str(error))


def name_a_stranger(rank: int) -> None:
    """The name of a module that is no unit."""
    model, context = two_units()
    step(model, rank)
    context.module_name(linear())


def run_inside_the_scope(rank: int) -> None:
    """A forward before construction is over."""
    model = nn.ModuleDict({"layers": Row("first", "last")})
    with fsdp_core.fully_shard_context():
        fsdp_core.fully_shard(last(model), mesh_of(2), SHARDED)
        last(model)(batch(rank))


def use_without_model(rank: int) -> None:
    """A context that outlives its model."""
    model, context = two_units()
    step(model, rank)
    del model
    context.post_backward()


def hook_outside_backward(rank: int) -> None:
    """Ask for the end of a backward pass that does not run."""
    model, context = two_units()
    step(model, rank)
    context.register_post_backward_hook()


def leave_the_scope_before_backward(rank: int) -> None:
    """A microbatch's scope around its forward alone."""
    model, context = two_units()
    with microbatch(context, is_last=True):
        model.get_submodule("layers")(batch(rank))


def step_after_a_broken_backward(rank: int) -> None:
    """An optimizer's step behind a backward that raised."""

    def interrupt(_grad: torch.Tensor) -> None:
        raise ArithmeticError

    model, _ = two_units()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    y = model.get_submodule("layers")(x := batch(rank).requires_grad_())
    x.register_hook(interrupt)
    with pytest.raises(ArithmeticError):
        y.sum().backward()
    optimizer.step()


def end_early(rank: int) -> None:
    """A pass that ends before the recorded one did."""
    model, context = two_units(prefetch_order=PrefetchOrder.RECORDED)
    step(model, rank)
    model.get_submodule("layers.first")(batch(rank))
    context.post_backward()


FAILURES_OF_CONTEXTS = [
    name_a_stranger,
    run_inside_the_scope,
    use_without_model,
    hook_outside_backward,
    leave_the_scope_before_backward,
    step_after_a_broken_backward,
    end_early,
]


@pytest.mark.parametrize("fail", FAILURES_OF_CONTEXTS, ids=lambda each: each.__name__)
def test_an_error_of_a_context_says_on_which_rank_in_which_step(
    fail: Callable[[int], None],
) -> None:
    """What concerns no unit in particular."""
    for rank, error in enumerate(raised_by(fail)):
        assert f"on rank {rank}, in step " in error.__notes__[0]
        assert SHAPE.fullmatch(str(error))


@pytest.mark.filterwarnings("ignore:step")
def test_every_statement_that_raises_such_an_error_is_reached() -> None:
    """None is left out of the failures above: the list of statements comes from the source."""
    reached = set()
    for fail in (*FAILURES, *FAILURES_OF_CONTEXTS):
        for frame, line in traceback.walk_tb(raised_by(fail)[0].__traceback__):
            reached.add((Path(frame.f_code.co_filename).name, line))

    unreached = [
        each
        for each in raises()
        if each.is_located and not any((each.file, line) in reached for line in each.lines)
    ]
    assert unreached == []


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
    for error in raised_by(diverge):
        assert "step 1: a pass must repeat the recorded one, got layers.last forward" in str(error)
        assert "expected layers.first forward" in str(error)


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
