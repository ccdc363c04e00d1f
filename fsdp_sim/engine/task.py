"""Task: one rank's host program.  The only file that holds a thread."""

import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

HANDOVER_SECONDS_MAX = 300.0
"""How long one rank may keep the baton before the world gives it up, unless the caller says less: a last
resort, never a timeout that a deadlock waits for."""
ASLEEP_SECONDS_MAX = 0.5
"""How long the caller of a world sleeps at a time."""


def this_thread() -> int:
    """Return the number of the thread that runs."""
    return threading.get_ident()


def line_of(thread: int) -> str:
    """Return the line of Python that a thread is at."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001  the only way to another thread's line
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "its end"


class Baton:
    """The right to run, of one party.  Exactly one party of a world holds its own at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def give(self) -> None:
        """Let the party that waits in ``take`` go on."""
        self._lock.release()

    def take(self, seconds_max: float = -1) -> bool:
        """Wait until somebody gives; return False after ``seconds_max`` (never, when negative)."""
        return self._lock.acquire(timeout=seconds_max)


class Arrivals:
    """Ranks that have come home, where their caller waits for them one by one."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()

    def give(self) -> None:
        """Let the caller go on."""
        self._queue.put(None)

    def take(self, seconds_max: float) -> bool:
        """Wait for the next one; return False after ``seconds_max``.

        Why in turns: a signal that another thread took, or that came just before the caller slept, does
        not wake it; Python handles it when the caller next runs.
        """
        left = seconds_max
        while True:
            try:
                self._queue.get(timeout=min(left, ASLEEP_SECONDS_MAX))
            except queue.Empty:
                left -= ASLEEP_SECONDS_MAX
                if left <= 0:
                    return False
            else:
                return True


class Task:
    """A thread that runs one rank's program at a time and is kept between worlds.

    A new thread costs about 50 ms on its first training step (thread-local caches inside PyTorch), so
    idle ones are used again, the one that served the same rank first.
    """

    def __init__(self) -> None:
        self.baton = Baton()
        self._job = Baton()
        self._body: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._loop, daemon=True, name="fsdp_sim rank")
        self._thread.start()

    def start(self, body: Callable[[], None]) -> None:
        """Run ``body`` on the thread once it is given the baton; ``body`` hands it on at its end."""
        self._body = body
        self._job.give()

    def _loop(self) -> None:
        while True:
            self._job.take()
            self.baton.take()
            body, self._body = self._body, None
            assert body is not None
            body()
            del body


class TaskPool:
    """Idle tasks, by the rank that they served."""

    def __init__(self) -> None:
        self._idle: list[Task] = []

    def borrow(self, count: int) -> list[Task]:
        """Return ``count`` tasks; the k-th has served rank k before, where there was one."""
        while len(self._idle) < count:
            self._idle.append(Task())
        tasks, self._idle = self._idle[:count], self._idle[count:]
        return tasks

    def give_back(self, tasks: list[Task]) -> None:
        """Keep tasks whose body has returned."""
        self._idle = tasks + self._idle


POOL = TaskPool()


Thread = threading.Thread
"""The threads that programs start."""


class RankLocal(threading.local):
    """What belongs to a thread.

    Attributes:
        rank: whose thread it is; None on any other.
        started_by: the rank whose program started it; None for a rank's own.
    """

    rank: Any = None
    started_by: Any = None

    @classmethod
    def set_everywhere(cls, rank: object | None) -> None:
        """Let every thread of the process that is no rank's be of ``rank``."""
        cls.rank = rank

    def forget(self) -> None:
        """Let this thread be as every other one that is no rank's."""
        self.__dict__.pop("rank", None)
