"""The command line: what it prints, what it leaves with, and that a replay line replays."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fsdp_sim.cli import main
from fsdp_sim.replay_file import Expected, PytestNode, ReplayFile, Versions, dump
from fsdp_sim.trace import Trace

CLEAN = """
import os, sys, torch, torch.distributed as dist
total = torch.ones(2)
dist.all_reduce(total)
print(os.environ["RANK"], sys.argv[1:], __name__, total.tolist())
"""
RACE = """
import torch, torch.distributed as dist
x, side = torch.ones(2), torch.cpu.Stream()
side.wait_stream(torch.cpu.current_stream())
with torch.cpu.stream(side):
    dist.all_reduce(x)
x.sum()
"""
OWN_MAIN = """
import pickle, sys, torch.distributed as dist
class Mine: pass
sys.argv = [str(dist.get_rank())]
dist.barrier()
assert type(pickle.loads(pickle.dumps(Mine()))) is Mine
print(sys.argv)
"""
BY_QUERY = str(Path(__file__).parents[2] / "examples" / "bugs" / "order_by_query.py")
REPLAY = re.compile(r"^replay with: (fsdp-sim replay .*)$", re.MULTILINE)
DIGEST = re.compile(r"digest:? (\w{32})")


def invoke(*arguments: str) -> Result:
    """Run a command line in this process."""
    return CliRunner().invoke(main, list(arguments))


def script(folder: Path, text: str) -> str:
    """Write a script and return its path."""
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def test_run_gives_each_rank_its_environment_and_arguments(tmp_path: Path) -> None:
    """A script sees what torchrun would have shown it."""
    result = invoke("run", "--ranks", "2", script(tmp_path, CLEAN), "--lr", "1")

    assert sorted(result.stdout.splitlines()) == [
        "0 ['--lr', '1'] __main__ [2.0, 2.0]",
        "1 ['--lr', '1'] __main__ [2.0, 2.0]",
    ]


def test_each_rank_is_a_main_module_of_its_own(tmp_path: Path) -> None:
    """A script's own classes can be pickled, and what it does to its arguments is its own business."""
    result = invoke("run", "--ranks", "2", script(tmp_path, OWN_MAIN))

    assert result.exit_code == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["['0']", "['1']"]


def test_a_clean_run_leaves_with_0_and_says_so(tmp_path: Path) -> None:
    """The last line names the schedule and the digest."""
    result = invoke("run", "--ranks", "2", script(tmp_path, CLEAN))

    assert result.exit_code == 0
    assert re.fullmatch(r"clean: schedule v1;w2, digest \w{32}\n", result.stderr)


def test_a_finding_leaves_with_1_and_shows_both_lines_of_code(tmp_path: Path) -> None:
    """A report is enough to see the mistake."""
    result = invoke("run", "--ranks", "2", script(tmp_path, RACE))

    assert result.exit_code == 1
    assert result.stderr.startswith("Race: ")
    assert "script.py:6  dist.all_reduce(x)" in result.stderr
    assert "script.py:7  x.sum()" in result.stderr


def test_a_scripts_own_failure_leaves_with_1_and_its_traceback(tmp_path: Path) -> None:
    """A script that fails is not a finding, and not hidden."""
    result = invoke("run", "--ranks", "1", script(tmp_path, "raise KeyError('lost')"))

    assert result.exit_code == 1
    assert "KeyError: 'lost'" in result.stderr
    assert result.stderr.splitlines()[1].endswith('script.py", line 1, in <module>')


@pytest.mark.parametrize(("status", "expected"), [("0", 0), ("None", 0), ("3", 1), ("'why'", 1)])
def test_exit_of_a_script_is_its_success(tmp_path: Path, status: str, expected: int) -> None:
    """`sys.exit` ends one rank's script, as it ends a process."""
    result = invoke("run", "--ranks", "1", script(tmp_path, f"import sys; sys.exit({status})"))

    assert result.exit_code == expected


@pytest.mark.parametrize(("status", "expected"), [(0, 0), (3, 1)])
def test_os_exit_ends_one_rank_and_not_the_simulation(
    tmp_path: Path, status: int, expected: int
) -> None:
    """What the other ranks do is still judged, and the verdict printed."""
    lines = f"import os\nif os.environ['RANK'] == '0':\n    os._exit({status})\nprint('later')"
    result = invoke("run", "--ranks", "2", script(tmp_path, lines))

    assert result.exit_code == expected
    assert result.stdout == "later\n"
    assert ("clean: " in result.stderr) == (status == 0)


