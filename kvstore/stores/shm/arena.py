"""`Arena`: immutable objects in memory that processes share.

    /dev/shm/baton-NAME/opening   held while a process opens the other files
                        lock      held while the table is read or changed
                        table     which object lies where: `ExtentTable`
                        memory    the objects' bytes: `MappedMemory`
                        writers/  which writers are alive: `Writers`

- Extents: an object lies in one run of bytes, an extent. Extents lie one after the other, are never
  split or joined, and hold one object after the other. Their sizes are rounded up, to eight sizes
  per power of two, so that objects of similar sizes reuse them. Pages that were never written to
  take no memory.
- Writers reserve a free extent under the lock, write to it without the lock, and make it the key's
  object under the lock, unless the key has one. So objects appear whole or not at all.
- Readers find and touch objects under the lock, and copy them without it. If an object is removed
  meanwhile, its extent has a new generation, and the read reports it as missing.
- Bound: it counts the objects' bytes, including those being written; in memory each object takes
  whole pages. If one more would exceed the bound, the least recently touched objects are evicted,
  but not leased ones.
- Spare memory: an extent that becomes free keeps its memory, because fresh pages cost more than the
  copy into them. Spare memory is limited to an eighth of the bound, and together with the objects
  to the bound. The rest is returned to the system once no reader can still use it.
- Removal: the files may be removed under running processes, as at the end of a login session. The
  holder of the lock checks that its path still leads to the file that it has locked. Lock, table
  and memory belong together: if one of them is missing, an opener makes all of them anew.
- Crashes: a lock ends with the process that holds it. So does a writer's mark; then its extents are
  free. If a process died while it changed the table, the next one counts the table anew.
"""

import errno
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from kvstore.store import GetStatus, KvObject, StoreUnavailableError
from kvstore.stores.base import StoreCounters, batches
from kvstore.stores.files import FileLock
from kvstore.stores.shm.arena_space import ArenaSpace, whole_pages
from kvstore.stores.shm.extent_table import Extent, ExtentTable, SeenObject
from kvstore.stores.shm.mapped_memory import MappedMemory
from kvstore.stores.shm.writers import Writers
from kvstore.url import StoreLimits

__all__ = ["Arena"]


