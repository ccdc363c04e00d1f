"""Strategies: arguments are checked, what comes is valid, and it shrinks to the simplest."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import fsdp_sim
from fsdp_core.agreement import agree_on_events
from fsdp_core.collectives import MeshAxes
from fsdp_core.errors import StateError
from fsdp_sim import strategies
from fsdp_sim.errors import ConfigError
from fsdp_sim.program import ModuleSpec, ProgramSpec, UnitSpec, check_program
from fsdp_sim.program.exactness import is_exact
from fsdp_sim.program.features import FEATURES, features
from fsdp_sim.program.spec import LayerSpec
from fsdp_sim.program.tree import units, walk
from fsdp_sim.schedule import Schedule
from fsdp_sim.strategies import (
    FaultPlan,
    Orders,
    OwnerMap,
    contexts,
    execution_orders,
    fault_plans,
    invalid_programs,
    layers,
    meshes,
    module_trees,
    optimizers,
    owner_maps,
    placements,
    policies,
    programs,
    schedules,
    steps,
)

LEAF = ModuleSpec(LayerSpec(), UnitSpec())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: meshes(ranks_max=0), "ranks_max must be a whole number from 1 to 1024, got 0"),
        (lambda: meshes(ranks_min=3, ranks_max=2), "the minimum must be at most the maximum"),
        (lambda: meshes(ranks_min=3, ranks_max=3), "exact asks for powers of two"),
        (lambda: meshes(axes_max=True), "axes_max must be a whole number from 1 to 3, got True"),
        (lambda: module_trees(depth_max=-1), "depth_max must be a whole number from 0 to 8"),
        (lambda: module_trees(modules_max=0), "modules_max must be a whole number from 1 to 64"),
        (lambda: layers(rows_min=4, rows_max=3), "rows: the minimum must be at most the maximum"),
        (lambda: placements((2,), kinds=("hsdp",)), "kinds must be some of no_shard, zero1"),
        (lambda: placements((2,), kinds=()), "kinds must be some of"),
        (lambda: policies(budget_max=-1), "budget_max must be a whole number from 0"),
        (lambda: owner_maps(("w",), 0), "world_size must be a whole number from 1 to 1024, got 0"),
        (lambda: owner_maps(("w",), 1, kinds=("disagreeing",)), "got world_size 1"),
        (lambda: owner_maps((), 2, kinds=("missing",)), "must name one at least"),
        (lambda: owner_maps(("w",), 2, kinds=("lost",)), "kinds must be some of valid, missing"),  # type: ignore[arg-type]
        (lambda: execution_orders(()), "units must be one or more distinct names, got []"),
        (lambda: execution_orders(("a",), 1, divergent=True), "world_size must be a whole number"),
        (lambda: execution_orders(("a",), length_max=0), "length_max must be a whole number"),
        (lambda: schedules(0), "world_size must be a whole number from 1"),
        (lambda: schedules(2, deviations_max=-1), "deviations_max must be a whole number"),
        (lambda: steps(LEAF, 2, steps_max=0), "steps_max must be a whole number from 1"),
        (lambda: programs(ranks_max=0), "ranks_max must be a whole number"),
        (lambda: programs(steps_max=-1), "steps_max must be a whole number"),
        (lambda: fault_plans(2, actions=("melt",)), "actions must be some of delay, crash"),
        (lambda: fault_plans(2, sites=("moon",)), "sites must be some of issue, alloc"),
        (lambda: fault_plans(2, actions=("torn",)), "actions at these sites must be some of"),
        (lambda: fault_plans(2, at_max=0), "at_max must be a whole number from 1"),
        (lambda: invalid_programs(kinds=("evil",)), "kinds must be some of divisor not positive"),
    ],
)
def test_arguments_are_checked_when_the_strategy_is_made(
    make: Callable[[], object], message: str
) -> None:
    """The error names the argument, its range and what came; nothing is drawn."""
    with pytest.raises(ConfigError) as caught:
        make()

    assert message in str(caught.value)


def examples() -> list[str]:
    """Return the examples of the table of strategies in ``docs/strategies.md``."""
    text = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text()
    table = text.partition("| strategy | draws | example |")[2].partition("\n\n")[0]
    return [row.split("|")[-2].strip().strip("`") for row in table.splitlines()[2:]]


@pytest.mark.parametrize("example", examples())
def test_every_strategy_s_example_draws(example: str) -> None:
    """As the page shows it; ``tree`` is a model, as any."""
    strategy = eval(example, {**vars(strategies), "tree": LEAF})
    one = settings(max_examples=1, database=None, phases=[Phase.generate])

    assert find(strategy, lambda _: True, settings=one) is not None


@given(programs())
def test_programs_are_valid_and_exact(program: ProgramSpec) -> None:
    """Every drawn program can be built, and its sums are exact."""
    check_program(program)

    assert is_exact(program)
    assert units(program)


@given(module_trees(depth_max=1, children_max=2, modules_max=3))
def test_trees_keep_their_limits(tree: ModuleSpec) -> None:
    """Depth, children and modules stay within what was asked for."""
    nodes = dict(walk(tree))

    assert len(nodes) <= 3
    assert all(path.count(".") == 0 for path in nodes)
    assert any(module.layer for module in nodes.values())


@given(meshes(ranks_min=2, ranks_max=8, axes_max=2))
def test_meshes_keep_their_limits(mesh: tuple[int, ...]) -> None:
    """Powers of two, within the ranks and axes asked for."""
    size = 1
    for axis in mesh:
        size *= axis

    assert 2 <= size <= 8
    assert size & (size - 1) == 0
    assert len(mesh) <= 2


@given(owner_maps(("a", "b"), 3, kinds=("missing", "out_of_range", "negative", "disagreeing")))
def test_wrong_owner_maps_are_wrong_in_one_entry_only(drawn: OwnerMap) -> None:
    """The entry is named by what the error must contain."""
    others = [owner for owner in drawn.owners if owner.parameter != drawn.match]

    assert drawn.error == "ConfigError"
    assert all(0 <= owner.owner < 3 and owner.ranks is None for owner in others)


@given(st.data())
def test_divergent_orders_say_where_they_part(data: st.DataObject) -> None:
    """All ranks agree before the position, and not all of them at it."""
    orders = data.draw(execution_orders(("a", "b", "c"), 3, divergent=True))
    place = orders.first_difference

    assert place is not None
    assert len({events[:place] for events in orders.ranks}) == 1
    assert len({events[place : place + 1] for events in orders.ranks}) == 2


@settings(max_examples=10)
@given(execution_orders(("a", "b"), 2), execution_orders(("a", "b"), 2, divergent=True))
def test_ranks_that_record_divergent_orders_raise_the_error_drawn_with_them(
    same: Orders, other: Orders
) -> None:
    """On every rank; nothing is raised where they agree."""

    def program(rank: int) -> str:
        axes = MeshAxes.of(init_device_mesh("cpu", (2,)))
        agree_on_events([(0, f"{unit} {phase}") for unit, phase in same.ranks[rank]], axes)
        try:
            agree_on_events([(0, f"{unit} {phase}") for unit, phase in other.ranks[rank]], axes)
        except StateError as error:
            return str(error)
        return ""

    said = fsdp_sim.simulate(program, 2).results

    assert (same.error, other.error) == (None, "StateError")
    assert all(other.match in message for message in said)


@given(execution_orders(("a", "b"), 3))
def test_consistent_orders_are_the_same_on_all_ranks(orders: Any) -> None:
    """Forwards, then as many backwards."""
    assert len(set(orders.ranks)) == 1
    assert orders.first_difference is None
    phases = [phase for _, phase in orders.ranks[0]]
    assert phases == sorted(phases, reverse=True)
    assert phases.count("forward") == phases.count("backward")


@given(schedules(4, deviations_max=3, step_max=50))
def test_schedules_are_lines_that_parse(line: str) -> None:
    """Each drawn line is the line that its schedule prints."""
    schedule = Schedule.parse(line)

    assert str(schedule) == line
    assert len(schedule.deviations) <= 3
    assert all(deviation.step <= 50 for deviation in schedule.deviations)


@pytest.mark.parametrize(
    ("strategy", "simplest"),
    [
        (meshes(), (1,)),
        (placements((2,)), "zero3"),
        (policies(), UnitSpec()),
        (contexts(), ProgramSpec(LEAF).context),
        (optimizers(), ProgramSpec(LEAF).optimizer),
        (module_trees(), LEAF),
        (schedules(4), "v1;w4"),
        (fault_plans(2), FaultPlan(("delay:issue@rank=0,at=1",), ())),
        (steps(LEAF, 2), ProgramSpec(LEAF).steps),
        (programs(), ProgramSpec(LEAF, mesh=(1,), width=1)),
    ],
)
def test_a_strategy_shrinks_to_the_simplest(strategy: Any, simplest: Any) -> None:
    """What is left when nothing is needed."""
    assert find(strategy, lambda _: True) == simplest


@pytest.mark.parametrize("feature", ["tied", "ranks differ"])
def test_a_program_shrinks_to_little_more_than_the_feature_that_is_needed(feature: str) -> None:
    """One unit and one step survive, whatever was drawn at first."""
    options = settings(max_examples=2000, database=None, deadline=None, derandomize=True)
    drawn = programs(modules_max=4, depth_max=1, steps_max=2, exceptions=False)

    found = find(drawn, lambda program: feature in features(program), settings=options)

    assert len(units(found)) == 1
    assert len(found.steps) == 1


def test_every_feature_comes_up() -> None:
    """Of 400 programs none of the features is missing; a third of them have units on two levels."""
    counts: Counter[str] = Counter()

    @settings(
        max_examples=400,
        database=None,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def count(program: ProgramSpec) -> None:
        counts.update(features(program))

    count()

    assert [name for name in FEATURES if not counts[name]] == []
    assert counts["units on two levels"] > 400 / 4
