"""Tensors: the bytes of a storage that a tensor covers."""

from torch import Tensor

from fsdp_sim.op import Access


def access_of(tensor: Tensor, storage: int, *, write: bool) -> Access:
    """Return the access that reads or writes all of ``tensor``."""
    itemsize = tensor.element_size()
    lo = int(tensor.storage_offset()) * itemsize
    numel = tensor.numel()
    if tensor.is_contiguous() or numel == 0:
        return Access(storage, lo, lo + numel * itemsize, write)
    sizes, strides = tuple(tensor.shape), tensor.stride()
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    hi = lo + span * itemsize
    dense = span == numel
    return Access(storage, lo, hi, write, None if dense else (itemsize, sizes, strides))


def overlaps(left: Access, right: Access) -> bool:
    """Whether two accesses may touch a common byte (by their ranges alone)."""
    return left.storage == right.storage and left.lo < right.hi and right.lo < left.hi
