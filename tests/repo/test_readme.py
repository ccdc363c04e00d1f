"""The README: its tree, its commands, its example."""

import os
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

import fsdp_sim
from ci.tree import with_tree
from fsdp_sim.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CODE_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
COMMAND_LINE = re.compile(r"^    (?=ci/|torchrun |fsdp-sim )(.*)$", re.MULTILINE)


def example(*, mended: bool) -> dict[str, object]:
    """Run the README's example as a module, and return what it defines."""
    code = CODE_BLOCK.findall(README)[0]
    if mended:
        code = code.replace("# missing: ", "")
    namespace: dict[str, object] = {"__name__": "readme"}
    exec(compile(code, "README.md", "exec"), namespace)
    return namespace


def test_tree_lists_the_files_with_their_docstrings() -> None:
    """The tree is what ci/tree.py writes today."""
    assert with_tree(README) == README, "run ci/tree.py"


def test_first_two_commands_are_scripts_that_can_be_run() -> None:
    """A newcomer can paste the two commands."""
    commands = [shlex.split(line, comments=True)[0] for line in COMMAND_LINE.findall(README)]

    assert commands[:2] == ["ci/demo", "ci/test"]
    assert all(os.access(ROOT / command, os.X_OK) for command in commands[:2])


def test_files_that_commands_name_exist() -> None:
    """No command of the README names a file that is gone."""
    words = [word for line in COMMAND_LINE.findall(README) for word in shlex.split(line, True)]
    files = [word for word in words if word.endswith(".py")]

    assert files
    assert all((ROOT / file).exists() for file in files)


def test_commands_of_fsdp_sim_exist() -> None:
    """Each `fsdp-sim VERB` of the README is a verb that says what it does."""
    verbs = set(re.findall(r"^    fsdp-sim (\w+)", README, re.MULTILINE))

    assert verbs
    for verb in sorted(verbs):
        result = CliRunner().invoke(main, [verb, "--help"])
        assert result.exit_code == 0, result.output


def test_example_catches_its_bug() -> None:
    """The example fails as the text beside it says."""
    test = example(mended=False)["test_the_sum_waits_for_the_reduction"]

    assert callable(test)
    with pytest.raises(fsdp_sim.Race):
        test()


def test_example_passes_with_the_missing_line() -> None:
    """The line that the example's comment names is the whole fix."""
    test = example(mended=True)["test_the_sum_waits_for_the_reduction"]

    assert callable(test)
    test()
