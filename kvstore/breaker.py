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

    Meanwhile every call fails at once with `StoreUnavailableError`. The first
    call after that second is the probe. So an outage costs one timeout a
    second and not one per call.
    """

    def __init__(self, store: KvStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._open_until = 0.0

    def put_many(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """See `KvStore.put_many`."""
        self._guard(lambda: self._store.put_many(keys, values))

    def get_many_into(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[GetStatus]:
        """See `KvStore.get_many_into`."""
        return self._guard(lambda: self._store.get_many_into(keys, buffers))

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        """See `KvStore.contains_prefix`."""
        return self._guard(lambda: self._store.contains_prefix(keys))

    def delete(self, keys: Sequence[bytes]) -> int:
        """See `KvStore.delete`."""
        return self._guard(lambda: self._store.delete(keys))

    def close(self) -> None:
        """See `KvStore.close`."""
        self._store.close()

    def _guard(self, call: Callable[[], _Result]) -> _Result:
        with self._lock:
            if self._clock() < self._open_until:
                raise StoreUnavailableError("the store did not answer a moment ago")
        try:
            return call()
        except StoreUnavailableError:
            with self._lock:
                self._open_until = self._clock() + _COOLDOWN_S
            raise