def test_a_rank_that_exits_while_others_wait_for_it_is_a_deadlock(tmp_path: Path) -> None:
    """Leaving early is no success."""
    lines = "import os, torch\nif os.environ['RANK'] == '0':\n    os._exit(0)\n"
    lines += "torch.distributed.all_reduce(torch.ones(1))"
    result = invoke("run", "--ranks", "2", script(tmp_path, lines))

    assert result.exit_code == 1
    assert result.stderr.startswith("Deadlock: ")


def test_exploration_finds_an_order_that_depends_on_a_query() -> None:
    """Program order is clean; one deviation is enough."""
    in_order, explored = (
        invoke("run", "--ranks", "2", BY_QUERY),
        invoke("explore", "--ranks", "2", BY_QUERY),
    )

    assert in_order.exit_code == 0, in_order.stderr
    assert explored.exit_code == 1, explored.stderr
    assert "CollectiveMismatch" in explored.stderr
    assert REPLAY.findall(explored.stderr)[0].count(">") == 1


def test_an_exploration_that_finds_nothing_says_so(tmp_path: Path) -> None:
    """Statistics alone are no verdict."""
    result = invoke("explore", "--ranks", "2", "--schedules", "2", script(tmp_path, CLEAN))

    assert result.exit_code == 0, result.stderr
    assert result.stderr.endswith("clean: no schedule failed\n")


def test_the_replay_line_replays_in_another_process_under_another_hash_seed() -> None:
    """The line is all it takes, and the digest is the same."""
    explored = invoke("explore", "--ranks", "2", BY_QUERY)
    line = shlex.split(REPLAY.findall(explored.stderr)[0])
    command = [sys.executable, "-m", "fsdp_sim.cli", *line[1:]]
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    replayed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert replayed.returncode == 1
    assert DIGEST.findall(replayed.stderr) == DIGEST.findall(explored.stderr)


def test_a_replay_that_does_not_fit_leaves_with_3(tmp_path: Path) -> None:
    """It says at which step it left the recording, and never passes."""
    result = invoke("replay", "v1;w2;99>1", script(tmp_path, CLEAN))

    assert result.exit_code == 3
    assert result.stderr.startswith("not simulated: step 99 wants 1, but the run ended before it")


def recorded(folder: Path, text: str) -> str:
    """Run a script, store its trace and return the file's path."""
    path = folder / "trace.jsonl"
    invoke("run", "--ranks", "2", "--trace", str(path), script(folder, text))
    return str(path)


def test_a_fault_can_be_asked_for(tmp_path: Path) -> None:
    """The line that replays the run holds it."""
    fault = "crash:issue@rank=1,at=1"
    result = invoke("run", "--ranks", "2", "--fault", fault, script(tmp_path, CLEAN))

    assert result.exit_code == 1
    assert f"'v1;w2;{fault}'" in result.stderr


def test_run_writes_a_timeline(tmp_path: Path) -> None:
    """The file is where the command was told to put it."""
    timeline = tmp_path / "timeline.json"
    result = invoke("run", "--ranks", "2", "--timeline", str(timeline), script(tmp_path, CLEAN))

    assert result.exit_code == 0
    assert '"traceEvents"' in timeline.read_text()


@pytest.mark.parametrize("option", ["--trace", "--timeline"])
def test_a_file_that_cannot_be_written_is_refused_before_the_run(
    tmp_path: Path, option: str
) -> None:
    """A long run is not lost for want of a folder."""
    path = str(tmp_path / "nowhere" / "file")
    result = invoke("run", option, path, script(tmp_path, CLEAN))

    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"must be there and writable, got {path!r}" in " ".join(result.stderr.split())


def test_run_and_trace_draw_the_finding(tmp_path: Path) -> None:
    """The same picture, from the run and from its stored trace."""
    ran, stored = tmp_path / "ran.svg", tmp_path / "stored.svg"
    invoke("run", "--ranks", "2", "--picture", str(ran), script(tmp_path, RACE))
    result = invoke("trace", "picture", recorded(tmp_path, RACE), str(stored))

    assert result.exit_code == 0
    assert "missing: nothing orders 1 before 2" in ran.read_text()
    assert stored.read_text() == ran.read_text()


def test_a_run_without_finding_and_overlap_has_no_picture(tmp_path: Path) -> None:
    """The run is judged as ever."""
    path = tmp_path / "none.svg"
    result = invoke("run", "--ranks", "2", "--picture", str(path), script(tmp_path, CLEAN))

    assert result.exit_code == 0
    assert "no picture: the trace must hold a gather that overlaps compute" in result.stderr
    assert "\npicture: " not in result.stderr


def test_check_finds_in_a_stored_trace_what_the_run_found(tmp_path: Path) -> None:
    """Checkers need no program, only its operations."""
    result = invoke("check", recorded(tmp_path, RACE))

    assert result.exit_code == 1
    assert "script.py:7  x.sum()" in result.stderr


