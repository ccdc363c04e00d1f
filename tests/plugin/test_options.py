"""Options of the plugin, under xdist too, and what it costs to have it installed."""

import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

import fsdp_sim.exploration  # noqa: F401  torch must be loaded before pytester takes its snapshot

pytest_plugins = ["pytester"]

ORDER = """
    import fsdp_sim, pytest, torch
    import torch.distributed as dist

    @pytest.mark.fsdp_sim(ranks=2, runs=3)
    @pytest.mark.parametrize("swaps", [False, True])
    def test_it(swaps):
        small, large = torch.ones(4), torch.ones(8)
        event = torch.cpu.Event()
        event.record()
        is_swapped = swaps and dist.get_rank() == 0 and event.query()
        fsdp_sim.sometimes("swapped", is_swapped)
        fsdp_sim.sometimes("a third rank", dist.get_rank() == 2)
        for tensor in [large, small] if is_swapped else [small, large]:
            dist.all_reduce(tensor)
"""


def run(pytester: pytest.Pytester, source: str, *options: str) -> pytest.RunResult:
    """Run a test file in a pytest of its own."""
    pytester.makepyfile(test_it=dedent(source))
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)


def test_the_command_line_goes_before_the_marker(pytester: pytest.Pytester) -> None:
    """The runs that are asked for are made, and the header says so."""
    result = run(pytester, ORDER, "-k", "False", "--fsdp-sim-runs", "7", "--fsdp-sim-seed", "5")

    result.stdout.fnmatch_lines(["fsdp_sim: seed 5, runs 7", "fsdp_sim: 1 checks, 7 schedules, *"])


def test_a_time_limit_ends_a_search_after_the_run_in_program_order(
    pytester: pytest.Pytester,
) -> None:
    """However short it is, program order is run."""
    limit = ("--fsdp-sim-time-limit", "1e-9")
    result = run(pytester, ORDER, "-k", "False", "--fsdp-sim-runs", "100", *limit)

    result.stdout.fnmatch_lines(["fsdp_sim: 1 checks, 1 schedules, *"])


def test_the_last_operations_are_shown_when_asked_for(pytester: pytest.Pytester) -> None:
    """So many lines of the trace end the block."""
    result = run(pytester, ORDER, "--fsdp-sim-runs", "12", "--fsdp-sim-log", "3")

    lines = result.stdout.lines
    start = lines.index("last operations:")
    assert all("rank" in line for line in lines[start + 1 : start + 4])


def test_a_portfolio_splits_a_test_and_names_it_without_its_part(pytester: pytest.Pytester) -> None:
    """Each part has schedules of its own; the replay command is that of the whole test."""
    result = run(pytester, ORDER, "--fsdp-sim-portfolio", "3", "--fsdp-sim-runs", "15")

    assert result.parseoutcomes()["passed"] >= 3
    assert "pytest 'test_it.py::test_it[True]' --fsdp-sim-replay" in result.stdout.str()


def test_workers_of_xdist_send_their_statistics(pytester: pytest.Pytester) -> None:
    """The parts of a portfolio run in workers; blocks, sums and probes come out in one place."""
    options = ("-n", "2", "--fsdp-sim-portfolio", "2", "--fsdp-sim-runs", "12")
    result = run(pytester, ORDER, *options)

    assert result.ret == 1
    result.stdout.re_match_lines(
        [
            r"smallest: v1;w2;.*",
            r"fsdp_sim: 4 checks, .*, 1 of 2 probes held",
            "never exercised: a third rank",
        ]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--fsdp-sim-runs", "0"), "*fsdp-sim-runs: must be a whole number of at least 1, got '0'"),
        (
            ("--fsdp-sim-time-limit", "0"),
            "*limit: must be a finite number of seconds above 0, got '0'",
        ),
        (
            ("--fsdp-sim-time-limit", "x"),
            "*limit: must be a finite number of seconds above 0, got 'x'",
        ),
        (
            ("--fsdp-sim-time-limit", "inf"),
            "*must be a finite number of seconds above 0, got 'inf'",
        ),
        (("--fsdp-sim-log", "-1"), "*log: must be a whole number of at least 0, got '-1'"),
        (("--fsdp-sim-scheduler", "round"), "*invalid choice: 'round'*"),
        (("--fsdp-sim-replay", "no.json"), "*a replay file must be a readable file of text, got *"),
    ],
)
def test_a_wrong_option_is_a_usage_error(
    pytester: pytest.Pytester, options: tuple[str, ...], message: str
) -> None:
    """Nothing is collected."""
    result = run(pytester, ORDER, *options)

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])


def test_a_replay_of_a_test_that_is_gone_is_a_usage_error(pytester: pytest.Pytester) -> None:
    """It is never a pass."""
    run(pytester, ORDER, "--fsdp-sim-runs", "12")
    (file,) = pytester.path.glob(".fsdp_sim/*/replay.json")

    result = run(pytester, ORDER.replace("test_it", "test_other"), "--fsdp-sim-replay", str(file))

    assert result.ret == pytest.ExitCode.USAGE_ERROR


def test_an_installed_plugin_imports_neither_torch_nor_hypothesis(
    pytester: pytest.Pytester,
) -> None:
    """A session without such tests pays nothing."""
    source = """
    import sys

    def test_it():
        assert not {"torch", "fsdp_sim.testing", "fsdp_sim.verbs"} & set(sys.modules)
    """
    pytester.makepyfile(dedent(source))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:hypothesispytest"]

    done = subprocess.run(command, capture_output=True, text=True, cwd=pytester.path, check=False)

    assert done.returncode == 0, done.stdout


def test_the_command_line_lets_pytest_follow_the_file_of_a_test(pytester: pytest.Pytester) -> None:
    """``fsdp-sim replay FILE`` takes every replay file."""
    run(pytester, ORDER, "--fsdp-sim-runs", "12")
    (file,) = pytester.path.glob(".fsdp_sim/*/replay.json")
    # As installed without --editable: pytest reads the list of files, and finds them imported already.
    installed = pytester.mkdir("installed-0.dist-info")
    (installed / "METADATA").write_text("Name: installed\nVersion: 0\n")
    (installed / "RECORD").write_text("fsdp_sim/__init__.py,,\n")
    (installed / "entry_points.txt").write_text("[pytest11]\nharmless = json\n")
    command = [sys.executable, "-m", "fsdp_sim.cli", "replay", str(file)]

    done = subprocess.run(command, capture_output=True, text=True, cwd=pytester.path, check=False)

    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "fsdp_sim replay: the same finding came up (CollectiveMismatch)" in done.stdout
    assert "Warning" not in done.stdout


def test_every_option_is_described(pytester: pytest.Pytester) -> None:
    """The page on testing names each option, and none that is not there."""
    page = Path(__file__).parents[2] / "docs" / "testing.md"
    told = set(re.findall(r"--fsdp-sim-[a-z-]+", page.read_text()))
    shown = pytester.runpytest_inprocess("--help", "-p", "no:cacheprovider").stdout.str()

    assert told == set(re.findall(r"--fsdp-sim-[a-z-]+", shown))
