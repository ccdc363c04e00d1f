"""Values that are no tensors, as JSON in tensors of bytes: reading them runs no code."""

import json
from typing import Any

import torch
from torch import Tensor

from fsdp_core.errors import UnsupportedError


def encode(name: str, value: Any) -> Tensor:
    """Write a value as JSON, as a tensor of bytes."""
    try:
        text = json.dumps(value, sort_keys=True)
    except (TypeError, ValueError) as error:
        msg = (
            f"{name!r} must be a tensor or what JSON can say, got {value!r}; turn it into one of "
            f"these, or leave it out"
        )
        raise UnsupportedError(msg, fqn=name) from error
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def decode(tensor: Tensor) -> Any:
    """Return the value that was written."""
    return json.loads(bytes(tensor.tolist()).decode())
