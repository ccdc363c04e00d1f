"""The marker fsdp_sim: a test's body as the program of each rank."""

from textwrap import dedent

import pytest

import fsdp_sim.exploration  # noqa: F401  torch must be loaded before pytester takes its snapshot

pytest_plugins = ["pytester"]

CLEAN = """
    import pytest, torch
    import torch.distributed as dist

    @pytest.mark.fsdp_sim(ranks=3, runs=4)
    def test_sum():
        value = torch.full((2,), float(dist.get_rank() + 1))
        dist.all_reduce(value)
        assert value.tolist() == [6.0, 6.0]
"""
RACE = """
    import pytest, torch
    import torch.distributed as dist

    @pytest.mark.fsdp_sim(ranks=2)
    def test_sum():
        value = torch.ones(2)
        stream = torch.cpu.Stream()
        stream.wait_stream(torch.cpu.current_stream())
        with torch.cpu.stream(stream):
            dist.all_reduce(value)
        value.sum()
"""
ORDER = """
    import pytest, torch
    import torch.distributed as dist

    @pytest.mark.fsdp_sim(ranks=2, runs=100)
    def test_order():
        small, large = torch.ones(4), torch.ones(8)
        event = torch.cpu.Event()
        event.record()
        tensors = [large, small] if dist.get_rank() == 0 and event.query() else [small, large]
        for tensor in tensors:
            dist.all_reduce(tensor)
"""


def run(pytester: pytest.Pytester, source: str, *options: str) -> pytest.RunResult:
    """Run a test file in a pytest of its own."""
    pytester.makepyfile(test_it=dedent(source))
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:xdist", *options)


def test_a_clean_test_passes_and_counts_its_schedules(pytester: pytest.Pytester) -> None:
    """The summary says how many schedules were run and how many of them differed."""
    result = run(pytester, CLEAN)

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["fsdp_sim: 1 checks, 4 schedules, * distinct orderings, *"])


def test_a_race_fails_the_test_with_three_lines(pytester: pytest.Pytester) -> None:
    """What, the smallest schedule, and the command that replays this test."""
    result = run(pytester, RACE)

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "Race: rank * may still write it",
            "      test_it.py:10  dist.all_reduce(value)",
            "*- fsdp_sim -*",
            "Race: rank * may still write it",
            "smallest: v1;w2",
            "replay with: pytest test_it.py::test_sum --fsdp-sim-replay .fsdp_sim/test_it.py-test_sum/*",
        ]
    )
    assert result.stdout.str().count("replay with") == 1


def test_a_test_may_say_cuda(pytester: pytest.Pytester) -> None:
    """The knob of the marker gives each rank a GPU."""
    source = """
    import pytest, torch
    import torch.distributed as dist

    @pytest.mark.fsdp_sim(ranks=2, runs=2, knobs=("cuda",))
    def test_sum():
        torch.cuda.set_device(dist.get_rank())
        ones = torch.ones(2, device="cuda")
        dist.all_reduce(ones)
        assert ones.is_cuda and ones.tolist() == [2.0, 2.0]
    """

    run(pytester, source).assert_outcomes(passed=1)


def test_a_failure_leaves_a_replay_file_a_timeline_and_a_picture(pytester: pytest.Pytester) -> None:
    """They lie in a folder of the test, which git ignores."""
    run(pytester, RACE)

    folder = pytester.path / ".fsdp_sim"
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    assert names == [
        ".gitignore",
        "test_it.py-test_sum/picture.svg",
        "test_it.py-test_sum/replay.json",
        "test_it.py-test_sum/timeline.json",
    ]


def test_an_order_of_hosts_is_explored_and_made_small(pytester: pytest.Pytester) -> None:
    """A failure that program order does not show is found and made small."""
    result = run(pytester, ORDER)

    result.assert_outcomes(failed=1)
    result.stdout.re_match_lines(
        [r"smallest: v1;w2(;\d+>1){1,2} \(from \d+ deviations, after \d+ sch.*"]
    )


def test_the_replay_command_follows_the_file_alone(pytester: pytest.Pytester) -> None:
    """One run, the same finding, the same digest; other tests are left out."""
    other = "\n    def test_other():\n        pass\n"
    run(pytester, ORDER + other)
    file = ".fsdp_sim/test_it.py-test_order/replay.json"

    result = run(pytester, ORDER + other, "--fsdp-sim-replay", file)

    result.assert_outcomes(failed=1, deselected=0)
    result.stdout.fnmatch_lines(
        ["fsdp_sim replay: the same finding came up (CollectiveMismatch), with the same digest"]
    )


