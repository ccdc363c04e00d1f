"""Script: an unmodified training script as a rank function, run as ``__main__`` on each rank."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType

from fsdp_sim.errors import ConfigError


class Script:
    """A script and its command line; calling it runs the script once, as a module of its own.

    What the script imports is shared by all ranks, as the limits page says; its own globals are not.

    Raises:
        ConfigError: the file is not there or is not Python.
    """

    def __init__(self, path: str, arguments: tuple[str, ...] = ()) -> None:
        self.path = path
        self.arguments = arguments
        self._code = _compile(path)

    def __call__(self, _rank: int) -> None:
        """Run the script on one rank."""
        module = ModuleType("__main__")
        module.__file__ = self.path
        sys.modules["__main__"] = module
        sys.argv = [self.path, *self.arguments]
        exec(self._code, module.__dict__)

    @contextmanager
    def importing(self) -> Iterator[None]:
        """Let the script import what lies beside it, and put everything back afterwards."""
        kept = sys.modules["__main__"], sys.argv, list(sys.path)
        sys.path.insert(0, str(Path(self.path).resolve().parent))
        try:
            yield
        finally:
            sys.modules["__main__"], sys.argv, sys.path[:] = kept


def _compile(path: str) -> CodeType:
    try:
        return compile(Path(path).read_bytes(), path, "exec")
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"a script must be a file of Python code, got {path}: {error}") from error
