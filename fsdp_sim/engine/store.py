"""Store: the world's key-value store, whose ``get`` and ``wait`` park the rank."""

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from fsdp_sim.checkers.deadlock import StoreKey
from fsdp_sim.engine import machine as machines
from fsdp_sim.engine import patches
from fsdp_sim.engine.world import Rank, Wait
from fsdp_sim.scheduler.independence import ALL_KEYS


class Contents:
    """What the ranks of a world have stored, and who waits for more."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}
        self.waiting: list[tuple[Rank, Callable[[], bool]]] = []

    def changed(self) -> None:
        """Wake those who have got what they wait for."""
        still: list[tuple[Rank, Callable[[], bool]]] = []
        for rank, is_there in self.waiting:
            if is_there():
                rank.wake()
            else:
                still.append((rank, is_there))
        self.waiting = still


class WorldStore(patches.Store):
    """All ranks' store; in a world nobody times out, a key that nobody sets is a deadlock.

    Args:
        contents: shared with other stores of the world.
        prefix: of this store's keys among them.
    """

    def __init__(self, contents: Contents | None = None, prefix: str = "") -> None:
        super().__init__()
        self.contents = contents if contents is not None else Contents()
        self._prefix = prefix

    def _reach(self, *keys: str, polls: bool = False) -> Rank | None:
        """Let others go first; with one key, only those who use it could notice."""
        machine = machines.current()
        if machine is None:
            return None
        key = self._prefix + keys[0] if len(keys) == 1 else ALL_KEYS
        if polls:
            machine.rank.poll("store", key)
        else:
            machine.rank.reach("store", key)
        if machine.faults is not None:
            machine.faults.visit(machine.rank, "store")
        return machine.rank

    def _put(self, key: str, value: Any) -> None:
        self.contents.values[self._prefix + key] = _bytes(value)
        self.contents.changed()

    def _has(self, key: str) -> bool:
        return self._prefix + key in self.contents.values

    def _park(self, rank: Rank | None, keys: Sequence[str], is_there: Callable[[], bool]) -> None:
        while not is_there():
            needs = tuple(StoreKey(key) for key in keys)
            if rank is None:
                raise RuntimeError(f"nobody outside the world can wait for {needs[0].describe()}")
            self.contents.waiting.append((rank, is_there))
            rank.park(Wait("store", is_host_wait=True, needs=needs))

    # ------------------------------------------------------------------ keys

    def set(self, key: str, value: Any) -> None:
        """Set a key and wake whoever waits for it."""
        self._reach(key)
        self._put(key, value)

    def get(self, key: str) -> bytes:
        """Return a key's value, after waiting until it is set."""
        self._park(self._reach(key), [key], lambda: self._has(key))
        return self.contents.values[self._prefix + key]

    def add(self, key: str, value: int) -> int:
        """Add to a counter and return the sum."""
        self._reach(key)
        total = int(self.contents.values.get(self._prefix + key, b"0")) + value
        self._put(key, str(total))
        return total

    def append(self, key: str, value: Any) -> None:
        """Append to a value; an absent one is empty."""
        self._reach(key)
        self._put(key, self.contents.values.get(self._prefix + key, b"") + _bytes(value))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set a key if it has the expected value, or is absent and "" is expected; return its value."""
        self._reach(key)
        now = self.contents.values.get(self._prefix + key)
        if now == _bytes(expected) or (now is None and not expected):
            self._put(key, desired)
        return self.contents.values.get(self._prefix + key, _bytes(expected))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        self._reach(*keys, polls=True)
        return all(self._has(key) for key in keys)

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was there."""
        self._reach(key)
        return self.contents.values.pop(self._prefix + key, None) is not None

    deleteKey = delete_key  # noqa: N815  what PrefixStore calls

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002
        """Park until all keys are set."""
        rank = self._reach(*keys)
        missing = [key for key in keys if not self._has(key)]
        self._park(rank, missing, lambda: all(self._has(key) for key in keys))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return several keys' values, after waiting until all are set."""
        self.wait(keys)
        return [self.contents.values[self._prefix + key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Set several keys."""
        self._reach(*keys)
        for key, value in zip(keys, values, strict=True):
            self._put(key, value)

    def list_keys(self) -> list[str]:
        """Return all keys of this store, sorted."""
        self._reach()
        prefix, keys = self._prefix, self.contents.values
        return sorted(key.removeprefix(prefix) for key in keys if key.startswith(prefix))

    def num_keys(self) -> int:
        """Return how many keys are set."""
        return len(self.list_keys())

    getNumKeys = num_keys  # noqa: N815  what PrefixStore calls

    # ------------------------------------------------------------------ queues

    def queue_push(self, key: str, value: Any) -> None:
        """Put a value at the end of a queue."""
        self._reach(key)
        self.contents.queues.setdefault(self._prefix + key, deque()).append(_bytes(value))
        self.contents.changed()

    def queue_pop(self, key: str, block: bool = True) -> bytes:  # noqa: FBT001, FBT002  as PyTorch's
        """Take the first value of a queue, after waiting for one."""
        rank = self._reach(key)
        queue = self.contents.queues.setdefault(self._prefix + key, deque())
        if block:
            self._park(rank, [key], lambda: bool(queue))
        elif not queue:
            raise patches.QueueEmptyError(f"queue {key!r} must not be empty, got no value")
        return queue.popleft()

    def queue_len(self, key: str) -> int:
        """Return how many values a queue has."""
        self._reach(key)
        return len(self.contents.queues.get(self._prefix + key, ()))

    # ------------------------------------------------------------------ the rest

    def clone(self) -> "WorldStore":
        """Return another store on the same keys."""
        return WorldStore(self.contents, self._prefix)

    def has_extended_api(self) -> bool:
        """Return True: ``append``, ``multi_get`` and ``multi_set`` are there."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: a world has no time."""


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def program_stores(contents: Contents) -> dict[str, type[WorldStore]]:
    """Return what stores that a program makes are inside a world, by their names: no sockets, no files."""

    class TCPStore(WorldStore):
        """A store that ranks reach under one host and port."""

        def __init__(
            self,
            host_name: str,
            port: int,
            world_size: int | None = None,
            is_master: bool = False,  # noqa: ARG002, FBT001, FBT002  as PyTorch's
            timeout: timedelta | None = None,  # noqa: ARG002
            wait_for_workers: bool = True,  # noqa: FBT001, FBT002
            **_: Any,
        ) -> None:
            super().__init__(contents, f"tcp://{host_name}:{port}/")
            self.host = host_name
            self.port = port
            if world_size is not None and world_size > 0 and wait_for_workers:
                self._await_workers(world_size)

        def _await_workers(self, world_size: int) -> None:
            if self.add("workers", 1) == world_size:
                self.set("all workers", "")
            self.get("all workers")

    class FileStore(WorldStore):
        """A store that ranks reach under one path."""

        def __init__(self, file_name: str, world_size: int = -1) -> None:  # noqa: ARG002
            super().__init__(contents, f"file://{file_name}/")
            self.path = file_name

    class HashStore(WorldStore):
        """A store of one rank."""

        def __init__(self) -> None:
            super().__init__()

    return {"TCPStore": TCPStore, "FileStore": FileStore, "HashStore": HashStore}
