"""World: ranks as host programs that pass one baton, and the run loop that decides who has it."""

from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn, Protocol

from fsdp_sim.engine.task import HANDOVER_SECONDS_MAX, POOL, Arrivals, Baton, line_of, this_thread
from fsdp_sim.errors import HandoverTimeout, InjectedCrash, SimulationError, StepLimit, Unwind
from fsdp_sim.scheduler import Decision, Point, Scheduler
from fsdp_sim.scheduler.independence import ALL_KEYS

POLLS_UNTIL_YIELD = 16
"""A rank that polls so often and does nothing else lets the next one go on, in program order too: what it
waits for may be another rank's to do."""

STEP_LIMIT_DEFAULT = 10_000_000
"""Decisions of one run; a program that polls for ever is stopped here."""


class RankState(Enum):
    """Where a rank's host program stands."""

    RUNNABLE = "runnable"
    PARKED = "parked"
    """Waits for something that another rank must do first."""
    ENDED = "ended"


@dataclass(frozen=True)
class Wait:
    """Why a rank is parked.

    Attributes:
        reason: in words, for reports.
        is_host_wait: hardware would stop the host here too; otherwise only the simulator must stop,
            because it needs values that are not there yet.
        needs: what must complete first.
        can_defer: the rank could go on without the values if nobody else can.
        is_for_good: nothing ever wakes the rank.
    """

    reason: str
    is_host_wait: bool
    needs: tuple[Any, ...] = ()
    can_defer: bool = False
    is_for_good: bool = False


class HostState(Protocol):
    """Per-process state of one rank while others run."""

    def save(self) -> None:
        """Take the process's state as the rank's."""

    def restore(self) -> None:
        """Make the rank's state the process's."""

    def start(self, environ: Any, seed: int) -> None:
        """Take what a rank's process starts with."""

    def clear(self) -> None:
        """Let go of the state of a rank that has ended."""


class Rank:
    """The host program of one rank.

    Attributes:
        result: what the program returned.
        error: what it raised; never a finding.
        crash: an injected one that has ended it.
        has_ended: it has come to its end by itself, not because the run was stopped.
        order_of_error: a number that grows with time, to tell which rank raised first.
        thread: the number of the thread that it runs on.
    """

    def __init__(self, index: int, world: "World", host_state: HostState) -> None:
        self.index = index
        self.world = world
        self.host_state = host_state
        self.state = RankState.RUNNABLE
        self.wait: Wait | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.order_of_error: int | None = None
        self.crash: InjectedCrash | None = None
        self.has_ended = False
        self._polls = 0
        self.baton = Baton()
        self.thread = 0

    def poll(self, kind: str, key: str = ALL_KEYS) -> None:
        """A look at whether something has happened; one that is repeated lets others go on."""
        self._polls += 1
        self._decide(kind, key, yields=self._polls > POLLS_UNTIL_YIELD)

    def reach(self, kind: str, key: str = ALL_KEYS) -> None:
        """A point where another rank may be chosen to go on first; ``key`` is that of the store."""
        self._polls = 0
        self._decide(kind, key, yields=False)

    def _decide(self, kind: str, key: str, *, yields: bool) -> None:
        """Let the schedule choose who goes on; by default this rank, unless it yields."""
        world = self.world
        if world.stop_error is not None:
            raise Unwind
        if self.crash is not None:
            raise self.crash
        if world.on_point is not None:
            world.on_point(Point(self.index, kind, key))
        if world.before_switch is not None:
            world.before_switch(self)
        if len(world.runnable) > 1:
            world.switch(self, world.choose_rank(kind, self.index, yields=yields))

    def park(self, wait: Wait) -> None:
        """Let others run until ``wake``."""
        if self.world.stop_error is not None:
            raise Unwind
        self.state, self.wait = RankState.PARKED, wait
        self.world.runnable.remove(self.index)
        self.world.pass_on(self)
        self.wait = None

    def die(self, reason: str) -> NoReturn:
        """End here; a program that catches even this has no rank any more."""
        self.crash = InjectedCrash(reason)
        raise self.crash

    def hang(self, reason: str) -> None:
        """Never go on."""
        while True:
            self.park(Wait(reason, is_host_wait=True, is_for_good=True))

    def step_aside(self, reason: str) -> None:
        """Go on when somebody wakes the rank, which is when nobody else can run."""
        self.park(Wait(reason, is_host_wait=False))

    def wake(self) -> None:
        """What a parked rank waited for has come."""
        if self.state is RankState.PARKED:
            self.state = RankState.RUNNABLE
            runnable = self.world.runnable
            runnable.insert(bisect_left(runnable, self.index), self.index)


