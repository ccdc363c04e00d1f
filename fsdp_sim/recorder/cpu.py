"""CPU: streams and events on CPUs, where PyTorch's own do nothing and would tell nothing."""

from typing import Any

import torch

from fsdp_sim.engine import patches, shims
from fsdp_sim.engine.streams import new_stream
from fsdp_sim.recorder.process import ProcessMachine


def install(undo: patches.Patches, machine: ProcessMachine) -> None:
    """Let a process without an accelerator be seen as the simulator sees a rank.

    Streams that the program made before are PyTorch's own, and are not seen.
    """
    shims.install_streams(undo)
    retired = (torch.cpu.Stream, torch.cpu.Event)
    undo.on_exit(lambda: _retire(*retired))
    shims.install_host_reads(undo)
    machine.default_stream = new_stream("default")
    machine.select(machine.default_stream)
    machine.stream_id(machine.default_stream)


def _retire(stream_class: Any, event_class: Any) -> None:
    """Let streams and events that outlive the recording do what PyTorch's own do: nothing."""
    for name in ("wait_stream", "wait_event", "synchronize", "__exit__"):
        setattr(stream_class, name, _nothing)
    for name in ("record", "wait", "synchronize"):
        setattr(event_class, name, _nothing)
    stream_class.__enter__ = _itself
    stream_class.record_event = _an_event
    stream_class.query = event_class.query = _yes


def _nothing(*_: Any) -> None:
    return None


def _yes(_: Any) -> bool:
    return True


def _itself(stream: Any) -> Any:
    return stream


def _an_event(_stream: Any, event: Any = None) -> Any:
    return event
