"""Delays: work that takes long, put on a stream at a chosen place while a program is recorded."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ci.gpu.process import has_gpu
from fsdp_sim.engine import machine as machines
from fsdp_sim.engine import patches
from fsdp_sim.errors import Finding
from fsdp_sim.op import Source

CYCLES_PER_MS = 2_000_000
"""Of ``torch.cuda._sleep``, at about 2 GHz."""


@dataclass(frozen=True)
class Place:
    """Where a recorded program stands: what it does, on which stream, for which unit.

    Attributes:
        label: the runtime's innermost open range.
        role: of the current stream.
        source: the line that does it.
    """

    label: str | None
    role: str
    source: Source | None


def sleep(milliseconds: float) -> None:
    """Let the current stream do nothing for a while."""
    if has_gpu():
        torch.cuda._sleep(int(milliseconds * CYCLES_PER_MS))  # noqa: SLF001  there is no other


class Delays(TorchDispatchMode):
    """Asks before each operator how long the current stream shall sleep, in milliseconds.

    To be entered inside ``fsdp_sim.record``, which knows labels and streams.
    """

    def __init__(self, delay: Callable[[Place], float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._delay = delay

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Sleep, and make the call."""
        if types and patches.is_python_subclass(types):
            return NotImplemented
        machine = machines.current()
        if machine is not None and func.namespace != "profiler":
            place = Place(machine.annotation, machine.stream.role, machines.caller())
            milliseconds = self._delay(place)
            if milliseconds:
                sleep(milliseconds)
        return func(*args, **(kwargs or {}))


class BeforeFirst:
    """Delays the op of a finding that was issued first, so that the other one overtakes it.

    Its stream sleeps where the labelled range of that op begins on it; without a label, before the op.

    Attributes:
        place: what is delayed, in words.
        hits: how often it was.
    """

    def __init__(self, finding: Finding, milliseconds: float) -> None:
        works = [site for site in finding.ops if site.name not in ("alloc", "free")]
        self._site = min(works, key=lambda site: site.index)
        self._milliseconds = milliseconds
        self._role = self._site.stream.partition(" (")[2].rstrip(")")
        self._was_there = False
        self.hits = 0

    @property
    def place(self) -> str:
        """What is delayed."""
        site = self._site
        return f"{site.annotation or site.name} on {self._role or site.stream} at {site.source}"

    def __call__(self, place: Place) -> float:
        """Return how long to sleep."""
        site = self._site
        is_here = place.role == self._role and (
            place.label == site.annotation if site.annotation else place.source == site.source
        )
        begins, self._was_there = is_here and not self._was_there, is_here
        if not begins:
            return 0.0
        self.hits += 1
        return self._milliseconds


class AtRandom:
    """Delays any op, with a small chance."""

    def __init__(self, seed: int, chance: float, milliseconds: float) -> None:
        self._random = random.Random(seed)
        self._chance = chance
        self._milliseconds = milliseconds
        self.hits = 0

    def __call__(self, _: Place) -> float:
        """Return how long to sleep."""
        if self._random.random() >= self._chance:
            return 0.0
        self.hits += 1
        return self._milliseconds
