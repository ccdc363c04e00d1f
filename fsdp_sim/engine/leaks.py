"""Leaks: device memory that is still allocated when the program has ended and its garbage is collected."""

import functools
import gc
from collections.abc import Iterable, Iterator
from types import CellType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

import torch
from torch import Tensor

from fsdp_sim.engine import patches
from fsdp_sim.engine.machine import Machine
from fsdp_sim.engine.memory import StorageRecord
from fsdp_sim.errors import Finding, OpSite

HOLDERS_SHOWN = 4


def find(machines: Iterable[Machine], known: Iterable[Any]) -> list[Finding]:
    """Return a finding for each block that outlives the program and that ``known`` does not reach.

    Args:
        machines: of ranks whose programs have ended.
        known: what may keep memory: the program's results, arguments and what its closure holds.
    """
    living = [
        (machine, record)
        for machine in machines
        for record in machine.memory.records.values()
        if record.is_allocated and not record.is_host
    ]
    if not living:
        return []
    reached = _storages_of(known)
    left = [(machine, record) for machine, record in living if record.key not in reached]
    holders = _holders({record.key for _, record in left})
    return [
        _report(
            machine,
            record,
            holders.get(record.key) or "something older than the run, or outside Python",
        )
        for machine, record in left
    ]


def _report(machine: Machine, record: StorageRecord, holder: str) -> Finding:
    storage = record()
    nbytes = storage.nbytes() if storage is not None else 0
    rank = machine.rank.index
    message = (
        f"rank {rank}: block {record.ordinal} of {nbytes} bytes is still allocated though the program"
        " has ended; its results do not hold it"
    )
    site = OpSite(rank, record.born_at, "alloc", f"stream {record.stream}", record.source)
    return Finding("Leak", message, (site,), (f"held by {holder}",), (rank,))


def _storages_of(known: Iterable[Any]) -> set[int]:
    """Return the storages that can be reached without going through modules and classes."""
    storages: set[int] = set()
    for value in _reachable(known):
        if isinstance(value, Tensor):
            storages.update(_storages_of_tensor(value))
        elif isinstance(value, torch.UntypedStorage):
            storages.add(patches.storage_key(value))
    return storages


def _storages_of_tensor(tensor: Tensor) -> Iterator[int]:
    if type(tensor) in patches.PLAIN_TENSORS and patches.has_storage(tensor):
        yield patches.storage_key(tensor.untyped_storage())
    for inner in patches.inner_tensors(tensor):
        yield from _storages_of_tensor(inner)
    for saved in patches.saved_for_backward(tensor):
        yield patches.storage_key(saved.untyped_storage())


def _reachable(known: Iterable[Any]) -> Iterator[Any]:
    stack, seen = list(known), set()
    while stack:
        value = stack.pop()
        if id(value) in seen or isinstance(value, (ModuleType, type)):
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, FunctionType):  # not its globals
            stack.extend((value.__closure__ or (), value.__defaults__, value.__dict__))
        else:
            stack.extend(gc.get_referents(value))
            if isinstance(value, functools.partial):
                stack.extend((value.func, value.args, value.keywords))


def _holders(keys: set[int]) -> dict[int, str]:
    """Return in words what holds the tensors of these storages."""
    holders: dict[int, str] = {}
    everything = gc.get_objects()
    for value in everything:
        is_plain = isinstance(value, Tensor) and type(value) in patches.PLAIN_TENSORS
        if is_plain and patches.has_storage(value):
            key = patches.storage_key(value.untyped_storage())
            if key in keys and key not in holders:
                holders[key] = " in ".join(_path(value, everything))
    return holders


def _path(value: Any, everything: list[Any]) -> Iterator[str]:
    """Yield what holds ``value``, what holds that, and so on."""
    seen = {id(value), id(everything)}
    for _ in range(HOLDERS_SHOWN):
        holder = next((each for each in gc.get_referrers(value) if _is_kept(each, seen)), None)
        if holder is None:
            return
        seen.add(id(holder))
        is_module = isinstance(holder, dict) and "__name__" in holder
        yield f"module {holder['__name__']}" if is_module else f"a {type(holder).__qualname__}"
        if is_module:
            return
        value = holder


def _is_kept(holder: Any, seen: set[int]) -> bool:
    """Whether it may hold memory for long: it is no frame of this search, and was not met before."""
    return not isinstance(holder, (FrameType, GeneratorType, CellType)) and id(holder) not in seen
