"""The directory of a checkpoint: saves that die leave the one before; damage is found, and named."""

import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import fsdp_core
from fsdp_core import ConfigError
from fsdp_core.checkpoint_files import MANIFEST
from tests.cases.programs import assert_equal
from tests.core.saved_models import build, load, save, save_anew, train
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
    on_ranks(lambda _: save_anew(target), 2)
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