class Arena:
    """One process's access to a store's objects; implements `StoredObjects`.

    Args:
        folder: the store's, which exists.
        limits: the URL's.
        counters: see `BoundedSpace`.
    """

    def __init__(
        self, folder: Path, limits: StoreLimits, counters: StoreCounters | None = None
    ) -> None:
        with ExitStack() as opened, _opening(folder, limits.timeout_s):
            self._memory = MappedMemory(folder / "memory")
            opened.callback(self._memory.close)
            self._table = ExtentTable(folder / "table")
            opened.callback(self._table.close)
            self._writers = Writers(folder / "writers")
            opened.callback(self._writers.close)
            # Closed first, so that no thread starts to write after the mark is gone.
            self._lock = FileLock(folder / "lock", limits.timeout_s)
            opened.callback(self._lock.close)
            self._space = ArenaSpace(
                folder, limits, self._table, self._memory, self._writers, counters
            )
            self._opened = opened.pop_all()
        self._abandoned: deque[Extent] = deque()
        with suppress(StoreUnavailableError, OSError), self._locked():
            self._space.remove_outdated()

    @property
    def oldest_age_s(self) -> float | None:
        """Seconds since the oldest object was touched; see `BoundedSpace.oldest_age_s`."""
        return self._space.oldest_age_s

    def put(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> None:
        """Commits objects batch by batch; touches those that exist."""
        for batch in batches(zip(keys, objects, strict=True), self._space.max_bytes):
            self._put_batch(batch)

    def get_into(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> list[GetStatus]:
        """Reads and touches objects."""
        with self._locked():
            sizes = (target.nbytes for target in objects)
            looks = [self._look_up(*pair) for pair in zip(keys, sizes, strict=True)]
        hits = [
            (self._table[look.extent_index], target)
            for look, target in zip(looks, objects, strict=True)
            if isinstance(look, SeenObject)
        ]
        self._memory.read([(extent.offset, target) for extent, target in hits])
        return [self._still(look) if isinstance(look, SeenObject) else look for look in looks]

    def count_prefix(self, keys: Sequence[bytes]) -> int:
        """Counts and touches the leading keys that exist."""
        with self._locked():
            missing = (i for i, key in enumerate(keys) if not self._touch_if_alive(key))
            return next(missing, len(keys))

    def remove(self, keys: Sequence[bytes]) -> int:
        """Removes objects; returns how many were alive."""
        with self._locked():
            return sum(map(self._space.remove, keys))

    def num_bytes(self) -> int:
        """Returns the objects' bytes; counts expired ones until a listing removes them."""
        return self._table.header.object_bytes

    def close(self) -> None:
        """Closes the store's files, after freeing extents that could not be freed before."""
        if self._abandoned:
            with suppress(StoreUnavailableError, OSError), self._locked():
                pass  # `_locked` frees them
        self._opened.close()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the store's lock and reads other processes' changes; see `FileLock.locked`."""
        with self._lock.locked():
            self._lock.check_path()
            self._space.begin()
            while self._abandoned:
                self._space.free(self._abandoned.popleft())
            try:
                yield
            except StoreUnavailableError:
                self._space.end()
                raise
            self._space.end()

    @contextmanager
    def _writing(self) -> Iterator[deque[Extent]]:
        """Collects the extents that this thread writes to.

        After an error those still in it are freed: at once if the system refused something and the
        lock is free in time, otherwise by the next call.
        """
        reserved: deque[Extent] = deque()
        with self._writers.writing():
            try:
                yield reserved
            except OSError:
                self._abandoned.extend(reserved)
                with suppress(StoreUnavailableError, OSError), self._locked():
                    pass  # `_locked` frees them
                raise
            except BaseException:  # most likely the lock was not free, so do not wait again
                self._abandoned.extend(reserved)
                raise

    def _put_batch(self, batch: Sequence[tuple[bytes, KvObject]]) -> None:
        with self._writing() as reserved:
            with self._locked():
                new = [pair for pair in batch if not self._touch_if_alive(pair[0])]
                sizes = [item.nbytes for _, item in new]
                self._space.make_room(sum(sizes))
                for num_bytes in sizes:
                    reserved.append(self._space.reserve(num_bytes))
            if not new:
                return
            self._provide_for_objects(reserved)
            self._memory.write(
                [(extent.offset, item) for extent, (_, item) in zip(reserved, new, strict=True)]
            )
            with self._locked():
                for key, _ in new:
                    self._space.commit(reserved.popleft(), key)

    def _provide_for_objects(self, extents: Sequence[Extent]) -> None:
        """Allocates memory for extents; if the system has none left, returns spare memory first."""
        try:
            for extent in extents:
                self._provide(extent)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            with self._locked():
                self._space.give_back(sum(map(_lacking_bytes, extents)))
            for extent in extents:
                self._provide(extent)

    def _provide(self, extent: Extent) -> None:
        """Allocates memory for what this thread will write to an extent that it reserved."""
        if num_bytes := _lacking_bytes(extent):
            self._memory.provide(extent.offset + extent.resident_bytes, num_bytes)
            extent.resident_bytes += num_bytes

    def _still(self, seen: SeenObject) -> GetStatus:
        """Returns whether an object that was copied was still there after the copy."""
        has_gone = self._table[seen.extent_index].generation != seen.generation
        return GetStatus.MISSING if has_gone else GetStatus.HIT

    def _look_up(self, key: bytes, num_bytes: int) -> SeenObject | GetStatus:
        extent = self._space.find(key)
        if extent is None:
            return GetStatus.MISSING
        if extent.num_bytes != num_bytes:
            return GetStatus.WRONG_SIZE
        self._space.touch(extent)
        return extent.seen()

    def _touch_if_alive(self, key: bytes) -> bool:
        extent = self._space.find(key)
        if extent is not None:
            self._space.touch(extent)
        return extent is not None


@contextmanager
def _opening(folder: Path, timeout_s: float) -> Iterator[None]:
    """Excludes other openers of a folder; first removes what is left of an incomplete store."""
    with closing(FileLock(folder / "opening", timeout_s)) as lock, lock.locked():
        files = [folder / name for name in ("lock", "table", "memory")]
        if not all(file.exists() for file in files):
            for file in files:
                file.unlink(missing_ok=True)
        yield


def _lacking_bytes(extent: Extent) -> int:
    """Returns how many bytes of an extent's pages have no memory yet."""
    return max(0, whole_pages(extent.num_bytes) - extent.resident_bytes)
