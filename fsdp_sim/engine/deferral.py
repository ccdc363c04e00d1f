"""Deferral: an operator whose inputs are still to come is issued now and run when they are there.

A host that needs no values goes on, as CUDA's would.  Done only when nobody could run otherwise: values
that are there at once are simpler.  A deferred operator keeps its arguments alive until it has run.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fsdp_sim.engine import patches
from fsdp_sim.engine.machine import Machine, caller
from fsdp_sim.engine.meeting import Pending, geometry_of, moved, settle, tensor_of
from fsdp_sim.engine.memory import StorageRecord
from fsdp_sim.engine.tensors import access_of
from fsdp_sim.op import Access, Kind, Source


class Deferred(Pending):
    """An operator that has been issued and not run.

    Attributes:
        arguments: positional ones, then those by name; on the program's memory.
        outputs: what is new among its results, in order.
    """

    __slots__ = ("arguments", "func", "is_fresh", "name", "outputs", "source")

    def __init__(self, machine: Machine, stream: int, name: str, source: Source | None) -> None:
        super().__init__(machine, stream, unit=object())
        self.name = name
        self.source = source
        self.func: Any = None
        self.arguments: tuple[Any, Any] = ((), {})
        self.is_fresh: Sequence[bool] = ()
        self.outputs: list[Tensor] = []

    def proceed(self) -> Sequence[Pending]:
        """Run it: all its inputs are there."""
        args, kwargs = self.arguments
        with patches.below_dispatch():
            results = flat(self.func(*args, **kwargs))
            fresh = [tensor for tensor, new in zip(results, self.is_fresh, strict=True) if new]
            for output, result in zip(self.outputs, fresh, strict=True):
                output.copy_(result)
        self.arguments, self.outputs = ((), {}), []
        self.is_ready = True
        return (self,)

    def move(self, old: int, new: Any) -> None:
        """Run on another storage."""
        self.arguments = _mapped(self.arguments, lambda tensor: moved(tensor, old, new))
        self.outputs = [moved(tensor, old, new) for tensor in self.outputs]

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
        assert record is not None
        accesses.append((record, access_of(tensor, record.ordinal, write=True)))
    for record, access in accesses:
        deferred.note(record, access)
    deferred.func, deferred.is_fresh = func, is_fresh
    deferred.arguments = _mapped((args, kwargs), _alias)
    deferred.outputs = [_alias(tensor) for tensor in fresh]
    machine.emit(
        Kind.ATEN, name, stream, tuple(access for _, access in accesses), source=deferred.source
    )
    settle(deferred)
    return out


def _alias(tensor: Tensor) -> Tensor:
    """Return the tensor with a version counter of its own."""
    return tensor_of(tensor.untyped_storage(), geometry_of(tensor))


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same arguments with other tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    return value


def flat(out: Any) -> list[Tensor]:
    """Return all tensors of a result, in order."""
    if isinstance(out, Tensor):
        return [out]
    return (
        [tensor for item in out for tensor in flat(item)] if isinstance(out, (list, tuple)) else []
    )


def before_resize(machine: Machine, storage: Any, nbytes: int) -> None:
    """The memory of a storage is about to change: what is pending on it must not see that.

    Memory that is freed is kept for what still uses it; otherwise that must be over first.
    """
    record = machine.memory.known(storage)
    if record is None or not record.pending:
        return
    users = _with_what_they_wait_for([entry[0] for entry in record.pending])
    if nbytes:
        machine.park_for(tuple(users), "resize_ needs values", is_host_wait=False)
        return
    with patches.below_dispatch():
        kept = storage.clone()
    for pending in users:
        pending.move(patches.storage_key(storage), kept)
    record.pending = []


def _with_what_they_wait_for(pending: Sequence[Pending]) -> list[Pending]:
    """Return some pending work and all that must have its values first."""
    found = dict.fromkeys(pending)
    queue = list(found)
    for each in queue:
        for other in each.waits_for:
            if other not in found:
                found[other] = None
                queue.append(other)
    return list(found)
