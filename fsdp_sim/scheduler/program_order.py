"""Program order: every default, so one rank runs until it must stop."""

from fsdp_sim.scheduler.decision import Decision


class ProgramOrder:
    """Takes the default of every decision."""

    def choose(self, decision: Decision) -> int:
        """Return the default."""
        return decision.default
