"""Memory: which storages a rank has; their births and deaths become ALLOC and FREE ops."""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from fsdp_sim.engine import patches
from fsdp_sim.op import UNKNOWN, Kind, Source

if TYPE_CHECKING:
    from fsdp_sim.engine.faults import Faults
    from fsdp_sim.engine.machine import Machine
    from fsdp_sim.engine.meeting import Pending

POISON = 0xFF
"""A byte of which NaNs of all floating-point types, and -1 of all integer types, are made."""


# Looking a member up on its enum costs 90 ns in Python 3.11, and these are for most operators.
_ALLOC, _FREE = Kind.ALLOC, Kind.FREE
_STRIDED = torch.strided


class Release(NamedTuple):
    """Memory was given back by a resize to nothing: where, in which range, and how much."""

    source: Source | None
    annotation: str | None
    nbytes: int


class StorageRecord(weakref.ref[torch.UntypedStorage]):
    """One storage of one rank, held weakly: the simulator never keeps memory alive.

    Args:
        storage: what it is about; a call of the record returns it while it lives.
        died: called with the record when the storage is gone.

    Attributes:
        key: the address of the storage, for when it is gone.
        ordinal: the id in ops; a storage that is resized gets a new one, since it is new memory.
        stream: the stream whose pool the memory came from.
        is_host: made from Python data alone, so its reads and writes are on no stream.
        is_placed: the program has said that it is the host's, so it never moves to the device.
        is_born: an op of the rank made it.
        is_allocated: there is an ALLOC op without its FREE.
        is_shared: a stream other than ``stream`` has touched it, so that its end is of interest.
        pending: parts of collectives that still read or write it.
        born_at: index of its ALLOC op; ``source``: the line that allocated it.
        release: how it was given back by a resize to nothing: its views live on, and must not be used.
    """

    __slots__ = (
        "born_at",
        "is_allocated",
        "is_born",
        "is_host",
        "is_placed",
        "is_shared",
        "key",
        "ordinal",
        "pending",
        "release",
        "source",
        "stream",
    )

    __eq__, __hash__ = object.__eq__, object.__hash__  # a record is itself, whatever it is about

    def __init__(
        self, storage: torch.UntypedStorage, died: "Callable[[StorageRecord], None]"
    ) -> None:
        super().__init__(storage, died)  # type: ignore[call-arg]  # typeshed has no such method
        self.key = storage._cdata
        self.ordinal = -1
        self.stream = -1
        self.is_host = False
        self.is_placed = False
        self.is_born = False
        self.is_allocated = False
        self.is_shared = False
        self.pending: list[tuple[Pending, int, int, bool]] = []
        self.born_at = -1
        self.source: Source | None = None
        self.release: Release | None = None


