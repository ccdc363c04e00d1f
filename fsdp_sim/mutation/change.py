"""Changes: known bugs of runtimes like fsdp_core, put into it while a program runs; each must be found."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_sim.engine import patches


@dataclass(frozen=True)
class Change:
    """One bug.

    Attributes:
        name: what is wrong, in words.
        owner, attribute: the function that is replaced.
        wrong: makes the wrong function of the right one.
    """

    name: str
    owner: Any
    attribute: str
    wrong: Callable[[Any], Any]

    @property
    def place(self) -> str:
        """Where the right function is, as ``file:line``."""
        function = getattr(self.owner, self.attribute)
        function = getattr(function, "fget", function)
        code = inspect.unwrap(function).__code__
        path = Path(code.co_filename)
        return f"{path.parent.name}/{path.name}:{code.co_firstlineno}"

    def in_force(self) -> AbstractContextManager[None]:
        """Put the bug in, for the time of one run."""
        return replaced(self.owner, self.attribute, self.wrong)


@contextmanager
def replaced(owner: Any, attribute: str, wrong: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a function by the one that ``wrong`` makes of it, inside the scope."""
    undo = patches.Patches()
    undo.replace(owner, attribute, wrong(getattr(owner, attribute)))
    try:
        yield
    finally:
        undo.undo()
