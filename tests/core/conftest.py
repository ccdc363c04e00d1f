"""What several tests of fsdp_core start from."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.core.invariants import Watch, watch_units
from tests.core.worlds import shared_path


@pytest.fixture(autouse=True)
def invariants(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Have what holds in every run of fsdp_core checked in every test."""
    return watch_units(monkeypatch)


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """A folder of the test's own that all ranks see."""
    return shared_path(tmp_path)


@pytest.fixture
def lone_process(tmp_path: Path) -> Iterator[None]:
    """A gloo process group of this process alone."""
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
