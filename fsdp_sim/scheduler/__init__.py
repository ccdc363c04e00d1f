"""Scheduling policies, one a file: the engine asks at each decision, a policy answers."""

from fsdp_sim.errors import ConfigError
from fsdp_sim.schedule import Schedule
from fsdp_sim.scheduler.decision import (
    RANK_KINDS,
    YES_NO_KINDS,
    Decision,
    Scheduler,
    default_rank,
)
from fsdp_sim.scheduler.exhaustive import Exhaustive
from fsdp_sim.scheduler.independence import Point
from fsdp_sim.scheduler.pct import STEPS_DEFAULT, Pct
from fsdp_sim.scheduler.program_order import ProgramOrder
from fsdp_sim.scheduler.recheck import Recheck
from fsdp_sim.scheduler.recorder import Recorder
from fsdp_sim.scheduler.replay import Misfit, Replay
from fsdp_sim.scheduler.uniform import Uniform

__all__ = [
    "RANK_KINDS",
    "SCHEDULERS",
    "YES_NO_KINDS",
    "Decision",
    "Exhaustive",
    "Misfit",
    "Pct",
    "Point",
    "ProgramOrder",
    "Recheck",
    "Recorder",
    "Replay",
    "Scheduler",
    "Uniform",
    "default_rank",
    "make",
]

SCHEDULERS = ("program_order", "uniform", "pct", "exhaustive", "replay")


def make(
    name: str,
    *,
    seed: int,
    schedule: Schedule,
    steps: int = STEPS_DEFAULT,
    strict: bool = False,
) -> Scheduler:
    """Make the scheduler called ``name``.

    Args:
        name: one of ``SCHEDULERS``.
        seed: of ``uniform`` and ``pct``; feeds nothing else.
        schedule: of ``replay``; the others use its world size alone.
        steps: number of decisions of a run, for ``pct``.
        strict: whether ``replay`` stops at the first deviation that does not fit.

    Raises:
        ConfigError: no scheduler has that name.
    """
    match name:
        case "program_order":
            return ProgramOrder()
        case "uniform":
            return Uniform(seed=seed)
        case "pct":
            return Pct(seed=seed, ranks=schedule.world_size, steps=steps)
        case "exhaustive":
            return Exhaustive()
        case "replay":
            return Replay(schedule, strict=strict)
        case _:
            raise ConfigError(f"scheduler must be one of {', '.join(SCHEDULERS)}, got {name!r}")
