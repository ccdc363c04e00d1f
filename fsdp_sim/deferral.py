"""Deferral: an operator whose inputs are still to come is issued now and run when they are there.

A host that needs no values goes on, as CUDA's would.  Done only when nobody could run otherwise: values
that are there at once are simpler.  A deferred operator keeps its arguments alive until it has run.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fsdp_sim import patches
from fsdp_sim.machine import Machine, caller
from fsdp_sim.meeting import Pending, geometry_of, settle, tensor_of
from fsdp_sim.memory import StorageRecord
from fsdp_sim.op import Access, Kind, Source
from fsdp_sim.tensors import access_of


class Deferred(Pending):
    """An operator that has been issued and not run."""

    __slots__ = ("name", "run", "source")

    def __init__(self, machine: Machine, stream: int, name: str, source: Source | None) -> None:
        super().__init__(machine, stream, unit=object())
        self.name = name
        self.source = source
        self.run: Callable[[], None] = lambda: None

    def proceed(self) -> Sequence[Pending]:
        """Run it: all its inputs are there."""
        with patches.below_dispatch():
            self.run()
        self.run = lambda: None
        self.is_ready = True
        return (self,)

    def describe(self) -> str:
        """Return the operator and where it was issued."""
        return f"{self.name} issued at {self.source}"


def defer(
    machine: Machine,
    name: str,
    func: Any,
    args: Any,
    kwargs: Any,
    touched: Sequence[tuple[StorageRecord, Access]],
) -> Any:
    """Issue an operator whose inputs are still to come; return its outputs, without values.

    Raises:
        NotImplementedError: PyTorch cannot tell the outputs' shapes without running it.
    """
    with patches.below_dispatch():
        out, is_fresh = patches.outputs_without_values(func, args, kwargs)
    stream = machine.current_stream_id()
    deferred = Deferred(machine, stream, name, caller())
    accesses = list(touched)
    fresh = [tensor for tensor, new in zip(flat(out), is_fresh, strict=True) if new]
    for tensor in fresh:
        record = machine.memory.born(tensor, source=deferred.source)
        accesses.append((record, access_of(tensor, record.ordinal, write=True)))
    for record, access in accesses:
        deferred.note(record, access)
    deferred.run = _later(func, _aliases(args), _aliases(kwargs), is_fresh, _aliases(fresh))
    machine.emit(
        Kind.ATEN, name, stream, tuple(access for _, access in accesses), source=deferred.source
    )
    settle(deferred)
    return out


def _later(
    func: Any, args: Any, kwargs: Any, is_fresh: Sequence[bool], outputs: Sequence[Tensor]
) -> Callable[[], None]:
    def run() -> None:
        results = flat(func(*args, **kwargs))
        fresh = [tensor for tensor, new in zip(results, is_fresh, strict=True) if new]
        for output, result in zip(outputs, fresh, strict=True):
            output.copy_(result)

    return run


def _aliases(value: Any) -> Any:
    """Return the same arguments on the same memory, with version counters of their own."""
    if isinstance(value, Tensor):
        return tensor_of(value.untyped_storage(), geometry_of(value))
    if isinstance(value, (list, tuple)):
        return [_aliases(item) for item in value]
    if isinstance(value, dict):
        return {key: _aliases(item) for key, item in value.items()}
    return value


def flat(out: Any) -> list[Tensor]:
    """Return all tensors of a result, in order."""
    if isinstance(out, Tensor):
        return [out]
    return (
        [tensor for item in out for tensor in flat(item)] if isinstance(out, (list, tuple)) else []
    )


def before_resize(machine: Machine, record: StorageRecord | None) -> None:
    """The memory of a storage is about to change: what still has to read it must do so first."""
    needs = [entry[0] for entry in record.pending] if record is not None else []
    needs = [each for each in needs if not each.is_ready]
    if needs:
        machine.park_for(tuple(needs), "resize_ needs values", is_host_wait=False)
