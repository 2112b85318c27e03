"""`StoreCounters`: what a store's `stats` reports, counted from many threads."""

from collections.abc import Sequence
from threading import Lock

from kvstore.store import GetStatus, StoreStats

__all__ = ["StoreCounters"]


class StoreCounters:
    """Counts the puts and gets of one store object. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._puts = self._gets = self._hits = 0
        self._put_bytes = self._get_bytes = 0

    def count_puts(self, values: Sequence[memoryview]) -> None:
        """Counts one `put_many`, whether or not its keys existed."""
        num_bytes = sum(value.nbytes for value in values)
        with self._lock:
            self._puts += len(values)
            self._put_bytes += num_bytes

    def count_gets(self, statuses: Sequence[GetStatus], buffers: Sequence[memoryview]) -> None:
        """Counts one `get_many_into`."""
        hit_bytes = [
            buffer.nbytes
            for status, buffer in zip(statuses, buffers, strict=True)
            if status is GetStatus.HIT
        ]
        with self._lock:
            self._gets += len(statuses)
            self._hits += len(hit_bytes)
            self._get_bytes += sum(hit_bytes)

    def snapshot(self, *, num_objects: int | None, num_bytes: int | None) -> StoreStats:
        """The counters as they are, with the store's size."""
        with self._lock:
            return StoreStats(
                self._puts,
                self._gets,
                self._hits,
                self._put_bytes,
                self._get_bytes,
                num_objects,
                num_bytes,
            )