@pytest.mark.parametrize(
    "lines",
    [
        "all_reduce(x) if get_rank() else None",
        "all_reduce(x) if get_rank() else None; x.sum().item()",
        "all_reduce(x); 1 / get_rank(); barrier()",
    ],
    ids=["nobody waits for it", "somebody waits for it", "a rank has raised"],
)
def test_check_finds_what_a_rank_that_has_ended_never_issued(tmp_path: Path, lines: str) -> None:
    """A stored trace says whose program has come to its end."""
    start = "import torch; from torch.distributed import *; x = torch.ones(1)\n"
    result = invoke("check", recorded(tmp_path, start + lines))

    assert result.exit_code == 1
    assert result.stderr.startswith("Deadlock: ")
    assert "missing: rank 0\n" in result.stderr
    assert "script.py:2" in result.stderr


def test_check_of_a_clean_trace_leaves_with_0(tmp_path: Path) -> None:
    """A correct program has no findings in store either."""
    result = invoke("check", recorded(tmp_path, CLEAN))

    assert result.exit_code == 0
    assert "no findings" in result.stderr


def by_rank(folder: Path, text: str) -> list[str]:
    """Write what each rank did into a file of its own, as a recording of each process would be."""
    whole, files = Trace.load(recorded(folder, text)), []
    for rank in whole.ranks:
        files.append(str(folder / f"rank-{rank}.jsonl"))
        mine = [op for op in whole.ops if op.rank == rank]
        Trace.of(mine, whole.world_size, [rank]).save(files[-1])
    return files


def test_check_judges_recordings_of_single_processes_as_one_run(tmp_path: Path) -> None:
    """A collective meets the other processes' parts."""
    result = invoke("check", *by_rank(tmp_path, CLEAN))

    assert result.exit_code == 0
    assert result.stderr.count("no findings") == 1


def test_check_refuses_a_run_without_all_its_processes(tmp_path: Path) -> None:
    """A rank that is missing would look like one that hangs."""
    result = invoke("check", by_rank(tmp_path, CLEAN)[0])

    assert result.exit_code == 2
    assert "traces to merge must hold each of 2 ranks once, got ranks [0]" in result.output


def test_trace_merge_joins_processes_to_the_run_that_they_were(tmp_path: Path) -> None:
    """What is merged equals the trace of all ranks."""
    merged = str(tmp_path / "merged.jsonl")
    files = by_rank(tmp_path, CLEAN)
    result = invoke("trace", "merge", merged, *files)

    assert result.exit_code == 0
    assert invoke("trace", "diff", merged, str(tmp_path / "trace.jsonl")).stdout == "the same\n"
    assert invoke("trace", "diff", merged, files[1]).stdout == "the same\n"


def test_trace_text_has_a_line_for_each_operation(tmp_path: Path) -> None:
    """What people grep in."""
    result = invoke("trace", "text", recorded(tmp_path, CLEAN))

    assert result.exit_code == 0
    assert sum("all_reduce" in line for line in result.stdout.splitlines()) == 2


def test_trace_diff_names_the_first_difference(tmp_path: Path) -> None:
    """A trace equals itself; another program's differs."""
    one = recorded(tmp_path, CLEAN)
    (tmp_path / "other").mkdir()
    other = recorded(tmp_path / "other", RACE)
    same, different = invoke("trace", "diff", one, one), invoke("trace", "diff", one, other)

    assert (same.exit_code, same.stdout) == (0, "the same\n")
    assert different.exit_code == 1
    assert different.stdout.startswith("rank 0 differs at entry ")


def test_trace_perfetto_writes_a_timeline(tmp_path: Path) -> None:
    """The same as `run --timeline` would have written."""
    timeline = tmp_path / "timeline.json"
    result = invoke("trace", "perfetto", recorded(tmp_path, CLEAN), str(timeline))

    assert result.exit_code == 0
    assert '"traceEvents"' in timeline.read_text()


def test_a_saved_failure_replays_from_its_file(tmp_path: Path) -> None:
    """A replay file needs no other argument, and says how what came up compares."""
    path = str(tmp_path / "replay.json")
    explored = invoke("explore", "--ranks", "2", "--save", path, BY_QUERY)
    replayed = invoke("replay", path)

    assert explored.exit_code == 1
    assert replayed.exit_code == 1
    assert "the same finding came up (CollectiveMismatch), with the same digest" in replayed.stderr


def test_a_replay_file_is_drawn_and_written_as_a_schedule_is(tmp_path: Path) -> None:
    """The outputs that are asked for are written, and they are those of the failure."""
    path, trace, picture = (str(tmp_path / name) for name in ("replay.json", "run.trace", "a.svg"))
    invoke("explore", "--ranks", "2", "--save", path, BY_QUERY)
    replayed = invoke("replay", "--trace", trace, "--picture", picture, path)
    judged = invoke("check", trace)

    assert f"trace: {trace}\npicture: {picture}\nCollectiveMismatch: " in replayed.stderr
    assert "<svg" in Path(picture).read_text()
    assert judged.exit_code == 1


