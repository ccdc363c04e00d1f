"""Adversaries: what a hostile but legal run does, behind knobs of the schedule line."""

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_sim
from tests.sim.litmus import cpu, on_one_rank


@pytest.mark.parametrize("knob", ["shuffle", "shuffle0", "early", "late2", "Collect"])
def test_a_knob_that_does_not_exist_is_refused(knob: str) -> None:
    """The error lists what there is."""
    with pytest.raises(fsdp_sim.ConfigError, match=r"^a (schedule's )?knob must be "):
        fsdp_sim.simulate(lambda rank: None, 2, knobs=(knob,))


def test_knobs_are_part_of_the_line() -> None:
    """They come back in the effective schedule, and a scheduler may go with them."""
    report = fsdp_sim.simulate(lambda rank: dist.barrier(), 2, knobs=("late", "shuffle3"))

    assert report.schedule == "v1;w2;late;shuffle3"
    fsdp_sim.replay(lambda rank: dist.barrier(), report.schedule)
    drawn = fsdp_sim.simulate(
        lambda rank: dist.barrier(), 3, schedule="v1;w3;shuffle3", scheduler="uniform", seed=1
    )
    assert drawn.schedule.startswith("v1;w3;shuffle3;")


# ---------------------------------------------------------------------- order of sets


def reduce_in_set_order(rank: int) -> list[int]:
    """All-reduce gradients of unequal sizes in the order of a set."""
    gradients = {torch.ones(size) for size in (2, 3, 5)}
    sizes = []
    for gradient in gradients:
        dist.all_reduce(gradient)
        sizes.append(gradient.numel())
    return sizes


def test_a_set_of_streams_has_the_order_of_their_numbers() -> None:
    """Under every PYTHONHASHSEED."""

    def program() -> list[int]:
        streams = [cpu.Stream() for _ in range(16)]
        assert [stream.stream_id for stream in streams] == list(range(1, 17))
        return [stream.stream_id for stream in {*reversed(streams)}]

    assert on_one_rank(program) == list(range(1, 17))


def test_a_set_of_tensors_has_one_order_by_default() -> None:
    """The same on every rank, and in the order of their making."""
    assert fsdp_sim.simulate(reduce_in_set_order, 3).results == [[2, 3, 5]] * 3


def test_shuffled_sets_show_who_issues_collectives_in_set_order() -> None:
    """Some permutation differs between ranks, and the first collective that differs is named."""
    found = []
    for permutation in range(1, 5):
        try:
            fsdp_sim.simulate(reduce_in_set_order, 2, knobs=(f"shuffle{permutation}",))
        except fsdp_sim.CollectiveMismatch as error:
            found.append(error)

    assert found
    assert "sizes" in str(found[0])
    with pytest.raises(fsdp_sim.CollectiveMismatch):
        fsdp_sim.replay(reduce_in_set_order, found[0].schedule)


def orders(rank: int) -> dict[str, list[str]]:
    """Return the iteration order of sets of modules, parameters and sharded parameters."""
    layers = [nn.Linear(2, 2) for _ in range(8)]
    names = {id(layer): f"{number}" for number, layer in enumerate(layers)}
    names |= {id(layer.weight): f"{number}" for number, layer in enumerate(layers)}
    return {
        "modules": [names[id(layer)] for layer in set(layers)],
        "parameters": [names[id(weight)] for weight in {layer.weight for layer in layers}],
    }


@pytest.mark.parametrize("kind", ["modules", "parameters"])
def test_shuffling_permutes_modules_and_parameters_on_each_rank(kind: str) -> None:
    """Each rank has an order of its own under the knob, the same one each time."""
    plain = [each[kind] for each in fsdp_sim.simulate(orders, 2).results]
    one = [each[kind] for each in fsdp_sim.simulate(orders, 2, knobs=("shuffle1",)).results]
    again = [each[kind] for each in fsdp_sim.simulate(orders, 2, knobs=("shuffle1",)).results]
    two = [each[kind] for each in fsdp_sim.simulate(orders, 2, knobs=("shuffle2",)).results]

    assert plain == [[str(number) for number in range(8)]] * 2
    assert one == again
    assert one[0] != one[1]
    assert one != two


def test_what_is_stored_under_an_object_is_found_during_and_after_a_world() -> None:
    """An object has one hash for life, whether it is older than the world or outlives it."""
    older, layer = torch.ones(2), nn.Linear(1, 1)
    table: dict[Any, str] = {older: "tensor", layer: "module"}
    before = torch.Tensor.__hash__, nn.Module.__hash__

    def program(rank: int) -> dict[Any, str]:
        assert (table[older], table[layer]) == ("tensor", "module")
        return {torch.zeros(1): "tensor", nn.Linear(1, 1): "module"}

    (made,) = fsdp_sim.simulate(program, 1).results

    assert [made[key] for key in made] == ["tensor", "module"]
    fsdp_sim.simulate(lambda rank: None, 1)
    assert [made[key] for key in made] == ["tensor", "module"]
    assert (table[older], table[layer]) == ("tensor", "module")
    made.clear()
    fsdp_sim.simulate(lambda rank: None, 1)
    assert (torch.Tensor.__hash__, nn.Module.__hash__) == before


