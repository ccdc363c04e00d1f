"""Host reads: which operators CUDA's host waits for, and which operators may mix host and device.

On a CPU mesh host and device tensors look alike.  A tensor made from Python data, and what is computed
from such tensors alone, is the host's; it moves to the device when an operator needs it there.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fsdp_sim.engine.memory import Memory

READS_VALUE = frozenset(
    ("_local_scalar_dense", "equal", "is_nonzero", "allclose", "_linalg_check_errors")
)
"""Operators whose result is a value of the host's."""

READS_SIZE = frozenset(
    (
        "nonzero",
        "masked_select",
        "_unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "unique_dim_consecutive",
        "bincount",
        "_ctc_loss.Tensor",
        "repeat_interleave.Tensor",
    )
)
"""Operators whose result's size the host must know before it can allocate the result."""

INDEXES = frozenset(("index.Tensor", "index_put_", "index_put", "_index_put_impl_"))
"""Operators that turn masks among their indices into positions, whose number the host must know."""

MIXES = INDEXES | {"copy_", "_foreach_copy_", "_pack_padded_sequence", "_ctc_loss.Tensor"}
"""Operators whose arguments may be partly the host's on CUDA too; elsewhere only single numbers may."""


def masks_of(name: str, args: Any, memory: Memory) -> list[Tensor]:
    """Return the device masks that the host must count before the operator can run.

    A single number of the host's is put where a mask says without counting.
    """
    masks = [
        index
        for index in args[1]
        if index is not None and index.dtype in (torch.bool, torch.uint8) and index.dim()
    ]
    masks = [mask for mask in masks if not memory.record_of(mask).is_host]
    if masks and name != "index.Tensor":
        value, accumulates = args[2], len(args) > 3 and args[3]
        if value.numel() == 1 and memory.record_of(value).is_host and not accumulates:
            return []
    return masks


def waits_for_sizes(name: str, args: Any, kwargs: Any) -> bool:
    """Whether the host waits for the sizes of this call; a given output size makes it unnecessary."""
    return name != "repeat_interleave.Tensor" or (
        len(args) < 2 and kwargs.get("output_size") is None
    )


def is_copy_to_host(args: Any, kwargs: Any, memory: Memory) -> bool:
    """Whether a ``copy_`` stops the host: from the device to a tensor of the host's."""
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    if non_blocking:
        return False
    return memory.record_of(args[0]).is_host and not memory.record_of(args[1]).is_host


def take_to_device(memory: Memory, operands: Iterable[tuple[Tensor, bool]]) -> bool:
    """Move the host's tensors that an operator needs on the device; return whether there were any.

    Args:
        memory: of the rank.
        operands: the tensors, and whether each is written.
    """
    moved = False
    for tensor, write in operands:
        record = memory.record_of(tensor)
        if record.is_host and (write or tensor.dim()):
            memory.to_device(tensor)
            moved = True
    return moved
