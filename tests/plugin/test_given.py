"""Tests that draw: the marker and the helpers inside Hypothesis's ``given``."""

from textwrap import dedent

import pytest

import fsdp_sim.exploration  # noqa: F401  torch must be loaded before pytester takes its snapshot

pytest_plugins = ["pytester"]

MARKED = """
    import threading
    import pytest, torch
    import torch.distributed as dist
    from hypothesis import given, settings, strategies as st

    THREADS = set()

    @st.composite
    def sizes(draw):
        THREADS.add(threading.current_thread().name)
        return draw(st.integers(1, 9))

    @pytest.mark.fsdp_sim(ranks=2)
    @settings(max_examples=20, deadline=None, database=None, derandomize=True)
    @given(size=sizes())
    def test_it(size):
        value = torch.ones(size)
        stream = torch.cpu.Stream()
        stream.wait_stream(torch.cpu.current_stream())
        with torch.cpu.stream(stream):
            dist.all_reduce(value)
        if size < 3:
            torch.cpu.current_stream().wait_stream(stream)
        value.sum()

    def test_draws_are_made_on_the_test_thread():
        assert THREADS == {threading.current_thread().name}
"""
HELPED = """
    import torch
    import torch.distributed as dist
    from hypothesis import given, settings, strategies as st
    from fsdp_sim.strategies import schedules
    from fsdp_sim.testing import check, checking

    def order(rank):
        small, large = torch.ones(4), torch.ones(8)
        event = torch.cpu.Event()
        event.record()
        tensors = [large, small] if rank == 0 and event.query() else [small, large]
        for tensor in tensors:
            dist.all_reduce(tensor)

    @settings(max_examples=300, deadline=None, database=None, derandomize=True)
    @given(line=schedules(2, step_max=8))
    def test_schedule(line):
        check(order, ranks=2, schedule=line)

    @settings(max_examples=5, deadline=None, database=None, derandomize=True)
    @given(limit=st.integers(1, 3))
    def test_block(limit):
        with checking(ranks=2, runs=20) as run:
            run(lambda rank: None)
            run(order)
"""


def run(pytester: pytest.Pytester, source: str, *options: str) -> pytest.RunResult:
    """Run a test file in a pytest of its own."""
    pytester.makepyfile(test_it=dedent(source))
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:xdist", *options)


def test_a_marked_property_shrinks_to_its_smallest_example(pytester: pytest.Pytester) -> None:
    """Each example is run on ranks; what is drawn is drawn outside them."""
    result = run(pytester, MARKED)

    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["Race: *", "Fa* test_it(", "smallest: v1;w2  size=3"])


def test_the_replay_of_a_property_draws_nothing(pytester: pytest.Pytester) -> None:
    """The file holds what was drawn, so one example is run, without a database."""
    run(pytester, MARKED)
    file = ".fsdp_sim/test_it.py-test_it/replay.json"

    result = run(
        pytester,
        MARKED.replace("draw(st.integers(1, 9))", "draw(st.integers(1, 9)) // 0"),
        "--fsdp-sim-replay",
        file,
    )

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["fsdp_sim replay: the same finding came up (Race), with the same *"]
    )


def test_a_drawn_schedule_shrinks_to_one_deviation(pytester: pytest.Pytester) -> None:
    """A line is drawn up front, as data, and made small by Hypothesis alone."""
    result = run(pytester, HELPED, "-k", "schedule")

    result.assert_outcomes(failed=1, deselected=1)
    result.stdout.re_match_lines([r"smallest: v1;w2;\d+>1  line='v1;w2;\d+>1'"])


def test_a_block_knows_which_of_its_runs_failed(pytester: pytest.Pytester) -> None:
    """The replay leaves the first run alone and follows the schedule in the second."""
    run(pytester, HELPED, "-k", "block")

    result = run(
        pytester, HELPED, "--fsdp-sim-replay", ".fsdp_sim/test_it.py-test_block/replay.json"
    )

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["fsdp_sim replay: the same finding came up (CollectiveMismatch), with the same digest"]
    )


def test_data_is_refused_inside_ranks(pytester: pytest.Pytester) -> None:
    """A draw on a rank's thread would depend on the schedule."""
    source = """
    import pytest
    from hypothesis import given, strategies as st

    @pytest.mark.fsdp_sim(ranks=2)
    @given(data=st.data())
    def test_it(data):
        data.draw(st.integers())
    """

    result = run(pytester, source)

    result.stdout.fnmatch_lines(["*argument 'data' * must be drawn before the ranks start*"])


def test_the_profile_is_there_without_being_imported(pytester: pytest.Pytester) -> None:
    """``--hypothesis-profile fsdp_sim`` needs no line in a conftest."""
    source = """
    from hypothesis import settings

    def test_it():
        assert settings().deadline is None
    """

    run(pytester, source, "--hypothesis-profile", "fsdp_sim").assert_outcomes(passed=1)