class Memory:
    """The storages of one rank.

    Attributes:
        records: by address.
        next_ordinal: the number of the next storage.
        takes_unknown_for_host: a storage that no op has made is the host's.
    """

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        self.records: dict[int, StorageRecord] = {}
        self.takes_unknown_for_host = False
        self.next_ordinal = 0
        self._on_death = _on_death(weakref.ref(self))

    def _new_ordinal(self) -> int:
        self.next_ordinal += 1
        return self.next_ordinal - 1

    def record_of(self, tensor: torch.Tensor) -> StorageRecord:
        """Return the record of a tensor's storage; an unknown one was made outside any op we saw."""
        storage = tensor.untyped_storage()
        record = self.records.get(storage._cdata)
        if record is None:
            record = self._track(storage)
            if self.takes_unknown_for_host:
                record.is_host = record.is_placed = True
        return record

    def find(self, tensor: torch.Tensor) -> StorageRecord | None:
        """Return the record of a tensor's storage, None where it has none of the rank's device."""
        if tensor.layout is not _STRIDED:
            return None
        storage = tensor.untyped_storage()
        record = self.records.get(storage._cdata)
        if record is None and self.is_seen(tensor):
            record = self._track(storage)
        return record

    def is_seen(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is of a device that takes part in ops."""
        return patches.is_on_cpu(tensor) and tensor.__class__ is not patches.FakeTensor

    def known(self, storage: torch.UntypedStorage) -> StorageRecord | None:
        """Return the record of a storage if there is one."""
        return self.records.get(storage._cdata)

    def is_pending(self, tensor: torch.Tensor) -> bool:
        """Whether collectives still read or write the tensor's storage."""
        record = self.known(tensor.untyped_storage())
        return record is not None and bool(record.pending)

    def born(
        self, tensor: torch.Tensor, *, is_host: bool = False, source: Source | None = UNKNOWN
    ) -> StorageRecord | None:
        """Return the record of an op's output; a new storage was allocated on the current stream.

        None where the output is not in the memory of the rank's device.
        """
        if tensor.layout is not _STRIDED:
            return None
        storage = tensor.untyped_storage()
        record = self.records.get(storage._cdata)
        if record is None and self.is_seen(tensor):
            record = self._track(storage)
            record.is_host, record.is_born = is_host, True
            if not is_host:
                self._alloc(record, storage.nbytes(), source)
        return record

    def to_device(self, tensor: torch.Tensor) -> None:
        """A tensor of the host's is needed on the device: from now on it is there."""
        record = self.record_of(tensor)
        record.is_host = False
        record.stream = self._machine.current_stream_id()
        self._alloc(record, tensor.untyped_storage().nbytes())

    def to_host(self, tensor: torch.Tensor) -> None:
        """A tensor turns out to be the host's: its memory is none of the device's any more."""
        record = self.record_of(tensor)
        self._free(record)
        record.is_host = True

    def _track(self, storage: torch.UntypedStorage) -> StorageRecord:
        record = StorageRecord(storage, self._on_death)
        record.ordinal, record.stream = self._new_ordinal(), self._machine.current_stream_id()
        self.records[record.key] = record
        return record

    def _alloc(self, record: StorageRecord, nbytes: int, source: Source | None = UNKNOWN) -> None:
        """Take memory for a storage, on its stream."""
        if nbytes == 0:
            return
        machine = self._machine
        if machine.faults is not None:
            self._take(machine.faults, record, nbytes)
        record.is_allocated = True
        op = machine.emit(
            _ALLOC, "alloc", record.stream, other=record.ordinal, nbytes=nbytes, source=source
        )
        if op is not None:
            record.born_at, record.source = op.index, op.source

    def _take(self, faults: "Faults", record: StorageRecord, nbytes: int) -> None:
        """Run out of memory if a fault says so.

        Raises:
            torch.OutOfMemoryError: as CUDA's allocator would.
        """
        if faults.allocated(self._machine.rank, record.ordinal, nbytes):
            raise torch.OutOfMemoryError(
                f"simulated device out of memory: rank {self._machine.rank.index} tried to allocate"
                f" {nbytes} bytes"
            )

    def _free(self, record: StorageRecord, *, released_nbytes: int = 0) -> None:
        if record.is_allocated:
            record.is_allocated = False
            if self._machine.faults is not None:
                self._machine.faults.freed(self._machine.rank.index, record.ordinal)
            source = UNKNOWN if record.is_shared or released_nbytes else None
            op = self._machine.emit(
                _FREE, "free", record.stream, other=record.ordinal, source=source
            )
            record.is_shared = False
            if released_nbytes and op is not None:
                record.release = Release(op.source, op.annotation, released_nbytes)

    def discard(self, tensor: torch.Tensor) -> None:
        """The program never sees this tensor, of PyTorch's own making: its memory counts as free."""
        record = self.record_of(tensor)
        self._free(record)
        record.is_host = True

    def resized(self, storage: torch.UntypedStorage, nbytes_before: int) -> None:
        """A storage was resized in place: to zero is a free, from zero an allocation."""
        nbytes = storage.nbytes()
        record = self.records.get(storage._cdata)
        if record is None:
            record = self._track(storage)
        elif nbytes == nbytes_before:
            return
        record.release = None
        self._free(record, released_nbytes=0 if nbytes else nbytes_before)
        record.ordinal = self._new_ordinal()
        if not record.is_host:
            record.stream = self._machine.current_stream_id()
            self._alloc(record, nbytes)
            if nbytes_before == 0:
                self.poison(storage)

    def poison(self, storage: torch.UntypedStorage) -> None:
        """Make bytes that hold no value NaN in every floating-point type, where this is asked for."""
        if self._machine.poison and storage.nbytes():
            with patches.below_dispatch():
                patches.fill_storage(storage, POISON)

    def bring_back(self) -> None:
        """Give what was released its size again, full of NaN: the run is over.

        A debugger, or pytest where a rank raised, shows the tensors that it finds: without memory behind
        them the process would crash.
        """
        for record in tuple(self.records.values()):
            storage = record()
            if record.release is not None and storage is not None and not storage.nbytes():
                with patches.below_dispatch():
                    storage.resize_(record.release.nbytes)
                    patches.fill_storage(storage, POISON)

    def died(self, record: StorageRecord) -> None:
        """The last reference to a storage is gone."""
        del self.records[record.key]
        self._free(record)


def _on_death(memory: "weakref.ref[Memory]") -> Callable[[StorageRecord], None]:
    def died(record: StorageRecord) -> None:
        alive = memory()
        if alive is not None:
            alive.died(record)

    return died