def test_a_replay_of_mended_code_says_that_the_finding_is_gone(pytester: pytest.Pytester) -> None:
    """Clean under the recorded schedule is a pass that says so."""
    run(pytester, RACE)
    mended = RACE.replace("value.sum()", "torch.cpu.current_stream().wait_stream(stream)")

    result = run(pytester, mended, "--fsdp-sim-replay", ".fsdp_sim/test_it.py-test_sum/replay.json")

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["fsdp_sim replay: the schedule fits and the run is clean: Race *"])


def test_a_replay_that_no_longer_fits_fails_as_diverged(pytester: pytest.Pytester) -> None:
    """It never passes."""
    run(pytester, ORDER)
    changed = ORDER.replace("event.query()", "False").replace("dist.all_reduce(tensor)", "pass")

    result = run(
        pytester, changed, "--fsdp-sim-replay", ".fsdp_sim/test_it.py-test_order/replay.json"
    )

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["fsdp_sim replay: diverged: step * wants 1, *"])


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("ranks=0", "ranks must be a positive integer, got 0"),
        ("rank=4", "the marker fsdp_sim takes ranks, runs, *, got rank; did you mean ranks?"),
        ("4", "the marker fsdp_sim takes keywords alone, such as ranks=4, got (4,)"),
        ("runs=0", "runs must be a positive integer, got 0"),
        ("time_limit=-1", "time_limit must be a finite number of seconds above 0, got -1"),
        (
            "scheduler='round'",
            "explore's scheduler must be one of pct, uniform, portfolio, exhaustive, got 'round'",
        ),
    ],
)
def test_a_wrong_marker_is_refused(pytester: pytest.Pytester, marker: str, message: str) -> None:
    """The error says what must hold, once, and is all that is shown; the body is not run."""
    source = f"""
    import pytest

    @pytest.mark.fsdp_sim({marker})
    def test_it():
        print("was run")
    """

    result = run(pytester, source)

    assert result.ret == 1
    result.stdout.fnmatch_lines([f"*ConfigError: {message.replace('[', '[[]')}"])
    result.stdout.no_fnmatch_line("was run")
    result.stdout.no_fnmatch_line("*/fsdp_sim/*")
    result.stdout.no_fnmatch_line("During handling of *")


@pytest.mark.parametrize(
    "source",
    [
        """
        import pytest, unittest

        @pytest.mark.fsdp_sim
        class TestIt(unittest.TestCase):
            def test_it(self):
                pass
        """,
        """
        import pytest

        @pytest.mark.fsdp_sim
        async def test_it():
            pass
        """,
    ],
    ids=["unittest", "coroutine"],
)
def test_what_cannot_be_a_rank_program_is_refused(pytester: pytest.Pytester, source: str) -> None:
    """The error says what to call instead."""
    result = run(pytester, source)

    assert result.ret == 1
    result.stdout.fnmatch_lines(["*ConfigError: a test marked fsdp_sim must be a plain function *"])


def test_a_tensor_from_a_fixture_is_refused(pytester: pytest.Pytester) -> None:
    """All ranks would train one module, which no hardware does."""
    source = """
    import pytest, torch

    @pytest.fixture
    def model():
        return torch.nn.Linear(2, 2)

    @pytest.mark.fsdp_sim
    def test_it(model):
        pass
    """

    result = run(pytester, source)

    result.stdout.fnmatch_lines(["*ConfigError: argument 'model' *make it in the test's body"])


def test_a_failed_assertion_of_a_rank_shows_its_own_line(pytester: pytest.Pytester) -> None:
    """The user's frame is there; the simulator's are not."""
    result = run(pytester, CLEAN.replace("6.0, 6.0", "6.0, 7.0"))

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*assert value.tolist() == [[]6.0, 7.0]", "AssertionError: *"])
    result.stdout.no_fnmatch_line("*fsdp_sim/engine/world.py*")
    result.stdout.no_fnmatch_line("*fsdp_sim/exploration.py*")


def test_parametrised_methods_of_a_marked_class_run_on_ranks(pytester: pytest.Pytester) -> None:
    """The marker may stand on a class; parameters reach the body."""
    source = """
    import pytest
    import torch.distributed as dist

    @pytest.mark.fsdp_sim(ranks=2)
    class TestIt:
        @pytest.mark.parametrize("factor", [1, 2])
        def test_it(self, factor):
            assert dist.get_world_size() * factor in (2, 4)
    """

    run(pytester, source).assert_outcomes(passed=2)


def test_a_skip_inside_a_rank_skips_the_test(pytester: pytest.Pytester) -> None:
    """Pytest's own outcomes pass through the ranks."""
    source = """
    import pytest

    @pytest.mark.fsdp_sim(ranks=2)
    def test_it():
        pytest.skip("not here")
    """

    run(pytester, source).assert_outcomes(skipped=1)
