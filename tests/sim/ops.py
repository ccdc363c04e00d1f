"""Ops made by hand: a few lines that read like the program they stand for."""

from fsdp_sim.analysis import Analysis, analyse
from fsdp_sim.checkers import make
from fsdp_sim.errors import Finding
from fsdp_sim.op import Access, Call, Kind, Op, Source

Strides = tuple[int, tuple[int, ...], tuple[int, ...]]


def read(storage: int, lo: int = 0, hi: int = 64, strides: Strides | None = None) -> Access:
    """Bytes of a block that an op reads."""
    return Access(storage, lo, hi, write=False, strides=strides)


def write(storage: int, lo: int = 0, hi: int = 64, strides: Strides | None = None) -> Access:
    """Bytes of a block that an op writes."""
    return Access(storage, lo, hi, write=True, strides=strides)


class Ops(list[Op]):
    """The ops of one rank; each call appends one, whose source line is its position."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.rank = rank

    def add(
        self,
        kind: Kind,
        name: str,
        stream: int,
        accesses: tuple[Access, ...] = (),
        *,
        other: int = -1,
        nbytes: int = 0,
        annotation: str | None = None,
        call: Call | None = None,
        line: int | None = None,
    ) -> Op:
        """Append one op."""
        source = Source("program.py", len(self) if line is None else line)
        op = Op(
            self.rank,
            len(self),
            kind,
            name,
            stream,
            accesses,
            other,
            nbytes,
            annotation,
            source,
            call,
        )
        self.append(op)
        return op

    def aten(self, stream: int, *accesses: Access, name: str = "mm", line: int | None = None) -> Op:
        """Work on a stream."""
        return self.add(Kind.ATEN, name, stream, accesses, line=line)

    def collective(
        self,
        stream: int,
        *accesses: Access,
        name: str = "all_gather",
        group_name: str = "0",
        annotation: str | None = None,
        is_async: bool = False,
    ) -> Op:
        """This rank's part of a collective."""
        call = Call((0, 1), group_name, 0, name, None, "float32", (16,), is_async=is_async)
        return self.add(Kind.COLLECTIVE, name, stream, accesses, call=call, annotation=annotation)

    def alloc(
        self, stream: int, storage: int, nbytes: int = 64, annotation: str | None = None
    ) -> Op:
        """Memory from a stream's pool."""
        return self.add(
            Kind.ALLOC, "alloc", stream, other=storage, nbytes=nbytes, annotation=annotation
        )

    def free(self, stream: int, storage: int) -> Op:
        """Memory back to its pool."""
        return self.add(Kind.FREE, "free", stream, other=storage)

    def record_stream(self, stream: int, storage: int) -> Op:
        """Keep a block until the work on a stream is done."""
        return self.add(Kind.RECORD_STREAM, "record_stream", stream, other=storage)

    def record(self, stream: int, event: int) -> Op:
        """Snapshot a stream."""
        return self.add(Kind.RECORD_EVENT, "record_event", stream, other=event)

    def wait(self, stream: int, event: int) -> Op:
        """Order a stream behind a snapshot."""
        return self.add(Kind.WAIT_EVENT, "wait_event", stream, other=event)

    def wait_stream(self, stream: int, awaited: int) -> Op:
        """Order a stream behind all work now on another."""
        return self.add(Kind.WAIT_STREAM, "wait_stream", stream, other=awaited)

    def synchronize(self, stream: int = -1) -> Op:
        """The host waits for a stream, or for all."""
        return self.add(Kind.HOST_WAIT_STREAM, "synchronize", -1, other=stream)

    def synchronize_event(self, event: int) -> Op:
        """The host waits for a snapshot."""
        return self.add(Kind.HOST_WAIT_EVENT, "event.synchronize", -1, other=event)

    def push(self, name: str, stream: int = 0) -> Op:
        """Open a range."""
        return self.add(Kind.RANGE_PUSH, name, stream)

    def pop_range(self, name: str, stream: int = 0) -> Op:
        """Close a range."""
        return self.add(Kind.RANGE_POP, name, stream)

    def analyse(self, *names: str) -> Analysis:
        """Feed all ops to the checkers of these names."""
        return analyse(self, make(names), self.rank + 1)

    def findings(self, *names: str) -> tuple[Finding, ...]:
        """Return what the checkers of these names find."""
        return self.analyse(*names).findings