def test_a_replay_file_of_a_test_takes_no_output(tmp_path: Path) -> None:
    """Pytest runs it and leaves timeline and picture in its own place; nothing is ignored in silence."""
    path = tmp_path / "replay.json"
    node, versions = PytestNode("test_it.py::test_it", 0, ()), Versions("0", "0", "0")
    file = ReplayFile("v1;w2", Expected("Race", ""), "0" * 32, "0" * 32, versions, test=node)
    path.write_text(dump(file))
    result = invoke("replay", "--picture", str(tmp_path / "a.svg"), str(path))

    assert result.exit_code == 2
    assert (
        "a replay file of a test must be followed without --picture; its timeline" in result.stderr
    )


def test_a_replay_file_made_elsewhere_gives_the_same_digest_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process made it, in another folder and under another hash seed."""
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    script(there, RACE)
    command = [sys.executable, "-m", "fsdp_sim.cli", "explore", "--save", "race.json", "script.py"]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": root}
    made = subprocess.run(command, cwd=there, env=environment, capture_output=True, check=False)
    there.rename(here)
    monkeypatch.chdir(here)

    replayed = invoke("replay", "race.json")

    assert made.returncode == 1
    assert "the same finding came up (Race), with the same digest" in replayed.stderr


def test_a_replay_file_and_a_trace_are_not_taken_for_each_other(tmp_path: Path) -> None:
    """Both lie about after a failure; the error says what the file is, and what reads it."""
    trace, replay = recorded(tmp_path, RACE), str(tmp_path / "failure.json")
    invoke("explore", "--save", replay, script(tmp_path, RACE))

    results = [invoke("replay", trace), invoke("check", replay), invoke("trace", "text", replay)]

    assert [result.exit_code for result in results] == [2, 2, 2]
    assert "got a trace; read it with fsdp-sim check or" in results[0].stderr
    assert all("got a replay file; follow it with: fsdp" in each.stderr for each in results[1:])


def test_what_the_script_prints_comes_before_the_verdict(tmp_path: Path) -> None:
    """Also where both go into one pipe, in which Python holds standard output back."""
    command = [sys.executable, "-m", "fsdp_sim.cli", "run", "--ranks", "2", script(tmp_path, CLEAN)]

    run = subprocess.run(command, stdout=-1, stderr=subprocess.STDOUT, text=True, check=True)

    assert run.stdout.splitlines()[-1].startswith("clean: ")


def test_doctor_is_well() -> None:
    """It tries a correct and a wrong program, and names what it replaces."""
    result = invoke("doctor")

    assert result.exit_code == 0
    assert "  torch.cpu.current_stream\n" in result.stdout
    verdict = result.stdout.index("\na correct program is clean, a wrong one is found\n")
    assert verdict < result.stdout.index("\nwhat a clean run does not show")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "missing.py"), "File 'missing.py' does not exist."),
        (("run", "--rank", "2", BY_QUERY), "No such option '--rank'"),
        (("run", "--picture", "a.gif", BY_QUERY), "must be a .png or .svg file, got 'a.gif'"),
        (("replay", BY_QUERY), "order_by_query.py' alone; put the schedule before it"),
        (("run", "--ranks", "0", BY_QUERY), "0 is not in the range x>=1."),
        (("run", "--scheduler", "luck", BY_QUERY), "scheduler must be one of program_order,"),
        (
            ("explore", "--scheduler", "luck", BY_QUERY),
            "explore's scheduler must be one of pct, uniform, portfolio, exhaustive",
        ),
        (("replay", "v9;w2", BY_QUERY), "a schedule must be of version 1, got 'v9'"),
        (("replay", "nonsense", BY_QUERY), "a schedule must begin with its version"),
        (("replay", "v1;w2"), "or a replay file that is there, got 'v1;w2' alone and no such file"),
        (("check",), "Missing argument 'FILES...'."),
    ],
)
def test_wrong_usage_leaves_with_2(arguments: tuple[str, ...], message: str) -> None:
    """Nothing is run, and the message says what was expected."""
    result = invoke(*arguments)

    assert result.exit_code == 2
    assert message in result.stderr


def test_a_script_that_is_not_python_is_wrong_usage(tmp_path: Path) -> None:
    """The syntax error is shown before any rank starts."""
    result = invoke("run", script(tmp_path, "def :"))

    assert result.exit_code == 2
    assert "a script must be a file of Python code" in result.stderr
