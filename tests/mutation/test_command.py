"""``fsdp-sim mutate``: its table, its JSON, its exit status."""

import json
from pathlib import Path

from click.testing import CliRunner, Result

from fsdp_sim.cli import main

PACKAGE = "tests.mutation.toy"
WAITING = """
import torch
from tests.mutation import toy

def needed(rank):
    return toy.reduced_by_work(torch.ones(4))

def idle(rank):
    return toy.waited_for_nothing(torch.ones(4))
"""


def invoke(folder: Path, function: str, *options: str) -> Result:
    """Break the toy package while a function of a file runs."""
    file = folder / "programs.py"
    file.write_text(WAITING)
    program = ("--program", f"{file}:{function}")
    return CliRunner().invoke(main, ["mutate", PACKAGE, *program, "--ranks", "2", *options])


def test_json_is_all_that_standard_output_gets(tmp_path: Path) -> None:
    """A program can read it."""
    result = invoke(tmp_path, "needed", "--json")

    (record,) = json.loads(result.stdout)["mutants"]
    assert result.exit_code == 0
    assert (record["break"], record["status"], record["killed_by"]) == (
        "drop Work.wait",
        "killed",
        "Race",
    )


def test_a_survivor_leaves_with_1_and_its_proof(tmp_path: Path) -> None:
    """The table is followed by the reason why it survives."""
    result = invoke(tmp_path, "idle", "--schedules", "1")

    assert result.exit_code == 1
    assert "wait_stream: the wait does nothing" in result.stdout
    assert "it orders no two operations that conflict, in any program" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("1 sites: 0 killed, 1 survived (1 redundant")


def test_calls_that_no_program_makes_are_named(tmp_path: Path) -> None:
    """A hole in the programs is no success."""
    result = invoke(tmp_path, "needed")

    assert "no program makes the call tests/mutation/toy.py:" in result.stdout


def test_a_package_without_programs_is_a_usage_error() -> None:
    """The error says what to name."""
    result = CliRunner().invoke(main, ["mutate", "json"])

    assert result.exit_code == 2
    assert "name some with --program" in result.output
