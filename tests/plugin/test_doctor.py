"""``fsdp-sim doctor``: which names a world replaces, and what it would not see."""

import pytest
import torch
from click.testing import CliRunner

from fsdp_sim import doctor
from fsdp_sim.cli import main


def test_names_are_those_of_this_pytorch() -> None:
    """Streams and host reads are replaced; what only CUDA has is added to the CPU's module."""
    states = {each.name: each.state for each in doctor.patched_names()}

    assert states["torch.cpu.Stream"] == "replaced"
    assert states["torch.Tensor.record_stream"] == "replaced"
    assert states["torch.cpu.default_stream"] == "added"
    assert not [name for name in states if name.startswith("fsdp_sim")]


def test_looking_leaves_nothing_behind() -> None:
    """All names are as before."""
    before = torch.cpu.Stream

    doctor.patched_names()

    assert torch.cpu.Stream is before


def test_a_package_with_kernels_of_its_own_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its work would not be seen, and nothing else would say so."""
    monkeypatch.setattr(doctor, "OWN_KERNELS", ("click", "no-such-package"))

    (line,) = (each for each in doctor.blind_spots() if not each.startswith("CUDA is there"))

    assert line.startswith("click ")
    assert line.endswith("bypass PyTorch's dispatcher, so what they read and write is not seen")


def test_the_command_lists_every_name_and_what_is_not_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line each."""
    monkeypatch.setattr(doctor, "OWN_KERNELS", ("click",))

    result = CliRunner().invoke(main, ["doctor"])

    lines = result.output.splitlines()
    assert result.exit_code == 0, result.output
    assert "  torch.cpu.Stream" in lines
    assert any(line.startswith("  click ") for line in lines)
