"""Audit: does an operator do to bytes what the simulator believes it does?

Some schemas lie.  Under the audit each operator's arguments are compared before and after it, byte by
byte: what is written must be known to be written, what shares memory must be known to share it.  What
has been found so far is in the tables of ``dispatch.py``.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from fsdp_sim.engine import dispatch, patches
from fsdp_sim.engine.dispatch import Operator, RankMode
from fsdp_sim.engine.machine import Machine

SKIPPED_NAMESPACES = (
    "c10d",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "_dtensor",
    "profiler",
)
"""Operators whose bytes move when others' do; the simulator itself is what moves them."""


class Lie(NamedTuple):
    """What an operator does and the simulator does not know of."""

    operator: str
    deed: str

    def __str__(self) -> str:
        """Return it as a sentence."""
        return f"{self.operator} {self.deed}"


class AuditMode(RankMode):
    """A rank's dispatch mode that looks at the bytes of each operator's arguments.

    Args:
        machine: of the rank.
        lies: where to put what is found, each once.
    """

    def __init__(self, machine: Machine, lies: dict[Lie, None]) -> None:
        super().__init__(machine)
        self._lies = lies

    @patches.never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer one call and compare."""
        kwargs = kwargs or {}
        is_plain = not patches.is_higher_order(func) and not patches.is_python_subclass(types)
        if not is_plain or func.namespace in SKIPPED_NAMESPACES:
            return super().__torch_dispatch__(func, types, args, kwargs)
        operator = dispatch.operator_of(func)
        watched = self._watched(operator, args, kwargs)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        with patches.below_dispatch():
            for deed in _deeds(func, watched, out):
                self._lies[Lie(operator.name, deed)] = None
        return out

    def _watched(self, operator: Operator, args: Any, kwargs: Any) -> "list[_Watched]":
        """Return the arguments whose bytes no collective is about to change."""
        memory = self.machine.memory
        named = zip(operator.writes.items(), args, strict=False)
        arguments = [(name, value, write) for (name, write), value in named]
        arguments += [(name, v, operator.writes[name]) for name, v in kwargs.items()]
        with patches.below_dispatch():
            return [
                _Watched(name, storage, bool(write), patches.bytes_of_storage(storage).clone())
                for name, value, write in arguments
                for tensor in _tensors(value)
                for storage in (tensor.untyped_storage(),)
                if not memory.is_pending(tensor)
            ]


class _Watched(NamedTuple):
    name: str
    storage: UntypedStorage
    write: bool
    before: Tensor


def _deeds(func: Any, watched: list[_Watched], out: Any) -> Iterator[str]:
    """Yield what was done and is not known."""
    written = {patches.storage_key(each.storage) for each in watched if each.write}
    for each in watched:
        is_same = torch.equal(patches.bytes_of_storage(each.storage), each.before)
        if not is_same and patches.storage_key(each.storage) not in written:
            yield f"writes its argument {each.name!r}"
    shared = {patches.storage_key(each.storage) for each in watched}
    results = [patches.storage_key(tensor.untyped_storage()) in shared for tensor in _tensors(out)]
    schema, moves_nothing = patches.schema_of(func), dispatch.moves_nothing(func)
    is_known = moves_nothing or schema.returns_alias or schema.name in dispatch.HIDDEN_ALIASES
    if any(results) and not is_known:
        yield "returns memory of an argument"
    if moves_nothing and shared and not all(results):
        yield "returns new memory"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if patches.has_storage(value) and value.numel():
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
