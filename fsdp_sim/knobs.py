"""Knobs: the settings that a schedule line may carry beside its deviations."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from fsdp_sim.engine.faults import Rule, parse
from fsdp_sim.errors import ConfigError

KNOWN = "cuda, values, late, collect, shuffleN, seedN, or a fault such as 'crash:issue@rank=1,at=3'"
_SHUFFLE = re.compile(r"shuffle([1-9][0-9]{0,8})")
_SEED = re.compile(r"seed[0-9]{1,9}")


@dataclass(frozen=True)
class Knobs:
    """How a run differs from a friendly one.

    Attributes:
        cuda: the program says ``cuda`` and ``nccl``.
        values: only values and collectives are of interest: operators run as they are, unseen.
        late: values of collectives move as late as is legal.
        collect: whether garbage is collected is decided at each point where hosts may switch.
        shuffle: which permutation orders sets of tensors, parameters and modules on each rank; 0: none.
        faults: what is to go wrong, in the order in which they are asked.
    """

    cuda: bool = False
    values: bool = False
    late: bool = False
    collect: bool = False
    shuffle: int = 0
    faults: tuple[Rule, ...] = ()

    @classmethod
    def parse(cls, names: Iterable[str]) -> "Knobs":
        """Read knobs as a schedule line writes them.

        A seed is of the scheduler that drew the deviations, which the line holds: it has no effect.

        Raises:
            ConfigError: no knob is written so, or one needs operators to be seen beside "values".
        """
        flags = dict.fromkeys(("cuda", "values", "late", "collect"), False)
        shuffle, faults = 0, []
        for name in names:
            shuffled = _SHUFFLE.fullmatch(name)
            if name in flags:
                flags[name] = True
            elif shuffled is not None:
                shuffle = int(shuffled[1])
            elif ":" in name:
                faults.append(parse(name))
            elif not _SEED.fullmatch(name):
                raise ConfigError(f"a knob must be one of {KNOWN}, got {name!r}")
        needs_operators = next((name for name in ("cuda", "late") if flags[name]), None)
        if flags["values"] and needs_operators:
            raise ConfigError(
                f"the knob 'values', under which no operator is seen, must not be joined with "
                f"{needs_operators!r}, which needs them, got both"
            )
        return cls(**flags, shuffle=shuffle, faults=tuple(faults))
