"""PyTorch's own analysis of flight-recorder dumps."""

import gc
from pathlib import Path
from typing import Any

from torch.distributed.flight_recorder.components.builder import build_db
from torch.distributed.flight_recorder.components.config_manager import JobConfig
from torch.distributed.flight_recorder.components.loader import read_dir

from fsdp_sim.trace import Trace
from fsdp_sim.views.flight_recorder import PREFIX, dump


def analysed(trace: Trace, folder: Path) -> Any:
    """Dump a trace and analyse the dumps; reading them leaves the garbage collector off."""
    dump(trace, folder)
    arguments = JobConfig().parse_args([str(folder), "--prefix", PREFIX])
    try:
        details, version = read_dir(arguments)
    finally:
        gc.enable()
    return build_db(details, arguments, version)
