"""The directory of a checkpoint: saves that die leave the one before; damage is found, and named."""

import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import fsdp_core
import fsdp_sim
from fsdp_core import ConfigError
from fsdp_core.checkpoint_files import MANIFEST, METADATA, check_files
from fsdp_core.checkpoint_reader import PlainReader
from fsdp_core.errors import UnsupportedError
from fsdp_sim.errors import InjectedFault
from tests.cases.programs import assert_equal
from tests.core.killed_save import RAISED, save_and_kill_rank_1
from tests.core.saved_models import VALUES_ALONE, build, load, refused, save, save_anew, train
from tests.core.worlds import on_ranks, on_simulated_ranks, once


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


# ---------------------------------------------------------------------- saves that end


@pytest.mark.everywhere
def test_a_second_save_takes_the_place_of_the_first(tmp_path: Path) -> None:
    """Nothing but the new checkpoint is left."""
    save(tmp_path / "saved", steps=1)
    expected = save(tmp_path / "saved")

    assert_equal(load(tmp_path / "saved"), expected)
    assert [each.name for each in tmp_path.iterdir()] == ["saved"]


@pytest.mark.everywhere
def test_a_link_stays_one(tmp_path: Path) -> None:
    """What it points to is replaced."""
    once(lambda: (tmp_path / "latest").symlink_to(tmp_path / "saved"))
    save(tmp_path / "latest", steps=1)
    expected = save(tmp_path / "latest")

    assert_equal(load(tmp_path / "latest"), expected)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["latest", "saved"]
    assert (tmp_path / "latest").is_symlink()


@pytest.mark.everywhere
@pytest.mark.parametrize("name", ["all", "all/notes"])
def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path, name: str) -> None:
    """Such as the folder of earlier ones; nothing is written, in it or beside it."""
    on_ranks(lambda _: save_anew(tmp_path / "all" / "first"), 2)
    once(lambda: (tmp_path / "all" / "notes").write_text("a file"))
    before = contents(tmp_path)

    def body(_rank: int) -> None:
        with pytest.raises(ConfigError) as caught:
            save_anew(tmp_path / name)
        assert str(caught.value) == (
            f"{str(tmp_path / name)!r} must be a checkpoint, empty or new, got something else, which "
            f"would be lost; pass another directory, or remove it"
        )

    on_ranks(body, 2)

    assert contents(tmp_path) == before


def test_all_is_on_the_disk_before_the_checkpoint_before_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that not even a machine that loses its power leaves none."""
    save(tmp_path / "saved")
    target, seen = tmp_path / "saved", []

    def noted(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(path: object, *args: object, **kwargs: object) -> object:
            shown = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else str(path)
            seen.append((name, Path(shown).relative_to(tmp_path.parent)))
            return function(path, *args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", noted("sync", os.fsync))
        patch.setattr(Path, "rename", noted("rename", Path.rename))
        patch.setattr(shutil, "rmtree", noted("remove", shutil.rmtree))
        on_ranks(lambda _: save_anew(target), 2)

    root, partial = Path(tmp_path.name), Path(tmp_path.name, "saved.partial")
    files = ["__0_0.distcp", "__1_0.distcp", ".metadata.tmp"]
    synced = [path for name, path in seen if name == "sync"]
    swap = [("rename", root / "saved"), ("rename", partial), ("sync", root)]
    assert sorted(synced[:3]) == sorted(partial / name for name in files)
    assert seen[-7:] == [
        ("sync", partial / MANIFEST),
        ("sync", partial),
        ("remove", root / "saved.old"),
        *swap,
        ("remove", root / "saved.old"),
    ]


# ---------------------------------------------------------------------- saves that die


@contextmanager
def no_file_beyond(nbytes: int) -> Iterator[None]:
    """Have the system let no file of this process grow beyond a size, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fails_twice(target: Path, run: Callable[[Callable[[int], str]], list[str]]) -> list[str]:
    """Try to save twice; check that nothing was lost, and that the next save is one again.

    Returns:
        What each rank raised.
    """
    expected = save(target)
    before = contents(target)

    def body(_rank: int) -> str:
        model, optimizer = build()
        train(model, optimizer, range(1))
        with pytest.raises(OSError, match=r"^\[Errno 27\] File too large") as caught:
            fsdp_core.save_checkpoint(model, optimizer, target)
        train(model, optimizer, range(1, 2))  # a failed save ends no training
        return str(caught.value)

    first, second = run(body), run(body)
    assert first == second
    assert contents(target) == before
    assert_equal(load(target), expected)
    on_ranks(lambda _: save_anew(target), 2, **VALUES_ALONE)
    assert [each.name for each in target.parent.iterdir()] == [target.name]
    return first


