"""The frozen policies: their defaults, and what each refuses when it is made."""

from dataclasses import FrozenInstanceError, asdict
from typing import Any

import pytest
import torch

from fsdp_core.errors import ConfigError, ConfigTypeError, UnsupportedError
from fsdp_core.mixed_precision import MixedPrecisionPolicy
from fsdp_core.runtime_policy import RuntimePolicy
from fsdp_core.schedule_policy import SchedulePolicy

Policy = RuntimePolicy | SchedulePolicy | MixedPrecisionPolicy


@pytest.mark.parametrize(
    ("policy", "defaults"),
    [
        (
            RuntimePolicy(),
            {
                "use_symmetric_memory": False,
                "overlap_allgather_reduction": True,
                "overlap_outer_communication": False,
                "caller_managed_grad_sync": False,
            },
        ),
        (
            SchedulePolicy(),
            {
                "forward_prefetch_size": None,
                "backward_prefetch_size": None,
                "register_hooks": True,
                "grad_accumulation_count": None,
                "reshard_after_forward": True,
            },
        ),
        (
            MixedPrecisionPolicy(),
            {
                "main_params_dtype": torch.float32,
                "main_grads_dtype": None,
                "grad_comm_dtype": None,
                "compute_dtype": None,
            },
        ),
    ],
)
def test_defaults_of_a_policy(policy: Policy, defaults: dict[str, Any]) -> None:
    """They are part of the interface."""
    assert asdict(policy) == defaults


def test_a_policy_cannot_be_changed() -> None:
    """A unit and its policy would disagree."""
    with pytest.raises(FrozenInstanceError):
        SchedulePolicy().forward_prefetch_size = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("policy", "kwargs", "error", "message"),
    [
        (
            RuntimePolicy,
            {"use_symmetric_memory": 1},
            ConfigTypeError,
            "RuntimePolicy.use_symmetric_memory must be a bool, got 1; pass True or False",
        ),
        (
            SchedulePolicy,
            {"forward_prefetch_size": -1},
            ConfigError,
            "SchedulePolicy.forward_prefetch_size must not be negative, got -1; pass 0 for none",
        ),
        *(
            (
                SchedulePolicy,
                {name: float(number)},
                ConfigTypeError,
                f"SchedulePolicy.{name} must be None or an int, got {number}; pass None for the default",
            )
            for name in ("forward_prefetch_size", "backward_prefetch_size")
            for number in ("inf", "-inf", "nan")
        ),
        (
            SchedulePolicy,
            {"grad_accumulation_count": True},
            ConfigTypeError,
            "SchedulePolicy.grad_accumulation_count must be None or an int, got True; pass None for the default",
        ),
        (
            SchedulePolicy,
            {"reshard_after_forward": None},
            ConfigTypeError,
            "SchedulePolicy.reshard_after_forward must be a bool, got None; pass True or False",
        ),
        (
            SchedulePolicy,
            {"unshard_all_planes_in_backward": True},
            UnsupportedError,
            (
                "SchedulePolicy.unshard_all_planes_in_backward needs MXFP8 weights, which are not "
                "built, got True; leave it out"
            ),
        ),
        (
            MixedPrecisionPolicy,
            {"compute_dtype": "bf16"},
            ConfigTypeError,
            "MixedPrecisionPolicy.compute_dtype must be None or a dtype, got 'bf16'; pass one such as torch.float32",
        ),
        (
            MixedPrecisionPolicy,
            {"main_params_dtype": torch.int32},
            ConfigError,
            "MixedPrecisionPolicy.main_params_dtype must be a floating dtype, got torch.int32; pass one such as torch.float32",
        ),
    ],
)
def test_a_field_that_makes_no_sense_is_refused(
    policy: type[Policy], kwargs: dict[str, Any], error: type[Exception], message: str
) -> None:
    """When the policy is made, by the field's name."""
    with pytest.raises(error) as caught:
        policy(**kwargs)

    assert str(caught.value) == message
