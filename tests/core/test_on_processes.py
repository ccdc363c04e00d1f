"""The same bodies on real processes: all of them in one set, since processes start slowly."""

import pytest
import torch

from tests.core import test_dbuffer, test_gather_scatter
from tests.core.worlds import Body, on_processes

BODIES: dict[int, list[Body]] = {
    1: test_dbuffer.BODIES_OF_1,
    2: [*test_dbuffer.BODIES_OF_2, test_gather_scatter.gathers_and_scatters],
    4: [*test_dbuffer.BODIES_OF_4, test_gather_scatter.gathers_and_scatters],
}


def test_on_gloo_processes() -> None:
    """Processes on CPUs give the same values as simulated ranks."""
    on_processes(BODIES[4], 4, "gloo")


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_on_gpus(world_size: int) -> None:
    """So do GPUs, as far as there are any."""
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    on_processes(BODIES[world_size], world_size, "nccl")
