"""Schedule: sparse deviations from program order, as a short line of text that replays a run."""

import re
from dataclasses import dataclass
from typing import NamedTuple

from fsdp_sim.errors import ConfigError

VERSION = 1
RANKS_MAX = 4096
STEP_MAX = 100_000_000
DEVIATIONS_MAX = 200_000
KNOBS_MAX = 16

_NUMBER = r"(0|[1-9][0-9]{0,8})"
_VERSION_PART = re.compile(rf"v{_NUMBER}")
_WORLD_PART = re.compile(rf"w{_NUMBER}")
_DEVIATION_PART = re.compile(rf"{_NUMBER}>{_NUMBER}")
_KNOB_PART = re.compile(r"([a-z_]+)((?:[0-9@:=][A-Za-z0-9_.:=@,-]{0,63})?)")

KNOBS = (
    "seed",
    "cuda",
    "values",
    "late",
    "collect",
    "shuffle",
    "crash",
    "hang",
    "delay",
    "drop",
    "duplicate",
    "corrupt",
    "oom",
    "fail",
    "torn",
)
"""Names of settings that a schedule may hold; a number or the place of a fault may follow (knobs.py)."""


class Deviation(NamedTuple):
    """At decision ``step`` take ``choice`` instead of the default.

    Attributes:
        step: number of the decision, counted over the whole run.
        choice: a rank at a rank decision; 1 at a yes/no decision.
    """

    step: int
    choice: int

    def __str__(self) -> str:
        """Return ``step>choice``."""
        return f"{self.step}>{self.choice}"


@dataclass(frozen=True)
class Schedule:
    """How a run differs from program order: all that a replay needs besides the program.

    Attributes:
        world_size: number of simulated ranks.
        knobs: settings that differ from their defaults, in the order in which they are written.
        deviations: in rising order of step.

    Raises:
        ConfigError: a part is malformed, out of order or out of range.
    """

    world_size: int
    knobs: tuple[str, ...] = ()
    deviations: tuple[Deviation, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.world_size <= RANKS_MAX:
            raise ConfigError(
                f"a schedule's world size must be between 1 and {RANKS_MAX}, got {self.world_size}"
            )
        self._check_knobs()
        self._check_deviations()

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Read a line as ``str`` writes it, such as ``v1;w4;seed7;late;17>2;42>0``.

        Raises:
            ConfigError: the line is malformed or of another version; the message names the part.
        """
        if not isinstance(text, str):
            raise ConfigError(f"a schedule must be a line of text, got {type(text).__name__}")
        parts = text.split(";")
        _check_version(parts[0], text)
        world = _WORLD_PART.fullmatch(parts[1]) if len(parts) > 1 else None
        if world is None:
            got = repr(parts[1]) if len(parts) > 1 else "the end"
            raise ConfigError(f"a schedule's second part must be its world size (w4), got {got}")
        knobs, deviations = _split(parts[2:])
        return cls(int(world[1]), knobs, deviations)

    def __str__(self) -> str:
        """Return the line that ``parse`` reads."""
        return ";".join(
            [f"v{VERSION}", f"w{self.world_size}", *self.knobs, *map(str, self.deviations)]
        )

    def _check_knobs(self) -> None:
        if len(self.knobs) > KNOBS_MAX:
            raise ConfigError(f"a schedule holds {KNOBS_MAX} knobs at most, got {len(self.knobs)}")
        for position, knob in enumerate(self.knobs):
            match = _KNOB_PART.fullmatch(knob)
            if match is None or match[1] not in KNOBS:
                raise ConfigError(
                    f"a schedule's knobs must be among {', '.join(KNOBS)}, got {knob!r}"
                )
            if knob in self.knobs[:position]:
                raise ConfigError(f"a schedule must name each knob once, got {knob!r} twice")

    def _check_deviations(self) -> None:
        if len(self.deviations) > DEVIATIONS_MAX:
            raise ConfigError(
                f"a schedule holds {DEVIATIONS_MAX} deviations at most, got {len(self.deviations)}"
            )
        choice_end = max(self.world_size, 2)  # a yes/no decision offers 0 and 1
        before: Deviation | None = None
        for deviation in self.deviations:
            if not 0 <= deviation.step <= STEP_MAX:
                raise ConfigError(
                    f"a deviation's step must be between 0 and {STEP_MAX}, got {deviation}"
                )
            if not 0 <= deviation.choice < choice_end:
                raise ConfigError(
                    f"a deviation's choice must be below {choice_end}"
                    f" in a world of {self.world_size}, got {deviation}"
                )
            if before is not None and deviation.step <= before.step:
                raise ConfigError(
                    f"a schedule's deviations must be in rising order of step, one a step,"
                    f" got {before} before {deviation}"
                )
            before = deviation


def _check_version(part: str, text: str) -> None:
    """Refuse what no version of this package wrote, and what another version did."""
    version = _VERSION_PART.fullmatch(part)
    if version is None:
        raise ConfigError(
            f"a schedule must begin with its version, as in 'v1;w4;17>2', got {text[:80]!r}"
        )
    if int(version[1]) != VERSION:
        raise ConfigError(
            f"a schedule must be of version {VERSION}, got {part!r};"
            " replay it with the version of fsdp_sim that wrote it"
        )


def _split(parts: list[str]) -> tuple[tuple[str, ...], tuple[Deviation, ...]]:
    """Split the parts behind the world size into knobs and, after them, deviations."""
    knobs: list[str] = []
    deviations: list[Deviation] = []
    for part in parts:
        match = _DEVIATION_PART.fullmatch(part)
        if match is not None:
            deviations.append(Deviation(int(match[1]), int(match[2])))
        elif deviations or not part[:1].isalpha():
            raise ConfigError(
                "a schedule's parts must be knobs such as 'seed7', then deviations such as '17>2',"
                f" got {part!r}"
            )
        else:
            knobs.append(part)
    return tuple(knobs), tuple(deviations)