class World:
    """Runs ``body(rank)`` for each rank, one at a time, as ``scheduler`` chooses.

    Args:
        world_size: number of ranks.
        body: one rank's whole program; runs on the rank's own thread.
        scheduler: chooses at every decision that has more than one option.
        host_state: makes the holder of a rank's per-process state.
        on_stuck: called when nobody can run; returns why, as an error to end the run with, or None
            when it has woken somebody after all.
        step_limit: decisions allowed.
        handover_seconds: how long one rank may keep the baton.
    """

    def __init__(
        self,
        world_size: int,
        body: Callable[[Rank], Any],
        scheduler: Scheduler,
        *,
        host_state: Callable[[], HostState],
        on_stuck: Callable[["World"], SimulationError | None],
        step_limit: int = STEP_LIMIT_DEFAULT,
        handover_seconds: float = HANDOVER_SECONDS_MAX,
    ) -> None:
        self.body = body
        self.scheduler = scheduler
        self.step = 0
        self.step_limit = step_limit
        self.handover_seconds = handover_seconds
        self.on_stuck = on_stuck
        self.on_point: Callable[[Point], object] | None = None
        self.before_switch: Callable[[Rank], None] | None = None
        self.before_decision: Callable[[], object] | None = None
        self.stop_error: SimulationError | None = None
        self.ranks = [Rank(index, self, host_state()) for index in range(world_size)]
        self.runnable = list(range(world_size))
        self.handovers = 0
        self._holder = self.ranks[0]
        self._blocked: Rank | None = None
        self._home = Arrivals()
        self._home_state = host_state()

    # ------------------------------------------------------------------ decisions

    def choose_rank(self, kind: str, running: int | None, *, yields: bool = False) -> "Rank":
        """Decide which runnable rank goes on; by default the running one, unless it yields."""
        options = self.runnable
        position = bisect_left(options, running + yields) if running is not None else 0
        default = options[position % len(options)]
        if len(options) == 1:
            return self.ranks[default]
        return self.ranks[self._decide(kind, running, tuple(options), default)]

    def choose_yes(self, kind: str, running: int) -> bool:
        """Decide a yes/no question; no is the default."""
        return bool(self._decide(kind, running, (0, 1), 0))

    def _decide(
        self, kind: str, running: int | None, options: tuple[int, ...], default: int
    ) -> int:
        if self.before_decision is not None:
            self.before_decision()
        if self.step >= self.step_limit:
            self.stop(
                StepLimit(
                    f"a run may take step_limit={self.step_limit} decisions and took them all; "
                    "look for a loop that polls, or raise step_limit"
                )
            )
        decision = Decision(self.step, kind, running, options, default)
        self.step += 1
        choice = self.scheduler.choose(decision)
        assert choice in options, (choice, options)
        return choice

    # ------------------------------------------------------------------ handing over

    def switch(self, current: Rank, chosen: Rank) -> None:
        """Hand the baton from the running rank to another and wait to get it back."""
        if chosen is current:
            return
        self._hand(current.host_state, chosen)
        current.baton.take()
        if self.stop_error is not None:
            raise Unwind

    def _hand(self, leaving: HostState | None, chosen: Rank) -> None:
        self.handovers += 1
        self._holder = chosen
        if leaving is not None:
            leaving.save()
        chosen.host_state.restore()
        chosen.baton.give()

    def pass_on(self, current: Rank) -> None:
        """The running rank cannot go on: choose another, or end the run when there is none."""
        if not self.runnable:
            current.state = RankState.PARKED
            error = self.on_stuck(self)
            if error is not None:
                self.stop(error)
        self.switch(current, self.choose_rank("park", current.index))

    def stop(self, error: SimulationError) -> NoReturn:
        """End the run: unwind the running rank now, the others after it."""
        if self.stop_error is None:
            self.stop_error = error
        raise Unwind

    # ------------------------------------------------------------------ the run loop

    def run(self) -> None:
        """Run all ranks to their end, or until the world is stopped."""
        tasks = POOL.borrow(len(self.ranks))
        for rank, task in zip(self.ranks, tasks, strict=True):
            rank.baton = task.baton
            task.start(lambda rank=rank: self._main(rank))  # type: ignore[misc]
        self._home_state.save()
        first = self.ranks[0]
        with suppress(Unwind):
            first = self.choose_rank("start", None)
        self._hand(None, first)
        try:
            interrupt = self._come_home_or_stop()
            self._unwind_rest()
        finally:
            self._home_state.restore()
        POOL.give_back(tasks)
        if interrupt is not None:
            raise interrupt

    def _come_home_or_stop(self) -> BaseException | None:
        """Wait for the ranks; what interrupts the caller unwinds them first, and is returned.

        That is a ``KeyboardInterrupt``, or what the handler of another signal raises, such as a timeout.
        """
        try:
            self._come_home()
        except HandoverTimeout as error:
            self.stop_error, self._blocked = error, self._holder
        except BaseException as interrupt:
            self.stop_error = SimulationError("the caller was interrupted")
            self._come_home()
            return interrupt
        return None

    def _unwind_rest(self) -> None:
        """Unwind the ranks that have not ended; what they let go of may free one that blocks on it."""
        rest = [rank for rank in self.ranks if rank.state is not RankState.ENDED]
        for rank in sorted(rest, key=lambda rank: rank is self._blocked):
            if rank is not self._blocked:
                self._hand(None, rank)
            self._come_home()

    def _come_home(self) -> None:
        handovers = -1
        while not self._home.take(self.handover_seconds):
            if handovers == self.handovers:
                holder = self._holder
                parked = [rank.index for rank in self.ranks if rank.state is RankState.PARKED]
                raise HandoverTimeout(
                    f"a rank must hand over within handover_seconds={self.handover_seconds}, got none "
                    f"from rank {holder.index}, which stands at {line_of(holder.thread)} while ranks "
                    f"{parked} are parked; it blocks outside the simulated world: on a lock that another "
                    "rank holds across a collective, a socket, an endless loop"
                )
            handovers = self.handovers

    def _main(self, rank: Rank) -> None:
        rank.thread = this_thread()
        try:
            if self.stop_error is None:
                rank.result = self.body(rank)
        except Unwind:
            pass
        except BaseException as error:
            if (
                rank is not self._blocked
            ):  # what it meets once it is free is not the program's doing
                rank.error, rank.order_of_error = error, self.handovers
        if rank.crash is not None:
            rank.result, rank.error = None, rank.crash
        rank.state = RankState.ENDED
        rank.has_ended = self.stop_error is None
        if rank.index in self.runnable:
            self.runnable.remove(rank.index)
        self._leave(rank)

    def _leave(self, rank: Rank) -> None:
        rank.host_state.save()
        if self.stop_error is None and not self.runnable and self._unfinished():
            self.stop_error = self.on_stuck(self)
        if self.stop_error is not None or not self._unfinished():
            self._home.give()
            return
        try:
            chosen = self.choose_rank("end", rank.index)
        except Unwind:
            self._home.give()
            return
        self._hand(None, chosen)

    def _unfinished(self) -> bool:
        return any(rank.state is not RankState.ENDED for rank in self.ranks)
