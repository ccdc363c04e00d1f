"""Programs that are wrong on purpose: each gets the error that is attached to it."""

import pytest
from hypothesis import given, settings

from fsdp_sim.program.parity import verify
from fsdp_sim.strategies import INVALID_KINDS, InvalidProgram, invalid_programs


@pytest.mark.parametrize("kind", INVALID_KINDS)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_a_wrong_program_gets_the_error_attached_to_it(kind: str) -> None:
    """By class and by what the message must contain."""

    @settings(max_examples=6)
    @given(invalid_programs(kinds=(kind,)))
    def is_refused(wrong: InvalidProgram) -> None:
        with pytest.raises(Exception) as caught:  # noqa: PT011 - the class is compared below
            verify(wrong.program)

        assert wrong.error in [one.__name__ for one in type(caught.value).__mro__]
        assert wrong.match in str(caught.value)

    is_refused()
