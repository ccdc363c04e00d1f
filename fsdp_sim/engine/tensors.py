"""Tensors: those among the arguments of a call, and the bytes of a storage that one covers."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from fsdp_sim.op import Access

_new = tuple.__new__  # of a named tuple: its own constructor takes twice as long, for every operand


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in arguments, which may be lists, tuples and dicts of them, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def access_of(tensor: Tensor, storage: int, *, write: bool) -> Access:
    """Return the access that reads or writes all of ``tensor``."""
    offset = tensor.storage_offset()
    if tensor.is_contiguous():
        lo = offset * tensor.itemsize if offset else 0
        return _new(Access, (storage, lo, lo + tensor.nbytes, write, None))
    itemsize, numel = tensor.itemsize, tensor.numel()
    sizes, strides = tuple(tensor.shape), tensor.stride()
    lo, span = offset * itemsize, 0
    if numel:
        span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    dense = span == numel
    layout = None if dense else (itemsize, sizes, strides)
    return _new(Access, (storage, lo, lo + span * itemsize, write, layout))


def overlaps(left: Access, right: Access) -> bool:
    """Whether two accesses may touch a common byte (by their ranges alone)."""
    return left.storage == right.storage and left.lo < right.hi and right.lo < left.hi
