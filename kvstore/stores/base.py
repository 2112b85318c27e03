"""`SharedStore`: base of the stores that processes share through files. `StoreCounters`.

`file://` and `shm://` differ in where objects lie (`StoredObjects`); the rest of `KvStore` is
here. `StoreCounters` and `copy_into` serve any store.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Protocol, TypeVar

from typing_extensions import override

from kvstore.store import GetStatus, KvObject, KvStore, StoreStats, StoreUnavailableError
from kvstore.stores.files import os_errors_as_unavailable
from kvstore.stores.folder_identity import folder_identity
from kvstore.url import StoreLimits

__all__ = ["SharedStore", "StoreCounters", "StoredObjects", "batches", "copy_into"]

_Name = TypeVar("_Name")

_MAX_BATCH_BYTES = 16 << 20
_MAX_BATCH_OBJECTS = 64  # each has an open file or a reserved extent until the batch is committed
_MIN_BATCHES_PER_STORE = 8


class StoreCounters:
    """Counts puts, gets and removals of one store instance. Thread-safe.

    Args:
        sees_removals: whether the store itself evicts and expires objects.
    """

    def __init__(self, *, sees_removals: bool = False) -> None:
        self._lock = Lock()
        self._puts = self._gets = self._hits = 0
        self._put_bytes = self._get_bytes = 0
        self._evictions = self._expirations = 0 if sees_removals else None

    def count_puts(self, objects: Sequence[KvObject]) -> None:
        """Counts one `put`, whether or not its keys existed."""
        num_bytes = sum([header.nbytes + payload.nbytes for header, payload in objects])
        with self._lock:
            self._puts += len(objects)
            self._put_bytes += num_bytes

    def count_gets(self, statuses: Sequence[GetStatus], objects: Sequence[KvObject]) -> None:
        """Counts one `get_into`."""
        hit_bytes = [
            found.nbytes
            for status, found in zip(statuses, objects, strict=True)
            if status is GetStatus.HIT
        ]
        with self._lock:
            self._gets += len(statuses)
            self._hits += len(hit_bytes)
            self._get_bytes += sum(hit_bytes)

    def count_removals(self, *, evictions: int = 0, expirations: int = 0) -> None:
        """Counts objects that the store evicted or expired. Only with `sees_removals`."""
        with self._lock:
            self._evictions = (self._evictions or 0) + evictions
            self._expirations = (self._expirations or 0) + expirations

    def snapshot(
        self, *, num_objects: int | None, num_bytes: int | None, oldest_age_s: float | None = None
    ) -> StoreStats:
        """Returns the counters with the store's size and age."""
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


def copy_into(value: bytes | None, there: KvObject) -> GetStatus:
    """Copies a stored value, or None for a missing one, into an object's memory."""
    if value is None:
        return GetStatus.MISSING
    header, payload = there
    num_header_bytes = len(header)
    if len(value) != num_header_bytes + len(payload):
        return GetStatus.WRONG_SIZE
    stored = memoryview(value)
    header[:] = stored[:num_header_bytes]
    payload[:] = stored[num_header_bytes:]
    return GetStatus.HIT


def batches(
    named: Iterable[tuple[_Name, KvObject]], max_bytes: int
) -> Iterator[list[tuple[_Name, KvObject]]]:
    """Groups objects into batches that are committed together.

    Args:
        named: objects, each with its key or path.
        max_bytes: the store's bound; a batch of several objects takes at most an eighth of it.

    Raises:
        StoreUnavailableError: an object is larger than the bound.
    """
    batch: list[tuple[_Name, KvObject]] = []
    batch_bytes = 0
    limit_bytes = min(_MAX_BATCH_BYTES, max_bytes // _MIN_BATCHES_PER_STORE)
    for pair in named:
        num_bytes = pair[1].nbytes
        if num_bytes > max_bytes:
            message = f"an object of {num_bytes} bytes exceeds max_bytes={max_bytes}"
            raise StoreUnavailableError(message)
        is_full = batch_bytes + num_bytes > limit_bytes or len(batch) == _MAX_BATCH_OBJECTS
        if batch and is_full:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(pair)
        batch_bytes += num_bytes
    if batch:
        yield batch


class StoredObjects(Protocol):
    """The objects of a store, as one process accesses them. Thread-safe.

    Methods raise `OSError` if the operating system refuses, and `StoreUnavailableError` if there
    is no room or the store's lock is not free in time.

    Attributes:
        folder: where they lie.
        counters: count the calls of this process and the objects it removed.
    """

    folder: Path
    counters: StoreCounters

    @property
    def oldest_age_s(self) -> float | None:
        """Seconds since the least recently touched object was touched; None if unknown."""

    def put(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> None:
        """Commits objects; touches those that exist."""

    def get_into(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> list[GetStatus]:
        """Reads and touches objects."""

    def count_prefix(self, keys: Sequence[bytes]) -> int:
        """Returns how many leading keys exist, and touches these."""

    def remove(self, keys: Sequence[bytes]) -> int:
        """Removes objects; returns how many were there and had not expired."""

    def num_bytes(self) -> int:
        """Returns the bytes of all objects."""

    def close(self) -> None:
        """Releases this process's files and mappings. The objects stay. Called once."""


class SharedStore(KvStore):
    """A `KvStore` over `StoredObjects`.

    Args:
        objects: where the objects lie; closed with the store.
        limits: the URL's.
    """

    def __init__(self, objects: StoredObjects, limits: StoreLimits) -> None:
        self.ttl_s, self.lease_s = limits.ttl_s, limits.lease_s
        self.timeout_s = limits.timeout_s
        self._objects = objects
        self._is_closed = False

    @override
    def put(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> None:
        with os_errors_as_unavailable():
            self._objects.put(keys, objects)
        self._objects.counters.count_puts(objects)

    @override
    def get_into(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> list[GetStatus]:
        with os_errors_as_unavailable():
            statuses = self._objects.get_into(keys, objects)
        self._objects.counters.count_gets(statuses, objects)
        return statuses

    @override
    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        with os_errors_as_unavailable():
            return self._objects.count_prefix(keys)

    @override
    def delete(self, keys: Sequence[bytes]) -> int:
        with os_errors_as_unavailable():
            return self._objects.remove(keys)

    @override
    def identity(self) -> str:
        with os_errors_as_unavailable():
            return folder_identity(self._objects.folder)

    @override
    def stats(self) -> StoreStats:
        objects = self._objects
        num_bytes = None
        if not self._is_closed:
            with suppress(OSError):  # another thread may close it meanwhile
                num_bytes = objects.num_bytes()
        return objects.counters.snapshot(
            num_objects=None, num_bytes=num_bytes, oldest_age_s=objects.oldest_age_s
        )

    @override
    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._objects.close()
