"""clip_grad_norm_: what it refuses. B42 and B44, in tests/cases, have what it computes."""

import pytest
import torch

import fsdp_core
from fsdp_core import ConfigError


@pytest.mark.parametrize(
    ("max_norm", "norm_type", "message"),
    [
        *(
            (
                float(number),
                2.0,
                (
                    f"max_norm must be a number that is not negative, got {float(number)}; pass inf "
                    f"to clip nothing"
                ),
            )
            for number in ("nan", "-inf", "-1")
        ),
        *(
            (
                1.0,
                float(number),
                (
                    f"norm_type must be positive, or inf, got {float(number)}; pass 2 for the "
                    f"Euclidean norm"
                ),
            )
            for number in ("nan", "-inf", "-2", "0")
        ),
    ],
)
def test_a_norm_that_is_none_is_refused_before_anything_changes(
    max_norm: float, norm_type: float, message: str
) -> None:
    """No gradient is scaled, and no rank waits for another."""
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)

    with pytest.raises(ConfigError) as caught:
        fsdp_core.clip_grad_norm_(parameter, max_norm, norm_type)

    assert str(caught.value) == message
    assert torch.equal(parameter.grad, torch.ones(2))
