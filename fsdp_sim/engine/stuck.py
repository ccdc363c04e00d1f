"""Stuck: nobody can run - is it the program, or only the simulator's need for values?"""

from collections.abc import Sequence

from fsdp_sim.checkers import deadlock
from fsdp_sim.checkers.device_graph import Launch, Operation
from fsdp_sim.engine.machine import Machine
from fsdp_sim.engine.meeting import Pending
from fsdp_sim.engine.world import Rank, RankState
from fsdp_sim.errors import CannotRunAhead, Finding, OpSite, SimulationError
from fsdp_sim.op import Op


def stands(machines: Sequence[Machine]) -> tuple[deadlock.Stand, ...]:
    """Return where the ranks' hosts stand."""
    return tuple(_stand(machine.rank) for machine in machines)


def ends(machines: Sequence[Machine]) -> tuple[deadlock.Stand, ...]:
    """Return who has come to its end by itself, when the run is over."""
    return tuple(_end(machine.rank) for machine in machines)


def find_deadlock(machines: Sequence[Machine]) -> Finding | None:
    """Return the deadlock that the ranks are in, on hardware as here."""
    return deadlock.judge(_operations(machines), stands(machines), _site(machines))


def find_unfinished(machines: Sequence[Machine]) -> Finding | None:
    """Return the operations that never complete although every program has ended by itself."""
    return deadlock.unfinished(_operations(machines), stands(machines), _site(machines))


def go_on(machines: Sequence[Machine]) -> bool:
    """Let a rank go on whose next operator can be run later; return whether there is one."""
    for machine in machines:
        wait = machine.rank.wait
        if machine.rank.state is RankState.PARKED and wait is not None and wait.can_defer:
            machine.is_deferring = True
            machine.rank.wake()
            return True
    return False


def cannot_run_ahead(machines: Sequence[Machine]) -> SimulationError:
    """Return the error of a run that hardware would finish and the simulator cannot."""
    lines = "\n".join(f"  rank {stand.rank} {stand.describe}" for stand in stands(machines))
    return CannotRunAhead(
        "only the simulator's need for values stops the program; hardware would go on, so the run "
        f"is neither clean nor a finding:\n{lines}"
    )


def _operations(machines: Sequence[Machine]) -> Sequence[Operation]:
    return machines[0].wire.graph.operations()


def _site(machines: Sequence[Machine]) -> deadlock.Site:
    def site(op: Op) -> OpSite:
        stream = machines[op.rank].streams[op.stream]
        name = f"stream {op.stream} ({stream.role})"
        return OpSite(op.rank, op.index, op.name, name, op.source, op.annotation)

    return site


def _end(rank: Rank) -> deadlock.Stand:
    if rank.has_ended:
        return _stand(rank)
    return deadlock.Stand(
        rank.index, is_ended=False, is_host_wait=False, waits_for=(), describe="was stopped"
    )


def _stand(rank: Rank) -> deadlock.Stand:
    wait = rank.wait
    if rank.state is RankState.ENDED or wait is None or wait.is_for_good:
        how = f"ended with {rank.error!r}" if rank.error is not None else "has ended"
        how = how if wait is None else wait.reason
        return deadlock.Stand(
            rank.index, is_ended=True, is_host_wait=False, waits_for=(), describe=how
        )
    awaited: list[deadlock.Awaited] = []
    for need in wait.needs:
        if isinstance(need, (deadlock.StoreKey, deadlock.Arrival)):
            awaited.append(need)
        elif isinstance(need, Launch):
            awaited += [each for each in need.operations if not each.is_done]
    return deadlock.Stand(
        rank.index,
        is_ended=False,
        is_host_wait=wait.is_host_wait,
        waits_for=tuple(awaited),
        describe=f"waits ({wait.reason}) for " + "; ".join(map(_describe, wait.needs)),
    )


def _describe(need: object) -> str:
    if isinstance(need, Launch):
        return "; ".join(
            each.describe() + (f" issued at {op.source}" if op is not None and op.source else "")
            for each, op in zip(need.operations, need.ops, strict=True)
        )
    assert isinstance(need, (Pending, deadlock.StoreKey, deadlock.Arrival))
    return need.describe()
