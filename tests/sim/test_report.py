"""The report: what a person reads of a finding."""

from pathlib import Path

from fsdp_sim.errors import Finding, OpSite
from fsdp_sim.op import Source
from fsdp_sim.views.report import finding_text, shorten, source_line


def test_a_finding_shows_both_ops_with_their_code(tmp_path: Path) -> None:
    """Invariant, ops with rank, stream, unit and line of code, what is missing, how often."""
    program = tmp_path / "program.py"
    program.write_text("gather(x)\nread(x)\n")
    sites = (
        OpSite(1, 41, "all_gather", "stream 1", Source(str(program), 1), "fsdp_core::unshard a"),
        OpSite(1, 57, "mm", "stream 0", Source(str(program), 2)),
    )
    finding = Finding("Race", "a read may come first", sites, ("no edge",), ranks=(1, 3), count=2)

    assert finding_text(finding).splitlines() == [
        "Race: a read may come first",
        "  op 41  all_gather  on stream 1 of rank 1  [fsdp_core::unshard a]",
        f"      {program}:1  gather(x)",
        "  op 57  mm  on stream 0 of rank 1",
        f"      {program}:2  read(x)",
        "  no edge",
        "  2 times, on ranks 1, 3",
    ]


def test_a_line_of_pytorch_stands_behind_the_users_line_that_led_to_it() -> None:
    """The user's own line is what the user can change."""
    library = Source("torch/fsdp.py", 9, user=Source("train.py", 3))
    finding = Finding("Race", "late", (OpSite(0, 4, "all_gather", "stream 1", library),))

    assert finding_text(finding).splitlines()[2:] == ["      train.py:3", "      torch/fsdp.py:9"]


def test_a_line_that_cannot_be_read_is_named_without_code() -> None:
    """A trace may come from another machine."""
    assert source_line(Source("elsewhere/program.py", 3)) == "elsewhere/program.py:3"


def test_paths_are_shown_as_seen_from_here() -> None:
    """Own files relative to the working directory, installed ones without their folder."""
    assert shorten(str(Path.cwd() / "a" / "b.py")) == "a/b.py"
    assert shorten("/venv/lib/site-packages/torch/nn/modules.py") == "torch/nn/modules.py"


def test_a_notice_says_that_it_is_one() -> None:
    """It stands among findings, and leaves the run clean."""
    notice = Finding("UnusedPrefetch", "nobody used it", ranks=(0,))

    assert finding_text(notice) == "notice: UnusedPrefetch: nobody used it"
