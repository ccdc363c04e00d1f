"""The subject of a mutation: a package, and which of its files are seams that sites look through."""

import importlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fsdp_sim.errors import ConfigError

if TYPE_CHECKING:
    from fsdp_sim.mutation.change import Change
    from fsdp_sim.mutation.programs import Program

_SEAMS = {"fsdp_core": ("device.py",)}
"""Files of verbs: a site is a caller of them, never one of their own lines."""

FSDP2 = "torch.distributed.fsdp"

_KEEP_ALIVE = {"fsdp_core": ("fsdp_core.device", "keep_alive")}
"""Functions that hold a reference until a device is done, by package."""


@dataclass(frozen=True)
class Subject:
    """The package under mutation.

    Attributes:
        name: as it is imported.
        root: the folder that site files are relative to.
        home: the package's folder, or its only file.
        seams: files inside it that sites look through.
        keep_alive: module and name of its function that keeps references, if it has one.
    """

    name: str
    root: Path
    home: Path
    seams: tuple[Path, ...] = ()
    keep_alive: tuple[str, str] | None = None

    def file_of(self, path: str) -> str | None:
        """Return a source file's name relative to ``root``; None if it is not the package's."""
        file = Path(path)
        is_inside = file == self.home or file.is_relative_to(self.home)
        return str(file.relative_to(self.root)) if is_inside else None

    def modules(self) -> Iterable[ModuleType]:
        """Give the package's modules that are loaded."""
        prefix = f"{self.name}."
        for name, module in sorted(sys.modules.items()):
            if name == self.name or name.startswith(prefix):
                yield module

    def holders_of_keep_alive(self) -> list[tuple[Any, str]]:
        """Return every module and name under which the package calls its ``keep_alive``."""
        if self.keep_alive is None:
            return []
        home, name = self.keep_alive
        function = getattr(importlib.import_module(home), name)
        return [
            (module, key)
            for module in self.modules()
            for key, value in sorted(vars(module).items())
            if value is function
        ]


def known_changes(name: str) -> "list[Change]":
    """Return the known bugs that are kept for a package."""
    if name != "fsdp_core":
        return []
    from fsdp_sim.mutation.core_changes import changes

    return changes()


def known_programs(name: str) -> "list[Program]":
    """Return the programs that are kept for a package.

    Raises:
        ConfigError: there are none.
    """
    from fsdp_sim.mutation import core_functions, core_programs, fsdp2, programs

    if name == "fsdp_core":
        specs = core_programs.programs().items()
        functions = core_functions.PROGRAMS
        return [
            *(programs.SpecProgram(key, spec) for key, spec in specs),
            *(programs.FunctionProgram(f.__name__, f, core_functions.RANKS) for f in functions),
        ]
    if name == FSDP2 or name.startswith(f"{FSDP2}."):
        return [programs.FunctionProgram(fn.__name__, fn, fsdp2.RANKS) for fn in fsdp2.PROGRAMS]
    raise ConfigError(
        f"programs are kept for fsdp_core and {FSDP2}, got {name!r}; name some with --program"
    )


def find(name: str) -> Subject:
    """Return the package or module called ``name``; it is imported, nothing of it is changed.

    Raises:
        ConfigError: there is none, or it has no Python source.
    """
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ConfigError(f"the package to mutate must be one that can be imported, got {name!r}")
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise ConfigError(f"the package to mutate must have Python source, got {name!r}")
    importlib.import_module(name)
    origin = Path(spec.origin)
    home = origin.parent if spec.submodule_search_locations else origin
    root = home.parents[name.count(".")]
    seams = tuple(home / file for file in _SEAMS.get(name, ()))
    return Subject(name, root, home, seams, _KEEP_ALIVE.get(name))
