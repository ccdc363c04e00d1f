"""Machine: the simulated device of one rank - its streams, clocks, memory and the ops it did."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from fsdp_sim.analysis import Analysis
from fsdp_sim.clock import Clocks
from fsdp_sim.engine import patches
from fsdp_sim.engine.backward import Backward
from fsdp_sim.engine.memory import Memory, StorageRecord
from fsdp_sim.engine.task import RankLocal
from fsdp_sim.engine.world import Rank, Wait
from fsdp_sim.errors import FINDING_KINDS, Finding, OpSite
from fsdp_sim.op import UNKNOWN, Access, Call, Kind, Op, Source

if TYPE_CHECKING:
    from fsdp_sim.checkers.device_graph import Launch
    from fsdp_sim.cuda_script.gpu import Gpu
    from fsdp_sim.engine.faults import Faults
    from fsdp_sim.engine.meeting import Pending, Wire
    from fsdp_sim.engine.process_group import Communicator
    from fsdp_sim.engine.streams import Stream
    from fsdp_sim.engine.work import Work, WorkFuture

ANNOTATION_PREFIXES = ("fsdp_core::", "FSDP::")
"""Ranges whose name starts so label ops and take part in matching; users extend the list."""

FATAL_KINDS = frozenset(("CollectiveMismatch", "Deadlock"))
"""Findings after which the program cannot be run any further."""

LOCAL = RankLocal()


def current() -> "Machine | None":
    """Return the machine of the rank that runs on this thread, or None outside a world."""
    return LOCAL.rank


@contextmanager
def unobserved() -> Iterator[None]:
    """Run what is no part of the rank's program: nothing in it becomes an op."""
    machine, LOCAL.rank = LOCAL.rank, None
    try:
        with patches.below_dispatch():
            yield
    finally:
        LOCAL.rank = machine


