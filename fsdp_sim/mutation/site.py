"""Sites: the calls of a package that order work, hold memory or give it back, and how each is broken."""

from enum import StrEnum
from typing import NamedTuple


class Verb(StrEnum):
    """What a site calls.  Breaking one leaves Python working."""

    WAIT_STREAM = "wait_stream"
    WAIT_EVENT = "wait_event"
    RECORD_EVENT = "record_event"
    STREAM = "stream context"
    WORK_WAIT = "Work.wait"
    SYNCHRONIZE = "synchronize"
    RELEASE = "release"
    KEEP_ALIVE = "keep_alive"


BREAKS = {
    Verb.WAIT_STREAM: "the wait does nothing",
    Verb.WAIT_EVENT: "the wait does nothing",
    Verb.RECORD_EVENT: "the event is not recorded",
    Verb.STREAM: "the body runs on the current stream",
    Verb.WORK_WAIT: "the wait does nothing",
    Verb.SYNCHRONIZE: "the host does not wait",
    Verb.RELEASE: "the memory is not given back",
    Verb.KEEP_ALIVE: "the reference is let go at once",
}
"""What each break does."""

EDGES = frozenset(
    {Verb.WAIT_STREAM, Verb.WAIT_EVENT, Verb.RECORD_EVENT, Verb.WORK_WAIT, Verb.SYNCHRONIZE}
)
"""Verbs that add order; the others move work or memory."""


class Site(NamedTuple):
    """A call of a verb in the package's own source.

    Attributes:
        file: as the package's parent folder sees it, such as ``fsdp_core/context.py``.
    """

    file: str
    line: int
    verb: Verb

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.verb}"
