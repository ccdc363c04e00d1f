"""Phase: what a unit is doing (RESTING, FORWARD, BACKWARD), and which changes are legal."""

from enum import Enum

from fsdp_core.errors import StateError


class Phase(Enum):
    """What a unit is doing.

    RESTING -> FORWARD   pre-forward
    FORWARD -> RESTING   post-forward, or the forward raised
    RESTING -> BACKWARD  pre-backward
    BACKWARD -> RESTING  all expected gradients have come, or the context was reset
    """

    RESTING = "resting"
    FORWARD = "forward"
    BACKWARD = "backward"


def check_phase_change(fqn: str, old: Phase, new: Phase) -> None:
    """Refuse a change of phase that is not in the table of `Phase`.

    Raises:
        StateError: neither of the two phases is RESTING, or both are.
    """
    if (old is Phase.RESTING) == (new is Phase.RESTING):
        msg = (
            f"a unit goes from RESTING to FORWARD or BACKWARD and back, got {old.name} to "
            f"{new.name} for {fqn or '<root>'!r}; call it again after its own pass has ended, "
            f"or context.reset() after an error"
        )
        raise StateError(msg, fqn=fqn)
