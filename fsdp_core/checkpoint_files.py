"""The directory of a checkpoint: written beside the previous one, checksummed, put in its place.

Beside the files of `torch.distributed.checkpoint` lies a manifest with the size and checksum of each.
"""

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdp_core.errors import ConfigError

MANIFEST = "manifest.json"
METADATA = ".metadata"
FORMAT = 2

_READ_NBYTES = 1 << 24


def make_room(target: Path, partial: Path) -> None:
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
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def replace(target: Path, partial: Path) -> None:
    """Let a whole directory take the place of the previous one.

    What bears the name `.old` may be the only checkpoint, until a whole one has the target's.
    """
    old = _old(target)
    if _is_whole(target):
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _old(target: Path) -> Path:
    """Return the name of the previous checkpoint while another takes its place."""
    return target.with_name(target.name + ".old")


def _is_whole(directory: Path) -> bool:
    return (directory / MANIFEST).is_file() and (directory / METADATA).is_file()


def list_files(directory: Path) -> dict[str, Any]:
    """Return the size and checksum of every file that this rank wrote.

    Why the checksum in hexadecimal: what ranks exchange must have the same size whatever its value.
    """
    rank = dist.get_rank()
    return {
        path.name: (path.stat().st_size, f"{checksum(path):08x}")
        for path in sorted(directory.iterdir())
        if path.name.startswith(f"__{rank}_") or (rank == 0 and path.name == METADATA)
    }


def write_manifest(directory: Path, parts: list[dict[str, Any]]) -> None:
    """Write what the ranks listed."""
    files = {
        name: [nbytes, int(digits, 16)] for part in parts for name, (nbytes, digits) in part.items()
    }
    text = json.dumps({"format": FORMAT, "files": files}, indent=1, sort_keys=True)
    (directory / MANIFEST).write_text(text)


def find(target: Path) -> Path:
    """Return the directory to load: the previous one, if a save died while it took its place."""
    for directory in (target, _old(target)):
        if _is_whole(directory):
            return directory
    msg = (
        f"{str(target)!r} must hold a whole checkpoint, got no {MANIFEST} or no {METADATA} in it; "
        f"pass a directory that save_checkpoint wrote"
    )
    raise ConfigError(msg)


def check_files(directory: Path) -> None:
    """Check every file against the manifest; ranks share the reading.

    Raises:
        ConfigError: a file is missing, truncated or changed.
    """
    problem = _file_problem(directory)
    if problem is not None:
        msg = (
            f"the checkpoint in {str(directory)!r} must be whole, got {problem}; load another one; "
            f"nothing was loaded"
        )
        raise ConfigError(msg)


def _file_problem(directory: Path) -> str | None:
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        files = dict(manifest["files"])
        version = manifest["format"]
    except (ValueError, KeyError, TypeError):
        return f"a {MANIFEST} that cannot be read"
    if version != FORMAT:
        return f"format {version}, where this version reads {FORMAT}"
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for number, (name, (nbytes, saved)) in enumerate(sorted(files.items())):
        path = directory / name
        if not path.is_file():
            return f"no file {name!r}"
        if path.stat().st_size != nbytes:
            return f"{path.stat().st_size} bytes in {name!r} instead of {nbytes}"
        if number % world_size == rank and checksum(path) != saved:
            return f"other contents in {name!r} than were saved"
    return None


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file, as the manifest has it."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(_READ_NBYTES):
            value = zlib.crc32(block, value)
    return value
