"""Programs that a mutation runs: programs as data, compared with the unsharded run, and rank functions."""

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from fsdp_sim.errors import ConfigError
from fsdp_sim.program.codec import load_program
from fsdp_sim.program.parity import run_differences, run_rank
from fsdp_sim.program.results import FullRun
from fsdp_sim.program.spec import ProgramSpec
from fsdp_sim.reference import run_reference


class Program(Protocol):
    """What is run.

    Attributes:
        name: in the table.
        ranks: how many it needs.
        fn, args: one rank's program, as ``simulate`` takes them.
    """

    name: str
    ranks: int
    fn: Callable[..., Any]
    args: tuple[Any, ...]

    def difference(self, results: Sequence[Any]) -> str | None:
        """Say how the ranks' results differ from what they must be; None if they do not."""
        ...


class SpecProgram:
    """A program as data; its results must equal those of the unsharded run."""

    def __init__(self, name: str, spec: ProgramSpec) -> None:
        self.name = name
        self.ranks = spec.world_size
        self.fn: Callable[..., Any] = run_rank
        self.args = (spec,)
        self._spec = spec
        self._expected: FullRun | None = None

    def difference(self, results: Sequence[Any]) -> str | None:
        """Compare with the unsharded run."""
        if self._expected is None:
            self._expected = run_reference(self._spec)
        differences = run_differences(self._spec, results, self._expected)
        return differences[0] if differences else None


class FunctionProgram:
    """A rank function; its results must equal those of its first run, in which nothing is broken."""

    def __init__(self, name: str, fn: Callable[[int], Any], ranks: int) -> None:
        self.name = name
        self.ranks = ranks
        self.fn: Callable[..., Any] = fn
        self.args: tuple[Any, ...] = ()
        self._expected: Sequence[Any] | None = None

    def difference(self, results: Sequence[Any]) -> str | None:
        """Compare with the first run."""
        if self._expected is None:
            self._expected = results
            return None
        for rank, (got, expected) in enumerate(zip(results, self._expected, strict=True)):
            if not same(got, expected):
                return f"rank {rank}: the result differs from that of the unbroken run"
        return None


def same(one: Any, other: Any) -> bool:
    """Whether two results are equal, tensors and NaN bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and _same_bits(one, other)
    if dataclasses.is_dataclass(one):
        return same(vars(one), vars(other))
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (one != one and other != other)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = one.detach().cpu(), other.detach().cpu()
    return bool(torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True))


# ---------------------------------------------------------------------- naming programs


def named(text: str, ranks: int) -> Program:
    """Return the program that a user names.

    Args:
        text: ``module:function`` or ``file.py:function`` of a rank function, or a JSON file of a program
            or of a replay.
        ranks: of a rank function; a program as data says its own.

    Raises:
        ConfigError: there is no such program.
    """
    if text.endswith(".json"):
        return SpecProgram(Path(text).stem, _read_spec(Path(text)))
    home, _, name = text.rpartition(":")
    if not home:
        raise ConfigError(
            f"a program must be module:function, file.py:function or a file of JSON, got {text!r}"
        )
    function = getattr(_load_module(home), name, None)
    if not callable(function):
        raise ConfigError(f"{home} must have a function {name!r} of a rank, got {function!r}")
    return FunctionProgram(text, function, ranks)


def _read_spec(path: Path) -> ProgramSpec:
    from fsdp_sim.replay_file import load

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"a program must be a readable file, got {path}: {error}") from None
    if '"digest"' not in text:
        return load_program(text)
    program = load(text).program
    if program is None:
        raise ConfigError(f"{path} must be the replay file of a program, got another subject")
    return program


def _load_module(home: str) -> Any:
    if not home.endswith(".py"):
        try:
            return importlib.import_module(home)
        except ImportError as error:
            raise ConfigError(f"the module of a program must be importable: {error}") from error
    path = Path(home)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise ConfigError(f"the file of a program must exist, got {home}")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module
