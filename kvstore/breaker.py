"""`BreakerStore`: spares a store that does not answer, and whoever would wait for it."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstore.store import GetStatus, KvStore, StoreUnavailableError

__all__ = ["BreakerStore"]

_COOLDOWN_S = 1.0

_Result = TypeVar("_Result")


class BreakerStore:
    """Wraps a store; after a failure nothing is asked of it for a second.

    Then one call goes through as the probe, while all others still fail at
    once with `StoreUnavailableError`. So an outage costs one timeout a second
    and not one per call. Reads and writes are judged apart: a store that is
    full still serves what it has.
    """

    def __init__(self, store: KvStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._reads = _Breaker(clock)
        self._writes = _Breaker(clock)

    def put_many(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """See `KvStore.put_many`."""
        self._writes.call(lambda: self._store.put_many(keys, values))

    def get_many_into(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[GetStatus]:
        """See `KvStore.get_many_into`."""
        return self._reads.call(lambda: self._store.get_many_into(keys, buffers))

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        """See `KvStore.contains_prefix`."""
        return self._reads.call(lambda: self._store.contains_prefix(keys))

    def delete(self, keys: Sequence[bytes]) -> int:
        """See `KvStore.delete`."""
        return self._writes.call(lambda: self._store.delete(keys))

    def close(self) -> None:
        """See `KvStore.close`."""
        self._store.close()


class _Breaker:
    """Closed: calls pass. Open: calls fail, but for one probe after each cool-down."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._probe_at: float | None = None  # None while closed

    def call(self, call: Callable[[], _Result]) -> _Result:
        self._enter()
        try:
            result = call()
        except Exception:
            self._probe_at = self._clock() + _COOLDOWN_S
            raise
        self._probe_at = None
        return result

    def _enter(self) -> None:
        with self._lock:
            if self._probe_at is None:
                return
            if self._clock() < self._probe_at:
                raise StoreUnavailableError("the store did not answer a moment ago")
            # This call is the probe; nobody else's turn comes while it is out.
            self._probe_at = float("inf")