class Machine:
    """What one rank's program does to its device becomes ops here.

    Attributes:
        rank: the host program.
        sees_operators: ATen operators become ops; else only what collectives and streams do.
        memory: its storages.
        backward: its backward passes; ``in_backward`` while one runs that uses several streams.
        streams: those in use, by id.
        faults: what is to go wrong, if anything.
        hash_count: objects numbered so far; ``shuffle``: which permutation of the numbers to use.
        signal_handlers: what its program has set.
        meshes: the names of the groups of the first device mesh of each kind.
        makes_device_tensor: a tensor is being made from Python data, on a device.
        gpu: what a CUDA script sees; None where the device has the CPU's name.
        wire: what it shares with the machines of the other ranks.
        communicators: its view of each process group that it has used, by group.
        incarnations: how many groups it has made, by name.
        has_adopted_group: its program has called init_process_group.
        works: handles of asynchronous operations that nobody has waited for, in order of issue.
        must_defer: the operator that is being issued goes on without the values that it needs.
        ranges: open record_function ranges, outermost first, each with the label outside it.
        annotation: the innermost open range of a runtime, which labels what is issued inside it.
    """

    def __init__(
        self,
        rank: Rank,
        analysis: Analysis,
        wire: "Wire",
        *,
        poison: bool = False,
        sees_operators: bool = True,
    ) -> None:
        self.rank = rank
        self.analysis = analysis
        self.wire = wire
        self.poison = poison
        self.sees_operators = sees_operators
        self.memory = Memory(self)
        self.ranges: list[tuple[str, str | None]] = []
        self.annotation: str | None = None
        self.is_open = True
        self.functional_depth = 0
        self.communicators: dict[Any, Communicator] = {}
        self.incarnations: dict[str, int] = {}
        self.has_adopted_group = False
        self.init_count = 0
        self.works: dict[Work, None] = {}
        self.last_work: Work | None = None
        self.reduction: tuple[str, Any] | None = None
        self.cpp_futures: list[WorkFuture] = []
        self.joins_futures_at_once = False
        self.must_defer = False
        self.is_deferring = False
        self.backward = Backward(self)
        self.in_backward = False
        self.makes_device_tensor = False
        self.gpu: Gpu | None = None
        self.faults: Faults | None = None
        self.hash_count = 0
        self.shuffle = 0
        self.signal_handlers: dict[int, Any] = {}
        self.meshes: dict[Any, tuple[str, ...]] = {}
        self.streams: dict[int, Stream] = {}
        self._event_count = 0
        self._op_count = 0
        self.default_stream: Stream
        self._stream: Stream

    # ------------------------------------------------------------------ the current stream

    @property
    def stream(self) -> "Stream":
        """The current stream; inside a backward pass that of the node that runs."""
        if self.in_backward:
            self.backward.follow()
        return self._stream

    def select(self, stream: "Stream") -> None:
        """Make ``stream`` current."""
        self._stream = stream
        self.backward.note(stream)

    @property
    def clocks(self) -> Clocks:
        """Happens-before of this rank, up to its last op."""
        return self.analysis.clocks(self.rank.index)

    # ------------------------------------------------------------------ ids

    @property
    def op_count(self) -> int:
        """How many ops the rank has done, so the index of the next."""
        return self._op_count

    def current_stream_id(self) -> int:
        """Return the id of the current stream, in order of first use."""
        if self.in_backward:
            self.backward.follow()
        ordinal = self._stream.ordinal
        return ordinal if ordinal >= 0 else self.stream_id(self._stream)

    def stream_id(self, stream: "Stream") -> int:
        """Return a stream's id; the first use of a stream is an op of its own."""
        if self.in_backward:
            self.backward.follow()
        if stream.ordinal < 0:
            stream.ordinal = len(self.streams)
            self.streams[stream.ordinal] = stream
            self.emit(Kind.STREAM, stream.role, stream.ordinal, source=stream.source)
        return stream.ordinal

    def new_event_id(self) -> int:
        """Return the next event id."""
        self._event_count += 1
        return self._event_count - 1

    # ------------------------------------------------------------------ ops

    def emit(
        self,
        kind: Kind,
        name: str,
        stream: int,
        accesses: tuple[Access, ...] = (),
        *,
        other: int = -1,
        nbytes: int = 0,
        call: Call | None = None,
        source: Source | None = UNKNOWN,
    ) -> Op | None:
        """Do one op: the trace keeps it, the clocks advance and the checkers see it.

        ``source`` is looked up when it is not given; to give None saves the time.
        """
        if not self.is_open:
            return None
        op = Op(
            self.rank.index,
            self._op_count,
            kind,
            name,
            stream,
            accesses,
            other,
            nbytes,
            self.annotation,
            caller() if source is UNKNOWN else source,
            call,
        )
        self._op_count += 1
        for finding in self.analysis.take(op):
            if finding.kind in FATAL_KINDS:
                self.fail(finding)
        return op

    def fail(self, finding: Finding) -> None:
        """End the run with a finding: the program cannot go on from here."""
        self.rank.world.stop(FINDING_KINDS[finding.kind](finding.describe(), finding=finding))

    def check_is_there(self, name: str, record: StorageRecord, access: Access) -> None:
        """End the run where an access touches memory that was given back: hardware would crash."""
        if record.release is None or access.lo == access.hi:
            return
        source, label, _ = record.release
        stream = self.current_stream_id()
        where = f"stream {stream} ({self.streams[stream].role})"
        rank = self.rank.index
        site = OpSite(rank, self._op_count, name, where, caller(), self.annotation)
        verb = "writes" if access.write else "reads"
        message = (
            f"rank {rank}: {name!r} on {where} {verb} a tensor whose memory was given back"
            f" at {source}" + (f" [{label}]" if label else "")
        )
        finding = Finding("UseAfterFree", message, (site,), (), (rank,))
        self.analysis.add(finding)
        self.fail(finding)

    def push_range(self, name: str) -> None:
        """Open a range; a runtime's labels what is issued inside it, and is an op itself."""
        is_label = name.startswith(ANNOTATION_PREFIXES)
        self.ranges.append((name, self.annotation))
        if is_label:
            self.annotation = name
            if self.sees_operators:  # a range of collectives alone is said by their labels
                self.emit(Kind.RANGE_PUSH, name, self.current_stream_id())

    def pop_range(self) -> None:
        """Close the innermost range."""
        if not self.ranges:
            return
        name, outer = self.ranges.pop()
        if name.startswith(ANNOTATION_PREFIXES):
            if self.sees_operators:
                self.emit(Kind.RANGE_POP, name, self.current_stream_id())
            self.annotation = outer

    # ------------------------------------------------------------------ waiting

    def needed(self, clock: dict[int, int]) -> "tuple[Launch, ...]":
        """Return the device ops of collectives that ``clock`` covers and that are not complete."""
        unfinished = self.wire.graph.unfinished(self.rank.index)
        return tuple(each for each in unfinished if clock.get(each.stream, 0) >= each.tick)

    def host_wait(self, clock: dict[int, int], reason: str) -> None:
        """The host stops until the device work in ``clock`` is done, as CUDA's would."""
        self.rank.reach("host_wait")
        self.park_for(self.needed(clock), reason, is_host_wait=True)
        if self.wire.is_late:
            self.wire.want_done(self, clock)

    def park_for(
        self,
        needs: "tuple[Launch | Pending, ...]",
        reason: str,
        *,
        is_host_wait: bool,
        can_defer: bool = False,
    ) -> None:
        """Let other ranks run until all of ``needs`` are complete, or the rank must defer."""
        self.wire.want(needs)
        while True:
            waiting = [each for each in needs if not each.is_done]
            if not waiting:
                return
            for each in waiting:
                each.waiters.append(self.rank)
            self.rank.park(Wait(reason, is_host_wait, tuple(waiting), can_defer))
            if self.is_deferring:
                self.is_deferring, self.must_defer = False, True
                return

    def close(self) -> None:
        """The program has returned: what dies later depends on the collector and is no op."""
        self.is_open = False
        self.wire.want_done(self)
        for work in list(self.works):
            work.let_go()
        self.last_work = None
        self.analysis.settle()  # what that raises is still the rank's to raise