# ---------------------------------------------------------------------- collection of garbage


def depends_on_collection(rank: int) -> str:
    """Leave a cycle behind, pass a point of decision, and look whether the cycle is still there."""
    cycle: list[Any] = [torch.zeros(4)]
    cycle.append(cycle)
    reference = weakref.ref(cycle[0])
    del cycle
    dist.barrier()
    return "there" if reference() is not None else "gone"


def test_garbage_is_collected_where_the_schedule_says() -> None:
    """By default never while the world runs; under the knob each point offers it."""
    by_default = fsdp_sim.simulate(depends_on_collection, 1, knobs=("collect",))
    chosen = fsdp_sim.simulate(depends_on_collection, 1, schedule="v1;w1;collect;0>1;1>1;2>1;3>1")

    assert fsdp_sim.simulate(depends_on_collection, 1).results == ["there"]
    assert by_default.results == ["there"]
    assert chosen.results == ["gone"]


def test_memory_of_collected_garbage_is_freed_there() -> None:
    """The death is an op of the run, in its digest."""
    plain = fsdp_sim.simulate(depends_on_collection, 1, trace=True)
    chosen = fsdp_sim.simulate(
        depends_on_collection, 1, schedule="v1;w1;collect;0>1;1>1;2>1;3>1", trace=True
    )

    frees = [sum(op.kind.value == "free" for op in report.trace.ops) for report in (plain, chosen)]

    assert frees[1] == frees[0] + 1


# ---------------------------------------------------------------------- late values


def gathers(rank: int) -> list[float]:
    """Chain asynchronous and synchronous collectives, all waited for."""
    x = torch.full((2,), float(rank + 1))
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    y = x * 2
    out = [torch.zeros(2) for _ in range(dist.get_world_size())]
    dist.all_gather(out, y)
    dist.broadcast(out[0], 0)
    return [float(part.sum()) for part in out]


def test_late_values_are_there_when_they_are_needed() -> None:
    """A correct program computes the same, whenever values move."""
    plain = fsdp_sim.simulate(gathers, 3)
    late = fsdp_sim.simulate(gathers, 3, knobs=("late",), poison=True)

    assert late.results == plain.results == [[24.0] * 3] * 3
    assert late.trace.digest == plain.trace.digest


def test_values_of_what_is_returned_are_there_at_the_end() -> None:
    """Also those that the program itself never looked at."""

    def program(rank: int) -> torch.Tensor:
        x = torch.ones(2)
        dist.all_reduce(x)
        return x

    results = fsdp_sim.simulate(program, 2, knobs=("late",)).results

    assert [x.tolist() for x in results] == [[2.0, 2.0]] * 2


def reads_without_waiting(rank: int) -> list[float]:
    """Gather on a side stream and read on the default stream, with no wait between them."""
    side, x = torch.cpu.Stream(), torch.ones(2)
    out = torch.zeros(4)
    side.wait_stream(torch.cpu.current_stream())
    with torch.cpu.stream(side):
        dist.all_gather(list(out.chunk(2)), x)
    values: list[float] = (out + 0).tolist()
    return values


def test_late_values_show_what_a_missing_wait_does() -> None:
    """The race is found either way; with late values the result is wrong too."""
    early = fsdp_sim.simulate(reads_without_waiting, 2, strict=False)
    late = fsdp_sim.simulate(reads_without_waiting, 2, strict=False, knobs=("late",))

    assert [finding.kind for finding in early.findings] == ["Race"]
    assert [finding.kind for finding in late.findings] == ["Race"]
    assert late.results[0] == [0.0] * 4


@pytest.mark.parametrize("schedule", ["v1;w4;late;6>0;13>0;15>1", "v1;w4;late;6>0;9>3;13>1;15>0"])
def test_a_host_read_waits_for_a_chain_of_groups(schedule: str) -> None:
    """What another rank's part waits for is needed too, though this rank has no part in it."""

    def program(rank: int) -> float:
        rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        tensor = torch.full((1,), float(2**rank))
        dist.all_reduce(tensor, group=rows[rank // 2])
        dist.all_reduce(tensor, group=columns[rank % 2])
        return tensor.item()

    assert fsdp_sim.simulate(program, 4, schedule=schedule).results == [15.0] * 4


@pytest.mark.parametrize("seed", range(8))
def test_late_values_of_a_chain_of_groups_come_under_any_schedule(seed: int) -> None:
    """Copies behind the collectives read what both have summed."""

    def program(rank: int) -> list[float]:
        rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        out = []
        for _ in range(3):
            tensor = torch.full((1,), float(2**rank))
            dist.all_reduce(tensor, group=rows[rank // 2])
            dist.all_reduce(tensor, group=columns[rank % 2])
            out.append(tensor.clone())
        return [each.item() for each in out]

    report = fsdp_sim.simulate(program, 4, scheduler="pct", seed=seed, steps=60, knobs=("late",))
    assert report.results == [[15.0] * 3] * 4
