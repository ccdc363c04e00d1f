"""Run any torch.distributed program on simulated ranks in one process, and check every ordering.

Names are loaded on first use: importing the package imports neither torch nor hypothesis.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_sim.errors import Finding as Finding
    from fsdp_sim.exploration import Exploration as Exploration
    from fsdp_sim.exploration import explore as explore
    from fsdp_sim.probes import sometimes as sometimes
    from fsdp_sim.recorder import Recording as Recording
    from fsdp_sim.recorder import record as record
    from fsdp_sim.simulation import Report as Report
    from fsdp_sim.trace import Trace as Trace
    from fsdp_sim.verbs import replay as replay
    from fsdp_sim.verbs import simulate as simulate

_HOME = {
    "simulate": "fsdp_sim.verbs",
    "replay": "fsdp_sim.verbs",
    "explore": "fsdp_sim.exploration",
    "Exploration": "fsdp_sim.exploration",
    "sometimes": "fsdp_sim.probes",
    "record": "fsdp_sim.recorder",
    "Recording": "fsdp_sim.recorder",
    "Report": "fsdp_sim.simulation",
    "Trace": "fsdp_sim.trace",
    "Finding": "fsdp_sim.errors",
    "SimulationError": "fsdp_sim.errors",
    "FindingError": "fsdp_sim.errors",
    "RunError": "fsdp_sim.errors",
    "ConfigError": "fsdp_sim.errors",
    "Race": "fsdp_sim.errors",
    "UseAfterFree": "fsdp_sim.errors",
    "CollectiveMismatch": "fsdp_sim.errors",
    "Deadlock": "fsdp_sim.errors",
    "NotAtRest": "fsdp_sim.errors",
    "ParityError": "fsdp_sim.errors",
    "CaptureUnsafe": "fsdp_sim.errors",
    "Leak": "fsdp_sim.errors",
    "UnusedPrefetch": "fsdp_sim.errors",
    "PossibleDeadlock": "fsdp_sim.errors",
    "StepLimit": "fsdp_sim.errors",
    "CannotRunAhead": "fsdp_sim.errors",
    "Nondeterminism": "fsdp_sim.errors",
    "WrongSchema": "fsdp_sim.errors",
    "InjectedFault": "fsdp_sim.errors",
    "InjectedCrash": "fsdp_sim.errors",
    "Diverged": "fsdp_sim.errors",
    "HandoverTimeout": "fsdp_sim.errors",
    "UnseenThread": "fsdp_sim.errors",
    "Notice": "fsdp_sim.errors",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'fsdp_sim' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
