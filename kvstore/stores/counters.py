"""`StoreCounters`: what a store's `stats` reports, counted from many threads."""

from collections.abc import Sequence
from threading import Lock

from kvstore.store import Frame, GetStatus, StoreStats

__all__ = ["StoreCounters"]


class StoreCounters:
    """Counts the puts and gets of one store object. Thread-safe.

    Args:
        sees_removals: whether the store itself evicts and expires, and counts it here.
    """

    def __init__(self, *, sees_removals: bool = False) -> None:
        self._lock = Lock()
        self._puts = self._gets = self._hits = 0
        self._put_bytes = self._get_bytes = 0
        self._evictions = self._expirations = 0 if sees_removals else None

    def count_puts(self, values: Sequence[memoryview | Frame]) -> None:
        """Counts one `put_many` or `put_frames`, whether or not its keys existed."""
        num_bytes = sum(map(_num_bytes, values))
        with self._lock:
            self._puts += len(values)
            self._put_bytes += num_bytes

    def count_gets(
        self, statuses: Sequence[GetStatus], buffers: Sequence[memoryview | Frame]
    ) -> None:
        """Counts one `get_many_into` or `get_frames_into`."""
        hit_bytes = [
            _num_bytes(buffer)
            for status, buffer in zip(statuses, buffers, strict=True)
            if status is GetStatus.HIT
        ]
        with self._lock:
            self._gets += len(statuses)
            self._hits += len(hit_bytes)
            self._get_bytes += sum(hit_bytes)

    def count_removals(self, *, evictions: int = 0, expirations: int = 0) -> None:
        """Counts objects that the store removed of itself. Only with `sees_removals`."""
        with self._lock:
            self._evictions = (self._evictions or 0) + evictions
            self._expirations = (self._expirations or 0) + expirations

    def snapshot(
        self, *, num_objects: int | None, num_bytes: int | None, oldest_age_s: float | None = None
    ) -> StoreStats:
        """The counters as they are, with the store's size and age."""
        with self._lock:
            return StoreStats(
                self._puts,
                self._gets,
                self._hits,
                self._put_bytes,
                self._get_bytes,
                num_objects,
                num_bytes,
                oldest_age_s,
                self._evictions,
                self._expirations,
            )


def _num_bytes(value: memoryview | Frame) -> int:
    return value.nbytes if isinstance(value, memoryview) else sum(part.nbytes for part in value)
