"""Hashes: sets of tensors, parameters and modules are ordered by the run, not by addresses.

What a rank makes is numbered by the rank, so that such a set has the same order in every process and on
every rank; the knob ``shuffleN`` permutes the numbers of each rank in its own way, as other addresses
would.  What is older than the world keeps the hash it may have been stored under.
"""

import functools
import hashlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_sim.engine import machine as machines
from fsdp_sim.engine import patches
from fsdp_sim.engine.machine import Machine

_HASHES: dict[int, tuple[weakref.ref[Any], int]] = {}
"""Address -> the object there and its hash, as long as it lives."""

_REPLACED = patches.Patches()


def install(undo: patches.Patches) -> None:
    """Number what ranks make; a number stays with its object when the world ends."""
    _REPLACED.undo()
    _REPLACED.replace(Tensor, "__hash__", _hash_of_tensor)
    _REPLACED.replace(nn.Module, "__hash__", _hash_of_module)
    undo.wrap(nn.Module, "__init__", _numbering)
    undo.wrap(torch.utils, "swap_tensors", _letting_go)
    undo.on_exit(_put_back_if_unused)


def _put_back_if_unused() -> None:
    """Give PyTorch its own hashes back, unless an object that outlives its world needs its number."""
    for address in [address for address, (_, value) in _HASHES.items() if value == address]:
        del _HASHES[address]
    if not _HASHES:
        _REPLACED.undo()


def _numbering(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        machine = machines.current()
        if machine is not None:
            _number(machine, self)
        original(self, *args, **kwargs)

    return init


def _letting_go(original: Callable[..., None]) -> Callable[..., None]:
    """PyTorch swaps no tensor to which there is a weak reference, such as ours."""

    @functools.wraps(original)
    def swap_tensors(*tensors: Any) -> None:
        entries = [(tensor, _HASHES.pop(id(tensor), None)) for tensor in tensors]
        numbers = [(tensor, entry[1]) for tensor, entry in entries if entry is not None]
        del entries
        try:
            original(*tensors)
        finally:
            for tensor, number in numbers:
                _keep(tensor, number)

    return swap_tensors


def _hash_of_module(module: nn.Module) -> int:
    known = _HASHES.get(id(module))
    return known[1] if known is not None and known[0]() is module else object.__hash__(module)


def _hash_of_tensor(tensor: Tensor) -> int:
    known = _HASHES.get(id(tensor))
    if known is not None and known[0]() is tensor:
        return known[1]
    machine = machines.current()
    if machine is None:
        return id(tensor)
    if _is_made_here(machine, tensor):
        return _number(machine, tensor)
    return _keep(tensor, id(tensor))


def _is_made_here(machine: Machine, tensor: Tensor) -> bool:
    """Whether a tensor's storage, or one that it wraps, was born in the world."""
    if type(tensor) not in patches.PLAIN_TENSORS:
        inner = patches.inner_tensors(tensor)
        return bool(inner) and _is_made_here(machine, inner[0])
    if not patches.has_storage(tensor):
        return False
    record = machine.memory.known(tensor.untyped_storage())
    return record is not None and record.is_born


def _number(machine: Machine, value: Any) -> int:
    number, machine.hash_count = machine.hash_count, machine.hash_count + 1
    permutation = machine.shuffle
    if permutation:
        key = f"{permutation} {machine.rank.index} {number}".encode()
        number = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big")
    return _keep(value, number)


def _keep(value: Any, number: int) -> int:
    """An object has one hash for life."""
    address = id(value)
    _HASHES[address] = weakref.ref(value, functools.partial(_forget, address)), number
    return number


def _forget(address: int, _: Any) -> None:
    _HASHES.pop(address, None)
