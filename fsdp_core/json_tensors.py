"""Values that are no tensors, as JSON in tensors of bytes: reading them runs no code."""

import json
from typing import Any

import torch
from torch import Tensor

from fsdp_core.errors import ConfigError, UnsupportedError


def encode(name: str, value: Any) -> Tensor:
    """Write a value as JSON, as a tensor of bytes on the CPU.

    Raises:
        UnsupportedError: JSON cannot say it.
    """
    try:
        text = json.dumps(value, sort_keys=True)
    except (TypeError, ValueError) as error:
        msg = (
            f"{name!r} must be a tensor or what JSON can say, got {value!r}; turn it into one of "
            f"these, or leave it out"
        )
        raise UnsupportedError(msg, fqn=name) from error
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def decode(name: str, tensor: Tensor) -> Any:
    """Return the value that was written.

    Raises:
        ConfigError: the bytes are no JSON.
    """
    try:
        return json.loads(bytes(tensor.tolist()))
    except (TypeError, ValueError, RecursionError) as error:
        msg = f"{name!r} of a checkpoint must be JSON, got {error}; load another one; nothing was loaded"
        raise ConfigError(msg, fqn=name) from error
