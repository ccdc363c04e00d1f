"""Scripts written for GPUs: they run as they are, and compute what the same script computes on CPUs."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import fsdp_sim
from fsdp_sim.cli import main
from fsdp_sim.script import Script

HERE = Path(__file__).parent
SCRIPTS = ("cuda_ddp.py", "cuda_fsdp2.py")
ON_CPU = {
    ", device_id=device": "",
    ", device_ids=[local]": "",
    ".pin_memory()": "",
    "cuda": "cpu",
    "nccl": "gloo",
}
"""What a script that is written for CPUs says instead."""
WAIT = "        torch.cuda.current_stream().wait_stream(copies)\n"


def invoke(*arguments: str) -> Result:
    """Run a command line in this process."""
    return CliRunner().invoke(main, list(arguments))


def edited(folder: Path, name: str, changes: dict[str, str]) -> str:
    """Write a copy of a script with other words in it, and return its path."""
    text = (HERE / name).read_text()
    for old, new in changes.items():
        assert old in text or new == "", old
        text = text.replace(old, new)
    path = folder / name
    path.write_text(text)
    return str(path)


@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")  # of the CPU's script
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_cuda_script_computes_what_the_same_script_computes_on_cpus(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs unmodified, is clean, and every number it prints is the same bit for bit."""
    on_cuda = invoke("run", "--ranks", "2", "--as", "cuda", str(HERE / name))
    fsdp_sim.simulate(Script(edited(tmp_path, name, ON_CPU)), 2, checkers=())

    assert on_cuda.exit_code == 0, on_cuda.output
    assert on_cuda.stdout == capsys.readouterr().out
    assert on_cuda.stdout.count("0x") >= 3


def test_a_copy_that_nobody_waits_for_is_a_race(tmp_path: Path) -> None:
    """The report shows the copy, and its line replays the run as a CUDA script."""
    broken = edited(tmp_path, "cuda_ddp.py", {WAIT: ""})
    result = invoke("run", "--ranks", "2", "--as", "cuda", broken)
    (line,) = re.findall(r"replay with: fsdp-sim replay '(v1;w2;cuda)'", result.stderr)
    replayed = invoke("replay", line, broken)

    assert result.exit_code == 1
    assert result.stderr.startswith("Race: ")
    assert "inputs = inputs.to(device, non_blocking=True)" in result.stderr
    assert replayed.exit_code == 1
    assert re.findall(r"digest:? (\w{32})", replayed.stderr) == re.findall(
        r"digest:? (\w{32})", result.stderr
    )