@pytest.mark.everywhere
@pytest.mark.parametrize("nbytes", [0, 1, 5000])
def test_a_disk_without_room_leaves_the_checkpoint_before(tmp_path: Path, nbytes: int) -> None:
    """At the first byte of a file, in the middle of one: every rank raises the error of the system."""

    def run(body: Callable[[int], str]) -> list[str]:
        with no_file_beyond(nbytes):
            return on_ranks(body, 2)

    assert fails_twice(tmp_path / "saved", run) == ["[Errno 27] File too large"] * 2


def test_a_disk_without_room_for_one_rank_alone_is_an_error_of_all(tmp_path: Path) -> None:
    """The other one's file is whole."""
    save(tmp_path / "probe")
    sizes = sorted(path.stat().st_size for path in (tmp_path / "probe").glob("*.distcp"))
    assert sizes[0] < sizes[1]

    def run(body: Callable[[int], str]) -> list[str]:
        with no_file_beyond(sizes[0]):
            return on_simulated_ranks(body, 2)

    shutil.rmtree(tmp_path / "probe")
    assert fails_twice(tmp_path / "saved", run) == ["[Errno 27] File too large"] * 2


@pytest.mark.parametrize(
    "fault",
    [
        "fail:write@rank=0,at=1",
        "fail:write@rank=1,at=1",
        "fail:write@name=.metadata.tmp,at=1",
    ],
)
def test_a_write_that_fails_is_an_error_of_all_ranks(tmp_path: Path, fault: str) -> None:
    """Between two files, or when all but the metadata are written; the checkpoint before stays."""
    expected = save(tmp_path / "saved")
    before = contents(tmp_path / "saved")

    def body(_rank: int) -> str:
        with pytest.raises(InjectedFault) as caught:
            save_anew(tmp_path / "saved")
        return str(caught.value)

    for _ in range(2):
        first, second = on_simulated_ranks(body, 2, faults=[fault])
        assert first == second
        assert contents(tmp_path / "saved") == before
    assert_equal(load(tmp_path / "saved"), expected)


@pytest.mark.parametrize(
    "fault",
    [
        "torn:write@rank=0,at=1",
        "torn:write@rank=1,at=1",
        "crash:write@rank=1,at=1",
        "torn:write@name=.metadata.tmp,at=1",
        "crash:write@name=.metadata.tmp,at=1",
    ],
)
def test_a_rank_that_dies_in_a_write_leaves_the_checkpoint_before(
    tmp_path: Path, fault: str
) -> None:
    """In a file, behind one, with half of the metadata, before they have their name; twice."""
    expected = save(tmp_path / "saved")
    before = contents(tmp_path / "saved")

    for _ in range(2):
        report = fsdp_sim.simulate(
            lambda _: save_anew(tmp_path / "saved"), 2, faults=[fault], strict=False
        )
        assert [str(error).split()[2] for error in report.errors.values()] == ["crashed"]
        assert contents(tmp_path / "saved") == before
    assert_equal(load(tmp_path / "saved"), expected)
    on_ranks(lambda _: save_anew(tmp_path / "saved"), 2)
    assert [each.name for each in tmp_path.iterdir()] == ["saved"]


def test_a_process_that_is_killed_ends_the_save_of_the_others(tmp_path: Path) -> None:
    """They are real ones, and wait for nobody; the checkpoint before is loaded by those that come."""
    expected = save(tmp_path / "saved")

    assert save_and_kill_rank_1(tmp_path) == [RAISED, -signal.SIGKILL]
    assert_equal(load(tmp_path / "saved"), expected)


def test_a_save_that_died_between_two_renames_is_loaded_from_the_old_name(tmp_path: Path) -> None:
    """The previous checkpoint was moved away, the new one is not in its place yet."""
    expected = save(tmp_path / "saved")
    (tmp_path / "saved").rename(tmp_path / "saved.old")

    assert_equal(load(tmp_path / "saved"), expected)


