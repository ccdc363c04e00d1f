"""Settings for tests that run worlds, as the profile "fsdp_sim"; Hypothesis loads this by itself."""

PROFILE = "fsdp_sim"


def register() -> None:
    """Register the profile: a run takes as long as its program does, so nothing has a deadline."""
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        PROFILE, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
    )
