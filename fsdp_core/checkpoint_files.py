"""The directory of a checkpoint: written beside the previous one, checksummed, put in its place.

Beside the files of `torch.distributed.checkpoint` lies a manifest with the size and checksum of each.
"""

import json
import os
import shutil
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdp_core.errors import ConfigError

MANIFEST = "manifest.json"
METADATA = ".metadata"
FORMAT = 3

_READ_NBYTES = 1 << 24

Files = dict[str, tuple[int, str]]
"""Size in bytes and checksum of each file, by name.

Why the checksum is eight hexadecimal digits: what ranks exchange must have the same size whatever its
value.
"""


# --- writing ---------------------------------------------------------------------------------------


def partial_of(target: Path) -> Path:
    """Return the name under which a checkpoint is written."""
    return target.with_name(target.name + ".partial")


def _old(target: Path) -> Path:
    """Return the name of the previous checkpoint while another takes its place."""
    return target.with_name(target.name + ".old")


def make_room(target: Path) -> None:
    """Make the directory to write to.

    Raises:
        ConfigError: what is to be replaced is no checkpoint, but may hold some.
    """
    is_used = any(target.iterdir()) if target.is_dir() else target.exists()
    if is_used and not _is_whole(target):
        msg = (
            f"{str(target)!r} must be a checkpoint, empty or new, got something else, which would be "
            f"lost; pass another directory, or remove it"
        )
        raise ConfigError(msg)
    partial = partial_of(target)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def list_written(target: Path) -> Files:
    """Return what this rank wrote, read back from where it lies."""
    rank = dist.get_rank()
    return {
        path.name: (path.stat().st_size, checksum(path))
        for path in sorted(partial_of(target).iterdir())
        if path.name.startswith(f"__{rank}_") or (rank == 0 and path.name == METADATA)
    }


def put_in_place(target: Path, parts: Sequence[Files]) -> None:
    """Complete what all ranks wrote, and let it take the place of the previous checkpoint.

    What bears the name `.old` may be the only checkpoint, until a whole one has the target's.

    Ordering:
        Everything is on the disk before the previous checkpoint is removed.

    Raises:
        ConfigError: this rank does not see what another one wrote.
    """
    partial, old = partial_of(target), _old(target)
    for rank, files in enumerate(parts):
        for name in files:
            if not (partial / name).is_file():
                msg = (
                    f"all ranks must see one directory, got no {name!r} of rank {rank} in "
                    f"{str(partial)!r}; pass a directory on a file system that they share; the "
                    f"checkpoint before is as it was"
                )
                raise ConfigError(msg)
    _write_manifest(partial, {name: each for files in parts for name, each in files.items()})
    if _is_whole(target):
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    partial.rename(target)
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write_manifest(directory: Path, files: Files) -> None:
    path = directory / MANIFEST
    path.write_text(json.dumps({"format": FORMAT, "files": files}, indent=1, sort_keys=True))
    _sync(path)
    _sync(directory)


def _sync(path: Path) -> None:
    """Have a file, or the names in a directory, outlast a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """Return the CRC-32 of a file, as the manifest has it."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(_READ_NBYTES):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


# --- reading ---------------------------------------------------------------------------------------


def find(target: Path) -> Path:
    """Return the directory to load: the previous one, if a save died while it took its place.

    Raises:
        ConfigError: there is none.
    """
    for directory in (target, _old(target)):
        if _is_whole(directory):
            return directory
    msg = (
        f"{str(target)!r} must hold a whole checkpoint, got no {MANIFEST} or no {METADATA} in it; "
        f"pass a directory that save_checkpoint wrote; nothing was loaded"
    )
    raise ConfigError(msg)


def _is_whole(directory: Path) -> bool:
    return (directory / MANIFEST).is_file() and (directory / METADATA).is_file()


def check_files(directory: Path) -> Collection[str]:
    """Check every file against the manifest; ranks share the reading.

    Returns:
        The names of the files.

    Raises:
        ConfigError: a file is missing, truncated or changed.
    """
    files = _read_manifest(directory)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for number, (name, (nbytes, saved)) in enumerate(sorted(files.items())):
        path = directory / name
        if not path.is_file():
            raise not_whole(directory, f"no file {name!r}")
        if path.stat().st_size != nbytes:
            raise not_whole(
                directory, f"{path.stat().st_size} bytes in {name!r} instead of {nbytes}"
            )
        if number % world_size == rank and checksum(path) != saved:
            raise not_whole(directory, f"other contents in {name!r} than were saved")
    return files


def _read_manifest(directory: Path) -> Files:
    try:
        manifest: Any = json.loads((directory / MANIFEST).read_text())
        version = manifest["format"]
        files = {str(name): (nbytes, saved) for name, (nbytes, saved) in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise not_whole(directory, f"a {MANIFEST} that cannot be read") from error
    if version != FORMAT:
        raise not_whole(directory, f"format {version}, where this version reads {FORMAT}")
    if METADATA not in files:
        raise not_whole(directory, f"no checksum of {METADATA!r}")
    return files


def not_whole(directory: Path, problem: str) -> ConfigError:
    """Say what is wrong with the files of a checkpoint."""
    msg = (
        f"the checkpoint in {str(directory)!r} must be whole, got {problem}; load another one; "
        f"nothing was loaded"
    )
    return ConfigError(msg)
