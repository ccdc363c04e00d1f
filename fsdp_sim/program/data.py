"""Initial weights and inputs as formulas: the same small integers everywhere, no random state."""

import functools
import math
import zlib

import torch
from torch import Tensor

_WEIGHTS = (1, -1, 2, -2, 1, 0, -1)
_INPUTS = (1, -2, -1, 1, 0)


def initial_weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return small integers [shape] that depend on the parameter's name alone."""
    return _filled(_WEIGHTS, shape, name, torch.device("cpu"))


def input_batch(shape: tuple[int, int], place: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the input [batch, width] for one place: step, pass, forward, rank."""
    return _filled(_INPUTS, shape, f"input {place}", device)


def loss_weights(shape: tuple[int, int], place: tuple[int, ...], device: torch.device) -> Tensor:
    """Return what the loss multiplies the output [batch, width] with, for one place."""
    return _filled(_INPUTS, shape, f"loss {place}", device)


def _filled(
    values: tuple[int, ...], shape: tuple[int, ...], name: str, device: torch.device
) -> Tensor:
    """Return ``values`` [shape] in the pattern of ``name``, copied into memory of the device."""
    pattern = _pattern(values, math.prod(shape), zlib.crc32(name.encode()))
    tensor = torch.empty(shape, dtype=torch.float32, device=device)
    return tensor.copy_(torch.tensor(pattern, dtype=torch.float32).reshape(shape))


@functools.lru_cache(maxsize=4096)
def _pattern(values: tuple[int, ...], numel: int, state: int) -> tuple[int, ...]:
    """Return ``values`` as chosen by a linear congruential sequence that starts at ``state``."""
    chosen = []
    for _ in range(numel):
        state = (state * 1103515245 + 12345) % 2**31
        chosen.append(values[(state >> 16) % len(values)])
    return tuple(chosen)