@pytest.mark.everywhere
@pytest.mark.parametrize("name", ["saved.old", "saved.partial"])
def test_saves_that_die_in_the_swap_again_and_again_leave_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Before and behind the first of two renames; the next save that ends leaves no other."""
    expected = save(tmp_path / "saved")
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if name in (self.name, target.name):
            raise OSError("no more room")
        return rename(self, target)

    def body(_rank: int) -> None:
        with pytest.raises(OSError, match="no more room"):
            save_anew(tmp_path / "saved")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fails)
        for _ in range(2):
            on_ranks(body, 2)

    assert_equal(load(tmp_path / "saved"), expected)
    save(tmp_path / "saved")
    assert [each.name for each in tmp_path.iterdir()] == ["saved"]


# ---------------------------------------------------------------------- what one rank alone sees


@pytest.mark.everywhere
@pytest.mark.parametrize("rank", [0, 1])
def test_a_state_that_one_rank_alone_cannot_save_is_refused_on_all(
    tmp_path: Path, rank: int
) -> None:
    """Nobody waits for it, and nothing is written."""
    on_ranks(lambda _: save_anew(tmp_path / "saved"), 2)
    before = contents(tmp_path)

    def body(mine: int) -> str:
        model, optimizer = build()
        if mine == rank:
            optimizer.param_groups[0]["extra"] = {1, 2}
        with pytest.raises(UnsupportedError) as caught:
            fsdp_core.save_checkpoint(model, optimizer, tmp_path / "saved")
        return str(caught.value)

    messages = on_ranks(body, 2)

    assert messages[0] == messages[1]
    assert messages[0].startswith("'optimizer.options' must be a tensor or what JSON can say")
    assert contents(tmp_path / "saved") == {
        name.removeprefix("saved/"): each for name, each in before.items()
    }


@pytest.mark.everywhere
def test_a_directory_that_rank_0_cannot_make_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    """The others have the error of rank 0, with the path."""
    once(lambda: (tmp_path / "file").write_text(""))

    def body(_rank: int) -> str:
        with pytest.raises(NotADirectoryError) as caught:
            save_anew(tmp_path / "file" / "saved")
        return str(caught.value)

    message = f"[Errno 20] Not a directory: {str(tmp_path / 'file' / 'saved.partial')!r}"
    assert on_ranks(body, 2) == [message] * 2


@pytest.mark.everywhere
def test_a_save_to_disks_of_each_rank_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """Rank 0 does not see what rank 1 wrote, which no rank could load."""
    expected = save(tmp_path / "saved")

    def body(rank: int) -> str:
        with pytest.raises(ConfigError) as caught:
            save_anew(tmp_path / ("saved", "elsewhere")[rank])
        return str(caught.value)

    message = (
        f"all ranks must see one directory, got no '__1_0.distcp' of rank 1 in "
        f"{str(tmp_path / 'saved.partial')!r}; pass a directory on a file system that they share; "
        f"the checkpoint before is as it was"
    )
    assert on_ranks(body, 2) == [message] * 2
    assert_equal(load(tmp_path / "saved"), expected)


@pytest.mark.everywhere
def test_a_checkpoint_that_one_rank_does_not_see_is_refused_on_all(tmp_path: Path) -> None:
    """As on a disk that the ranks do not share."""
    save(tmp_path / "saved")

    def body(rank: int) -> str:
        model, optimizer = build()
        with pytest.raises(ConfigError) as caught:
            fsdp_core.load_checkpoint(model, optimizer, tmp_path / ("saved", "elsewhere")[rank])
        return str(caught.value)

    for message in on_ranks(body, 2):
        assert f"{str(tmp_path / 'elsewhere')!r} must hold a whole checkpoint" in message


# ---------------------------------------------------------------------- damage

FILES = ("__0_0.distcp", "__1_0.distcp", METADATA)


def cut(path: Path) -> None:
    """Drop the last byte."""
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    """Drop all bytes."""
    path.write_bytes(b"")


def lengthen(path: Path) -> None:
    """Add a byte."""
    path.write_bytes(path.read_bytes() + b"\0")


def flip(path: Path, bit: int = -1) -> None:
    """Turn one bit over, by default in the middle."""
    data = bytearray(path.read_bytes())
    bit = len(data) * 4 if bit < 0 else bit
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(data))


@pytest.mark.everywhere
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (cut, "{less} bytes in {name} instead of {nbytes}"),
        (empty, "0 bytes in {name} instead of {nbytes}"),
        (lengthen, "{more} bytes in {name} instead of {nbytes}"),
        (flip, "other contents in {name} than were saved"),
    ],
)
def test_a_damaged_file_is_refused_by_its_name(
    tmp_path: Path, name: str, damage: Callable[[Path], None], problem: str
) -> None:
    """On every rank, whichever of them read that file; no bit of model or optimizer changes."""
    save(tmp_path / "saved")
    path = tmp_path / "saved" / name
    nbytes = path.stat().st_size
    once(lambda: damage(path))

    got = problem.format(name=repr(name), nbytes=nbytes, less=nbytes - 1, more=nbytes + 1)
    refused(
        tmp_path / "saved",
        f"the checkpoint in {str(tmp_path / 'saved')!r} must be whole, got {got}; load another one; "
        f"nothing was loaded",
    )


@pytest.mark.everywhere
@pytest.mark.parametrize("name", FILES[:2])
def test_a_file_that_is_gone_is_missed_by_its_name(tmp_path: Path, name: str) -> None:
    """Each of the data files."""
    save(tmp_path / "saved")
    once((tmp_path / "saved" / name).unlink)

    refused(tmp_path / "saved", f"must be whole, got no file {name!r}; load another one")


@pytest.mark.everywhere
@pytest.mark.parametrize("name", [METADATA, MANIFEST])
def test_a_directory_without_metadata_or_manifest_is_no_checkpoint(
    tmp_path: Path, name: str
) -> None:
    """No save that ended left it."""
    save(tmp_path / "saved")
    once((tmp_path / "saved" / name).unlink)

    refused(
        tmp_path / "saved",
        f"{str(tmp_path / 'saved')!r} must hold a whole checkpoint, got no manifest.json or no "
        f".metadata in it; pass a directory that save_checkpoint wrote; nothing was loaded",
    )


def drop_metadata(manifest: dict[str, Any]) -> object:
    """Leave the metadata out."""
    del manifest["files"][METADATA]
    return manifest


def drop_data(manifest: dict[str, Any]) -> object:
    """Leave a file out."""
    del manifest["files"]["__1_0.distcp"]
    return manifest


@pytest.mark.everywhere
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (drop_metadata, "no checksum of '.metadata'"),
        (drop_data, "no checksum of '__1_0.distcp'"),
        (lambda manifest: {**manifest, "format": 2}, "format 2, where this version reads 3"),
        (lambda manifest: {**manifest, "files": [1]}, "a manifest.json that cannot be read"),
        (lambda manifest: {**manifest, "files": {"a": 3}}, "a manifest.json that cannot be read"),
        (lambda _manifest: [], "a manifest.json that cannot be read"),
    ],
)
def test_a_manifest_that_vouches_for_less_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], problem: str
) -> None:
    """Nothing is read that it says nothing about."""
    save(tmp_path / "saved")
    path = tmp_path / "saved" / MANIFEST
    once(lambda: path.write_text(json.dumps(change(json.loads(path.read_text())))))

    refused(tmp_path / "saved", f"must be whole, got {problem}; load another one")


def test_every_bit_counts(tmp_path: Path) -> None:
    """One of each byte of the manifest, and of every 401st of the other files."""
    save(tmp_path / "saved")

    def body(_rank: int) -> int:
        tried = 0
        for path in sorted((tmp_path / "saved").iterdir()):
            original = path.read_bytes()
            bits = range(0, 8 * len(original), 9 if path.name == MANIFEST else 8 * 401 + 1)
            for bit in bits:
                flip(path, bit)
                with pytest.raises(ConfigError):
                    PlainReader(tmp_path / "saved", check_files(tmp_path / "saved"))
                path.write_bytes(original)
            tried += len(bits)
        PlainReader(tmp_path / "saved", check_files(tmp_path / "saved"))
        return tried

    assert on_simulated_ranks(body, 1)[0] > 200
