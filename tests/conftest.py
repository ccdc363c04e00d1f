"""What every test starts with: drawn examples that are the same each time, and one torch thread."""

from shutil import rmtree
from tempfile import mkdtemp

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("same_each_time", derandomize=True, deadline=None, database=None)
settings.load_profile("same_each_time")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the tests that are marked `everywhere` run on processes; see `tests/core/worlds.py`."""
    parser.addoption(
        "--ranks",
        choices=("simulated", "cpu", "cuda"),
        default="simulated",
        help="simulated ranks, or the processes of the launcher that started pytest, on CPUs or GPUs",
    )
    parser.addoption(
        "--more-than",
        type=int,
        default=0,
        metavar="N",
        help="on processes: leave out what N of them suffice for",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Join the processes before anything runs; each has a folder for temporary files of its own."""
    config.addinivalue_line("markers", "everywhere: its bodies run on simulated and on real ranks")
    if config.option.ranks != "simulated":
        from tests.core import worlds

        worlds.join_processes(config.option.ranks, more_than=config.option.more_than)
        config.option.basetemp = mkdtemp(prefix="ranks-")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the programs that ever failed first; leave out what needs the simulator, where ranks are real."""
    items.sort(key=lambda item: item.path.name != "test_corpus.py")
    if config.option.ranks != "simulated":
        chosen = [item for item in items if item.get_closest_marker("everywhere")]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave the processes when the summary is printed."""
    if config.option.ranks != "simulated":
        from tests.core import worlds

        worlds.leave_processes()
        rmtree(config.option.basetemp, ignore_errors=True)
