"""Uniform: every option of every decision is equally likely."""

from random import Random

from fsdp_sim.scheduler.decision import Decision


class Uniform:
    """Draws each choice from a generator of its own."""

    def __init__(self, *, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, decision: Decision) -> int:
        """Return any option."""
        return self._random.choice(decision.options)
