"""What importing the kit brings along."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        (
            "from fsdp_sim.program import ProgramSpec, load_program",
            ("torch", "hypothesis", "pytest"),
        ),
        ("from fsdp_sim.program.parity import verify", ("hypothesis", "pytest", "_pytest")),
    ],
)
def test_a_program_is_loaded_without_what_it_does_not_need(
    statement: str, absent: tuple[str, ...]
) -> None:
    """Reading one needs no torch, running one neither hypothesis nor pytest."""
    check = f"import sys; {statement}; print([n for n in {absent!r} if n in sys.modules])"

    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
