"""`PartsStore`: what stores have in common whose objects come and go in one part or in two.

`StoreCounters`: what a store's `stats` reports, counted from many threads.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from threading import Lock
from typing import Protocol, TypeVar

from kvstore.store import Frame, GetStatus, KvStore, StoreStats, StoreUnavailableError
from kvstore.stores.files import os_errors_as_unavailable
from kvstore.url import StoreLimits

__all__ = ["Parts", "PartsObjects", "PartsStore", "StoreCounters", "batches", "total_bytes"]


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


_Name = TypeVar("_Name")

_MAX_BATCH_BYTES = 16 << 20
_MAX_BATCH_OBJECTS = 64  # each is open, or laid out, until the batch is committed

Parts = Sequence[memoryview]
"""An object's bytes, in one part or several."""


def total_bytes(parts: Parts) -> int:
    """Of all parts."""
    return sum([part.nbytes for part in parts])


def batches(
    objects: Iterable[tuple[_Name, Parts]], max_bytes: int
) -> Iterator[list[tuple[_Name, Parts]]]:
    """Objects to be committed together.

    Args:
        objects: by key, or what the store calls them.
        max_bytes: the store's bound, of which a batch takes a small part where it can.

    Raises:
        StoreUnavailableError: an object exceeds the bound.
    """
    batch: list[tuple[_Name, Parts]] = []
    batch_bytes = 0
    limit_bytes = min(_MAX_BATCH_BYTES, max_bytes // 8)
    for name, parts in objects:
        num_bytes = total_bytes(parts)
        if num_bytes > max_bytes:
            message = f"an object of {num_bytes} bytes exceeds max_bytes={max_bytes}"
            raise StoreUnavailableError(message)
        is_full = batch_bytes + num_bytes > limit_bytes or len(batch) == _MAX_BATCH_OBJECTS
        if batch and is_full:
            yield batch
            batch, batch_bytes = [], 0
        batch.append((name, parts))
        batch_bytes += num_bytes
    if batch:
        yield batch


class PartsObjects(Protocol):
    """The objects themselves. Thread-safe; methods may raise `OSError`, which is the system's
    refusal, and `StoreUnavailableError`.

    Attributes:
        counters: of this process's calls, and of what it removed.
    """

    counters: StoreCounters

    @property
    def oldest_age_s(self) -> float | None:
        """See `StoreStats.oldest_age_s`."""

    def put_many(self, keys: Sequence[bytes], values: Sequence[Parts]) -> None:
        """Commits objects, or touches those that exist."""

    def read_many(self, keys: Sequence[bytes], values: Sequence[Parts]) -> list[GetStatus]:
        """Reads and touches objects."""

    def count_prefix(self, keys: Sequence[bytes]) -> int:
        """How many leading keys exist; touches those."""

    def remove(self, keys: Sequence[bytes]) -> int:
        """Removes objects; returns how many were there and alive."""

    def num_bytes(self) -> int:
        """Of all objects."""

    def close(self) -> None:
        """Releases what this process has of them. The objects stay. Once."""


class PartsStore(KvStore):
    """A `KvStore` of such objects.

    Args:
        objects: them.
        limits: as the URL says.
    """

    def __init__(self, objects: PartsObjects, limits: StoreLimits) -> None:
        self.ttl_s, self.lease_s = limits.ttl_s, limits.lease_s
        self.timeout_s = limits.timeout_s
        self._objects = objects
        self._is_closed = False

    def put_many(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """See `KvStore.put_many`."""
        self._put(keys, [(value,) for value in values])
        self._objects.counters.count_puts(values)

    def put_frames(self, keys: Sequence[bytes], frames: Sequence[Frame]) -> None:
        """See `KvStore.put_frames`."""
        self._put(keys, frames)
        self._objects.counters.count_puts(frames)

    def get_many_into(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[GetStatus]:
        """See `KvStore.get_many_into`."""
        statuses = self._get(keys, [(buffer,) for buffer in buffers])
        self._objects.counters.count_gets(statuses, buffers)
        return statuses

    def get_frames_into(self, keys: Sequence[bytes], frames: Sequence[Frame]) -> list[GetStatus]:
        """See `KvStore.get_frames_into`."""
        statuses = self._get(keys, frames)
        self._objects.counters.count_gets(statuses, frames)
        return statuses

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        """See `KvStore.contains_prefix`."""
        with os_errors_as_unavailable():
            return self._objects.count_prefix(keys)

    def delete(self, keys: Sequence[bytes]) -> int:
        """See `KvStore.delete`."""
        with os_errors_as_unavailable():
            return self._objects.remove(keys)

    def stats(self) -> StoreStats:
        """See `KvStore.stats`."""
        objects = self._objects
        num_bytes = None
        if not self._is_closed:
            with suppress(OSError):  # it is being closed
                num_bytes = objects.num_bytes()
        return objects.counters.snapshot(
            num_objects=None, num_bytes=num_bytes, oldest_age_s=objects.oldest_age_s
        )

    def close(self) -> None:
        """See `KvStore.close`."""
        if not self._is_closed:
            self._is_closed = True
            self._objects.close()

    def _put(self, keys: Sequence[bytes], values: Sequence[Parts]) -> None:
        with os_errors_as_unavailable():
            self._objects.put_many(keys, values)

    def _get(self, keys: Sequence[bytes], values: Sequence[Parts]) -> list[GetStatus]:
        with os_errors_as_unavailable():
            return self._objects.read_many(keys, values)
