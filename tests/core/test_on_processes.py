"""The same bodies on real gloo processes: all of them in one set, since processes start slowly."""

import pytest

from tests.core import test_dbuffer, test_gather_scatter
from tests.core.worlds import Body, on_gloo_processes

BODIES = {
    2: [*test_dbuffer.BODIES_OF_2, test_gather_scatter.gathers_and_scatters],
    4: [*test_dbuffer.BODIES_OF_4, test_gather_scatter.gathers_and_scatters],
}


@pytest.mark.parametrize(("world_size", "bodies"), BODIES.items())
def test_on_gloo_processes(world_size: int, bodies: list[Body]) -> None:
    """Real processes give the same values as simulated ranks."""
    on_gloo_processes(bodies, world_size)
