"""`SharedStore`: base of the stores that processes share through files. `StoreCounters`.

`file://` and `shm://` differ in where objects lie (`StoredObjects`); the rest of `KvStore` is
here. `StoreCounters` and `copy_into` serve any store.
"""

import errno
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Protocol, Self, TypeVar

from typing_extensions import override

from baton.common.errors import ConfigurationError
from kvstore.store import GetStatus, KvObject, KvStore, StoreStats, StoreUnavailableError
from kvstore.stores.files import OutdatedFilesError, os_errors_as_unavailable
from kvstore.stores.folders import folder_identity
from kvstore.stores.opening import OpenedOnDemand
from kvstore.url import StoreLimits, StoreUrl

__all__ = ["SharedStore", "StoreCounters", "StoredObjects", "batches", "copy_into"]

_Name = TypeVar("_Name")
_Result = TypeVar("_Result")

_MAX_BATCH_BYTES = 16 << 20
_MAX_BATCH_OBJECTS = 64  # each has an open file or a reserved extent until the batch is committed
_MIN_BATCHES_PER_STORE = 8

# The path in the URL leads to a file, or is too long.
_WRONG_PATH = (errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
# What was opened is gone: files were removed, or a mount has ended.
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENOTCONN, errno.EBADF)


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
            target.nbytes
            for status, target in zip(statuses, objects, strict=True)
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


def copy_into(value: bytes | None, target: KvObject) -> GetStatus:
    """Copies a stored value, or None for a missing one, into an object's memory."""
    if value is None:
        return GetStatus.MISSING
    header, payload = target
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
    """
    batch: list[tuple[_Name, KvObject]] = []
    batch_bytes = 0
    limit_bytes = min(_MAX_BATCH_BYTES, max_bytes // _MIN_BATCHES_PER_STORE)
    for pair in named:
        num_bytes = pair[1].nbytes
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

    Methods raise `OSError` if the operating system refuses, `StoreUnavailableError` if there is no
    room or the store's lock is not free in time, and `OutdatedFilesError` if the store's files were
    removed or replaced.
    """

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
        """Releases this process's files and mappings. The objects stay."""


class SharedStore(KvStore):
    """A `KvStore` over `StoredObjects`, which are opened when that is possible.

    If they cannot be opened now, the store is down until a call can open them. If their files are
    removed or replaced, the call that notices it opens them anew.

    Args:
        open_objects: opens them; takes the counters of removals.
        url: the store's.
        folder: where the objects lie.
        limits: the URL's.

    Raises:
        ConfigurationError: the folder's path leads to a file.
    """

    def __init__(
        self,
        open_objects: Callable[[StoreCounters], StoredObjects],
        url: StoreUrl,
        folder: Path,
        limits: StoreLimits,
    ) -> None:
        self.ttl_s, self.lease_s = limits.ttl_s, limits.lease_s
        self.timeout_s = limits.timeout_s
        self._open_objects = open_objects
        self._url = url
        self._folder = folder
        self._counters = StoreCounters(sees_removals=True)
        self._opened = OpenedOnDemand(self._open, limits.timeout_s)
        self._opened.begin()

    @classmethod
    @override
    def from_url(cls, url: str) -> Self:
        """Opens the store of a URL; `_from_url` of each class describes its form."""
        return cls._from_url(url, is_diagnosis=False)

    @classmethod
    @override
    def open_for_diagnosis(cls, url: str) -> Self:
        return cls._from_url(url, is_diagnosis=True)

    @classmethod
    @abstractmethod
    def _from_url(cls, url: str, *, is_diagnosis: bool) -> Self:
        """Does what `from_url` does, or, for a diagnosis, `open_for_diagnosis`."""

    @override
    def put(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> None:
        self._call(lambda stored: stored.put(keys, objects))
        self._counters.count_puts(objects)

    @override
    def get_into(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> list[GetStatus]:
        statuses = self._call(lambda stored: stored.get_into(keys, objects))
        self._counters.count_gets(statuses, objects)
        return statuses

    @override
    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        return self._call(lambda stored: stored.count_prefix(keys))

    @override
    def delete(self, keys: Sequence[bytes]) -> int:
        return self._call(lambda stored: stored.remove(keys))

    @override
    def identity(self) -> str:
        return self._call(lambda _: folder_identity(self._folder))

    @override
    def stats(self) -> StoreStats:
        num_bytes = oldest_age_s = None
        stored = self._opened.current
        if stored is not None:
            oldest_age_s = stored.oldest_age_s
            with suppress(OSError):  # another thread may close it meanwhile
                num_bytes = stored.num_bytes()
        return self._counters.snapshot(
            num_objects=None, num_bytes=num_bytes, oldest_age_s=oldest_age_s
        )

    @override
    def close(self) -> None:
        self._opened.close()

    @property
    def _objects(self) -> StoredObjects:
        """The objects; opens them if they are not open."""
        return self._opened.get()

    def _open(self) -> StoredObjects:
        try:
            return self._open_objects(self._counters)
        except OSError as error:
            if error.errno not in _WRONG_PATH:
                raise
            message = f"cannot use the folder {self._folder}: {error.strerror}"
            raise self._url.error(message) from error

    def _call(self, call: Callable[[StoredObjects], _Result]) -> _Result:
        """Makes a call; makes it once more, on what is opened anew, if what was open is gone."""
        try:
            with os_errors_as_unavailable(self._folder):
                stored = self._objects
                try:
                    return call(stored)
                except OutdatedFilesError:
                    pass
                except OSError as error:
                    if error.errno not in _GONE:
                        raise
                self._opened.drop(stored)
                return call(self._objects)
        except ConfigurationError as error:  # right when the store was made, and wrong now
            raise StoreUnavailableError(error.message) from error
