"""Simulation: one world with its machines, patches and checkers, from start to report."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_sim import probes
from fsdp_sim.analysis import Analysis
from fsdp_sim.checkers import Checker, Words, of_collectives
from fsdp_sim.checkers.memory_peak import MemoryPeak
from fsdp_sim.cuda_script import names as cuda_script
from fsdp_sim.cuda_script.gpu import give_gpu
from fsdp_sim.cuda_script.mode import AuditedCudaMode, CudaMode
from fsdp_sim.engine import groups, leaks, patches, process_group, shims, stuck
from fsdp_sim.engine.audit import AuditMode, Lie
from fsdp_sim.engine.dispatch import RankMode
from fsdp_sim.engine.faults import Faults
from fsdp_sim.engine.isolation import HostState, fresh_thread
from fsdp_sim.engine.machine import LOCAL, Machine, caller
from fsdp_sim.engine.meeting import Wire
from fsdp_sim.engine.store import WorldStore
from fsdp_sim.engine.streams import new_stream
from fsdp_sim.engine.task import HANDOVER_SECONDS_MAX
from fsdp_sim.engine.world import STEP_LIMIT_DEFAULT, Rank, World
from fsdp_sim.errors import (
    FINDING_KINDS,
    ConfigError,
    Finding,
    ProgramExit,
    SimulationError,
)
from fsdp_sim.knobs import Knobs
from fsdp_sim.scheduler import Recorder, Scheduler
from fsdp_sim.trace import Trace

_RUNNING: list["Simulation"] = []


@dataclass
class Report:
    """What a run gave.

    Attributes:
        results: what ``fn(rank, *args)`` returned, by rank.
        findings: errors found, in order.
        notices: what is legal but worth knowing.
        schedule: the effective schedule, as ``replay`` takes it.
        deviations: the first of its deviations from program order, each in words.
        trace: ops (if kept) and digests.
        decisions: how many decisions the run took.
        errors: what ranks raised.
        faults: how often each fault that was asked for came up.
        probes: by name, whether it has held (``fsdp_sim.sometimes``).
    """

    results: list[Any]
    schedule: str
    trace: Trace
    findings: tuple[Finding, ...] = ()
    notices: tuple[Finding, ...] = ()
    deviations: tuple[str, ...] = ()
    decisions: int = 0
    errors: dict[int, BaseException] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    probes: dict[str, bool] = field(default_factory=dict)


@dataclass
class Settings:
    """How a run is to be made."""

    world_size: int
    scheduler: Scheduler
    knobs: tuple[str, ...] = ()
    checkers: Sequence[Any] = ()
    step_limit: int = STEP_LIMIT_DEFAULT
    handover_seconds: float = HANDOVER_SECONDS_MAX
    trace: bool = False
    poison: bool = False
    finds_leaks: bool = True
    audit: bool = False


class Simulation:
    """One run of a program on simulated ranks."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], settings: Settings) -> None:
        self.fn = fn
        self.args = args
        self.settings = settings
        self.recorder = Recorder(settings.scheduler, caller)
        self.knobs = Knobs.parse(settings.knobs)
        if self.knobs.values and settings.audit:
            raise ConfigError("audit=True must not be joined with the knob 'values', got both")
        self.trace = Trace(settings.world_size, keep_ops=settings.trace)
        self.gpu_memory = MemoryPeak(Words())
        self.analysis = Analysis(
            self._checkers(),
            settings.world_size,
            now=lambda: self.world.step,
            keep=self.trace.extend,
        )
        self.wire = Wire(WorldStore(), is_late=self.knobs.late)
        self.machines: list[Machine] = []
        self.lies: dict[Lie, None] = {}
        self.probes: dict[str, bool] = {}
        self.environs: list[Any] = []
        self.contexts: dict[int, Context] = {}
        self.world = World(
            settings.world_size,
            self._body,
            self.recorder,
            host_state=HostState,
            on_stuck=self._on_stuck,
            step_limit=settings.step_limit,
            handover_seconds=settings.handover_seconds,
        )
        self.world.on_point = getattr(settings.scheduler, "reached", None)
        self.world.before_decision = self.analysis.settle
        rules = self.knobs.faults
        count = settings.world_size
        self.faults = Faults(rules, count, self.world.choose_yes) if rules else None
        if self.knobs.collect:
            self.world.before_switch = self._decide_collection

    def _checkers(self) -> Sequence[Checker]:
        """Return the checkers that apply, and the memory that a CUDA script asks about."""
        checkers = self.settings.checkers
        if self.knobs.values:
            return of_collectives(checkers)
        return (*checkers, self.gpu_memory) if self.knobs.cuda else checkers

    @staticmethod
    def is_running() -> bool:
        """Whether a world runs in this process."""
        return bool(_RUNNING)

    @staticmethod
    def is_real_group_initialised() -> bool:
        """Whether this process belongs to a real process group."""
        return torch.distributed.is_initialized()

    def run(self) -> Report:
        """Run the program to its end or to what stops it, and say what was found."""
        patches.register_backend(process_group.made_group)
        with ExitStack() as stack:
            undo = stack.enter_context(patches.process_wide())
            shims.install(undo, sees_operators=not self.knobs.values)
            if self.knobs.cuda:
                cuda_script.install(undo, self.settings.world_size)
            groups.install_stores(undo, self.wire.store.contents)
            _RUNNING.append(self)
            stack.callback(_RUNNING.clear)
            self.probes = stack.enter_context(probes.listening())
            if self.faults is not None:
                stack.enter_context(self.faults.armed())
            self._prepare_ranks()
            self.world.run()
            self._let_go()
        self._judge_end()
        return self._report()

    def _let_go(self) -> None:
        """Collect the world's garbage; what is still there, the program's results should hold."""
        for rank in self.world.ranks:
            rank.host_state.clear()
        patches.restore_c_environ(self.environs)
        patches.collect_all_garbage()
        has_failed = self.world.stop_error or any(rank.error for rank in self.world.ranks)
        if self.settings.finds_leaks and not has_failed and not self.knobs.values:
            results = [rank.result for rank in self.world.ranks]
            for finding in leaks.find(self.machines, (results, self.args, self.fn)):
                self.analysis.add(finding)
        for machine in self.machines:
            machine.memory.bring_back()

    # ------------------------------------------------------------------ one rank

    def _prepare_ranks(self) -> None:
        for rank in self.world.ranks:
            machine = Machine(
                rank,
                self.analysis,
                self.wire,
                poison=self.settings.poison,
                sees_operators=not self.knobs.values,
            )
            machine.shuffle, machine.faults = self.knobs.shuffle, self.faults
            if self.knobs.cuda:
                give_gpu(machine, self.gpu_memory)
            self.machines.append(machine)
            self._prepare_host_state(rank)

    def _prepare_host_state(self, rank: Rank) -> None:
        """Give the rank's host the state that its process would start with."""
        environ = patches.environ_with(
            {
                "RANK": str(rank.index),
                "LOCAL_RANK": str(rank.index),
                "WORLD_SIZE": str(self.settings.world_size),
                "LOCAL_WORLD_SIZE": str(self.settings.world_size),
                "GROUP_RANK": "0",
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": "0",
            }
        )
        self.environs.append(environ)
        self.contexts[rank.index] = copy_context()
        rank.host_state.start(environ, seed=rank.index)

    def _body(self, rank: Rank) -> Any:
        """Run one rank with context variables of its own."""
        return self.contexts.pop(rank.index).run(self._run_program, rank)

    def _run_program(self, rank: Rank) -> Any:
        machine = self.machines[rank.index]
        LOCAL.rank = machine
        machine.default_stream = new_stream("default")
        machine.select(machine.default_stream)
        machine.stream_id(machine.default_stream)  # it is number 0 wherever the program begins
        try:
            with (
                torch.autograd.set_multithreading_enabled(False),
                self._mode(machine),
                fresh_thread(),
            ):
                groups.start(machine)
                try:
                    return self._result(rank)
                finally:
                    machine.close()
        finally:
            machine.close()
            LOCAL.rank = None
            patches.drop_groups()

    def _result(self, rank: Rank) -> Any:
        """Return what the program returns; one that exits with status 0 has ended well, as a process.

        Raises:
            ProgramExit: it exits with another status.
            TypeError: it has made something that would run the program, and run nothing.
        """
        try:
            result = self.fn(rank.index, *self.args)
        except SystemExit as end:
            if end.code:
                raise ProgramExit(f"the program ended rank {rank.index} with {end.code!r}") from end
            return None
        if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
            raise TypeError(
                f"fn must run the rank's program, got a {type(result).__name__} that has not run; pass "
                "a function that runs it, such as lambda rank: asyncio.run(main(rank))"
            )
        return result

    def _mode(self, machine: Machine) -> AbstractContextManager[Any]:
        if not machine.sees_operators:
            return nullcontext()
        has_gpu = machine.gpu is not None
        if self.settings.audit:
            return (AuditedCudaMode if has_gpu else AuditMode)(machine, self.lies)
        return (CudaMode if has_gpu else RankMode)(machine)

    # ------------------------------------------------------------------ nobody can run

    def _decide_collection(self, rank: Rank) -> None:
        """The collector may run at any time: here, if the schedule says so."""
        if self.world.choose_yes("collect", rank.index):
            patches.collect_garbage()

    def _on_stuck(self, world: World) -> SimulationError | None:  # noqa: ARG002  as World calls it
        if self.faults is not None and self.faults.wake_delayed():
            return None
        finding = stuck.find_deadlock(self.machines)
        if finding is None and stuck.go_on(self.machines):
            return None
        self.trace.stands = stuck.stands(self.machines)
        if finding is None:
            return stuck.cannot_run_ahead(self.machines)
        self.analysis.add(finding)
        return FINDING_KINDS["Deadlock"](finding.describe(), finding=finding)

    def _judge_end(self) -> None:
        """Judge what is left at the end of a program; one that was stopped has had no chance to tidy up.

        What was issued and never completes is a deadlock too, although nobody waits for it.
        """
        has_ended_well = all(rank.error is None for rank in self.world.ranks)
        if self.world.stop_error is None and has_ended_well:
            finding = stuck.find_unfinished(self.machines)
            for each in [finding] if finding is not None else self.wire.group_calls.unmade():
                self.analysis.add(each)
            self.analysis.end()

    # ------------------------------------------------------------------ the report

    def _report(self) -> Report:
        world = self.world
        schedule = self.recorder.schedule(self.settings.world_size, self.settings.knobs)
        fired = {} if self.faults is None else self.faults.fired
        faults = {str(rule): count for rule, count in fired.items()}
        report = Report(
            results=[rank.result for rank in world.ranks],
            schedule=str(schedule),
            trace=self.trace,
            findings=tuple(f for f in self.analysis.findings if not f.is_notice),
            notices=tuple(f for f in self.analysis.findings if f.is_notice),
            deviations=tuple(self.recorder.described),
            decisions=world.step,
            errors={rank.index: rank.error for rank in world.ranks if rank.error is not None},
            faults=faults,
            probes={**self.probes, **{f"fault {rule}": n > 0 for rule, n in faults.items()}},
        )
        self.trace.schedule = schedule
        self.trace.stands = self.trace.stands or stuck.ends(self.machines)
        return report
