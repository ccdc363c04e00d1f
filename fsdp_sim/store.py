"""Store: the world's key-value store, whose ``get`` and ``wait`` park the rank."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from fsdp_sim import machine as machines
from fsdp_sim import patches
from fsdp_sim.checkers.deadlock import StoreKey
from fsdp_sim.world import Rank, Wait


class WorldStore(patches.Store):
    """All ranks' store; in a world nobody times out, a key that nobody sets is a deadlock."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._waiting: list[tuple[Rank, Sequence[str]]] = []

    def _reach(self) -> Rank | None:
        machine = machines.current()
        if machine is None:
            return None
        machine.rank.reach("store")
        return machine.rank

    def set(self, key: str, value: Any) -> None:
        """Set a key and wake whoever waits for it."""
        self._reach()
        self._put(key, value)

    def _put(self, key: str, value: Any) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        still: list[tuple[Rank, Sequence[str]]] = []
        for rank, keys in self._waiting:
            if all(each in self._values for each in keys):
                rank.wake()
            else:
                still.append((rank, keys))
        self._waiting = still

    def get(self, key: str) -> bytes:
        """Return a key's value, after waiting until it is set."""
        self.wait([key])
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        """Add to a counter and return the sum."""
        self._reach()
        total = int(self._values.get(key, b"0")) + value
        self._put(key, str(total))
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key if it has the expected value (or is absent and "" is expected)."""
        self._reach()
        now = self._values.get(key)
        if (now is None and expected == "") or now == expected.encode():
            self._put(key, desired)
        return self._values.get(key, expected.encode())

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        self._reach()
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was there."""
        self._reach()
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return how many keys are set."""
        return len(self._values)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002
        """Park until all keys are set."""
        rank = self._reach()
        while missing := tuple(StoreKey(key) for key in keys if key not in self._values):
            if rank is None:
                raise RuntimeError(f"nobody outside the world can wait for {missing[0].describe()}")
            self._waiting.append((rank, tuple(keys)))
            rank.park(Wait("store", is_host_wait=True, needs=missing))

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: a world has no time."""