_PLUMBING = (
    "/fsdp_sim/",
    "/torch/",
    "/fsdp_core/device.py",
    "/fsdp_core/torch_private.py",
    "/contextlib.py",
    "/functools.py",
    "/typing_extensions.py",
    "/threading.py",
)
_SUBJECTS = (
    "/torch/distributed/fsdp/",
    "/torch/distributed/_composable/",
    "/torch/distributed/pipelining/",
    "/torch/distributed/algorithms/",
    "/torch/distributed/checkpoint/",
    "/torch/distributed/tensor/parallel/",
    "/torch/nn/parallel/",
    "/fsdp_sim/program/",
    "/fsdp_sim/mutation/core_functions.py",
    "/fsdp_sim/mutation/fsdp2.py",
)
"""Parts of the above whose lines are of interest themselves: they order work."""


_PLUMBING_FILE, _LIBRARY_FILE, _USER_FILE = range(3)


class _FileKinds(dict[str, int]):
    """File -> what its lines are: a library's are shown together with the user's line that led to them."""

    def __missing__(self, file: str) -> int:
        is_plumbing = any(part in file for part in _PLUMBING)
        if is_plumbing and not any(part in file for part in _SUBJECTS):
            self[file] = _PLUMBING_FILE
        else:
            self[file] = _LIBRARY_FILE if "/torch/" in file else _USER_FILE
        return self[file]


_FILE_KINDS = _FileKinds()

_SOURCES: dict[tuple[int, int, int], tuple[Source, CodeType]] = {}
"""Address of a code object, which is kept so that it stays its own, position in it, and address of the
user's line -> the line: hashing code objects and counting their lines takes longer than all else that is done for an op."""


def caller() -> Source | None:
    """Return the innermost source line that is neither the simulator's nor PyTorch's plumbing."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001  the only way to the caller's line
    while frame is not None:
        kind = _FILE_KINDS[frame.f_code.co_filename]
        if kind is not _PLUMBING_FILE:
            return _source_of(frame, _user_of(frame) if kind is _LIBRARY_FILE else None)
        frame = frame.f_back
    return None


def _user_of(frame: FrameType) -> Source | None:
    """Return the innermost line around a library's that is the user's own."""
    outer = frame.f_back
    while outer is not None and _FILE_KINDS[outer.f_code.co_filename] is not _USER_FILE:
        outer = outer.f_back
    return None if outer is None else _source_of(outer, None)


def _source_of(frame: FrameType, user: Source | None) -> Source:
    code = frame.f_code
    key = (id(code), frame.f_lasti, id(user))
    known = _SOURCES.get(key)
    if known is None:
        known = _SOURCES[key] = (Source(code.co_filename, frame.f_lineno, user), code)
    return known[0]
