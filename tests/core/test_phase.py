"""Phases: which changes are legal."""

from itertools import product

import pytest

from fsdp_core.errors import StateError
from fsdp_core.phase import Phase, check_phase_change


@pytest.mark.parametrize(("old", "new"), list(product(Phase, Phase)))
def test_a_unit_goes_through_rest_between_passes(old: Phase, new: Phase) -> None:
    """From RESTING to a pass and back; never from one pass to another, never to itself."""
    legal = (old is Phase.RESTING) != (new is Phase.RESTING)

    if legal:
        check_phase_change("layers.0", old, new)
    else:
        with pytest.raises(StateError) as caught:
            check_phase_change("layers.0", old, new)
        assert caught.value.fqn == "layers.0"
        assert str(caught.value) == (
            f"a unit goes from RESTING to FORWARD or BACKWARD and back, got {old.name} to "
            f"{new.name} for 'layers.0'; call it again after its own pass has ended, or "
            f"context.reset() after an error"
        )


def test_a_root_is_named_in_the_message() -> None:
    """Its own name is empty."""
    with pytest.raises(StateError, match=r"for '<root>'"):
        check_phase_change("", Phase.FORWARD, Phase.BACKWARD)
