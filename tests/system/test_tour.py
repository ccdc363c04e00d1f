"""What ci/demo promises, on few steps: parity to the last bit, and both planted bugs."""

import argparse

import torch

import fsdp_sim
from ci.tour import bugs
from ci.tour.figures import StepFigures, findings_of_steps, step_figures
from ci.tour.reference import train_at_once, train_in_turn
from ci.tour.simulated import train_on_rank, whole_weights
from examples.train_lm import make_model, parse
from fsdp_sim.errors import Finding, OpSite

RANKS, STEPS = 4, 3


def simulated(options: argparse.Namespace) -> fsdp_sim.Report:
    """Train sharded on simulated ranks, and keep the trace."""
    return fsdp_sim.simulate(train_on_rank, RANKS, args=(options, lambda: None), trace=True)


def test_sharded_and_unsharded_training_are_equal_bit_for_bit() -> None:
    """Losses of all steps and each weight after the last."""
    options = parse(["--steps", str(STEPS)])
    report, model = simulated(options), make_model(options)
    losses = list(train_in_turn(model, options, RANKS))
    sharded = whole_weights(report.results)

    assert report.results[0].losses == losses
    for name, weight in model.named_parameters():
        assert torch.equal(sharded[name], weight), name


def test_the_reference_is_the_training_of_one_large_batch() -> None:
    """Adding in turn is the same mathematics; before the first update losses differ by rounding only."""
    options = parse(["--steps", "1"])
    in_turn = list(train_in_turn(make_model(options), options, RANKS))
    at_once = list(train_at_once(options, RANKS))

    # Two float32 means near 6, taken in two orders: four units in the last place.
    assert abs(in_turn[0] - at_once[0]) <= 16 * torch.finfo(torch.float32).eps


def test_each_step_gathers_ahead_of_compute() -> None:
    """Five units: each gathered forward and backward, all but the first issued ahead; one reduction each."""
    options = parse(["--steps", str(STEPS)])
    units = options.blocks + 1
    model_nbytes = sum(weight.nbytes for weight in make_model(options).parameters())
    steps = step_figures(simulated(options).trace.ops, rank=0)

    assert len(steps) == STEPS
    for step in steps:
        assert (step.all_gathers, step.reduce_scatters) == (2 * units, units)
        assert step.ahead >= 2 * (options.blocks - 1)
        assert 0 < step.peak_full_nbytes < model_nbytes


def test_figures_count_nothing_outside_steps() -> None:
    """A trace without a root's forward has no steps."""
    assert step_figures([], rank=0) == []
    assert StepFigures() == StepFigures(0, 0, 0, 0)


def test_a_finding_belongs_to_the_step_in_which_its_later_op_runs() -> None:
    """By the rank's own count of ops; what comes before the first step counts there."""
    steps = [[StepFigures(first_op=10), StepFigures(first_op=20)] for _ in range(2)]

    def found(rank: int, index: int) -> Finding:
        return Finding("Race", "", (OpSite(rank, index, "mm", "stream 0", None),))

    assert findings_of_steps([found(1, 25), found(0, 19), found(0, 3)], steps) == [2, 1]


def test_a_missing_wait_is_found_on_the_default_schedule() -> None:
    """A race between the gather and the compute that should have waited, with both places named."""
    report = bugs.run_in_order(bugs.MISSING_WAIT)
    race = next(finding for finding in report.findings if finding.kind == "Race")

    assert report.schedule == "v1;w2"
    assert "all_gather" in {site.name for site in race.ops}
    assert all(site.source is not None for site in race.ops)


def test_an_order_by_query_is_found_by_exploration_alone() -> None:
    """Clean by default; one deviation is enough, and its replay has the same digest."""
    found = bugs.explore(bugs.ORDER_BY_QUERY)
    command = bugs.replay_command(bugs.ORDER_BY_QUERY, found.schedule)

    assert bugs.run_in_order(bugs.ORDER_BY_QUERY).findings == ()
    assert found.schedule.count(">") == 1
    assert found.trace.digest in bugs.replay_elsewhere(command)
