"""Probes: what a program says should happen in some run of a search, and whether it ever did."""

from collections.abc import Iterator
from contextlib import contextmanager

from fsdp_sim.errors import ConfigError

_HEARD: dict[str, bool] | None = None


def sometimes(name: str, condition: bool) -> None:  # noqa: FBT001  reads as a sentence: sometimes("full", n == k)
    """Say that ``condition`` should hold here in some run of a search.

    A search that never sees it hold reports the probe: the tests have not exercised what it stands for.
    It is no op, and outside a simulated world it costs one test of a global, so a runtime may keep it.

    Args:
        name: of the probe; calls with one name are one probe.
        condition: a bool.  A tensor would have to be read, which changes the order that is looked at.

    Raises:
        ConfigError: ``condition`` is not a bool.
    """
    if _HEARD is None:
        return
    if not isinstance(condition, bool):
        raise ConfigError(
            f"sometimes({name!r}): condition must be a bool, got {type(condition).__name__}"
        )
    _HEARD[name] = _HEARD.get(name, False) or condition


@contextmanager
def listening() -> Iterator[dict[str, bool]]:
    """Give the probes that are met in the body: by name, whether each has held."""
    global _HEARD
    heard: dict[str, bool] = {}
    _HEARD = heard
    try:
        yield heard
    finally:
        _HEARD = None
