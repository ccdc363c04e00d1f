"""MixedPrecisionPolicy: the four dtypes of a unit, independent of each other."""

from dataclasses import dataclass, fields

import torch

from fsdp_core.errors import ConfigError, ConfigTypeError


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Which dtype each representation of a unit's parameters has.

    Attributes:
        main_params_dtype: what the optimizer updates. None: the parameter's own dtype.
        main_grads_dtype: what gradients are accumulated in and handed to the optimizer in.
            None: the parameter's own dtype.
        grad_comm_dtype: what the gradients of a backward are reduced in. None: the dtype they come
            in. What a window ends with, over axes where gradients are partial until then, reduces
            the accumulated ones, in theirs.
        compute_dtype: what forward and backward see. None: the parameter's own dtype.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None
    compute_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        """Check that each dtype can hold a weight.

        Raises:
            ConfigTypeError: a field is neither None nor a `torch.dtype`.
            ConfigError: a dtype is not a real floating-point one.
        """
        for field in fields(self):
            dtype = getattr(self, field.name)
            if dtype is None:
                continue
            if not isinstance(dtype, torch.dtype):
                msg = (
                    f"MixedPrecisionPolicy.{field.name} must be None or a dtype, got {dtype!r}; pass "
                    f"one such as torch.float32"
                )
                raise ConfigTypeError(msg)
            if not dtype.is_floating_point:
                msg = (
                    f"MixedPrecisionPolicy.{field.name} must be a floating dtype, got {dtype}; pass "
                    f"one such as torch.float32"
                )
                raise ConfigError(msg)
