"""`Arena`: immutable objects in memory that processes share.

    /dev/shm/baton-NAME/lock      of whoever looks at the table
                        table     what lies where: `ExtentTable`
                        memory    the objects' bytes: `MappedMemory`
                        writers/  who lives: `Writers`

- Extents: an object lies in one run of bytes. Runs are laid out behind one another, are never
  split or joined, and serve one object after the other. So that those of similar sizes serve each
  other, there are eight sizes to each power of two; what is not written to takes no memory.
- Writers take a free extent under the lock, write to it without, and make it the key's object
  under the lock again, unless there is one. So objects appear whole or not at all.
- Readers find and touch objects under the lock, and copy them without. An object that goes
  meanwhile has another generation then, and was not there.
- Bound: of the objects' bytes, those being written too; in memory each takes whole pages. When one
  more would exceed it, the objects go that were not touched for longest, but for leased ones.
- Spare memory: what an object leaves stays with its extent, up to an eighth of the bound and to
  where it and the objects exceed the bound, for fresh pages cost more than the copy into them.
  The rest goes back when nobody can still be reading it. Where a put finds none, and the bound
  leaves room, some is made ready for the next one; it counts as spare from the start.
- Crashes: the lock ends with its holder, as does the mark of a writer, whose extents are free
  then. A table that was being changed is counted anew.
"""

import errno
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event

from kvstore.store import GetStatus, KvObject, StoreUnavailableError
from kvstore.stores.base import batches
from kvstore.stores.files import FileLock
from kvstore.stores.shm.arena_space import ArenaSpace, whole_pages
from kvstore.stores.shm.extent_table import Extent, ExtentTable, SeenObject
from kvstore.stores.shm.mapped_memory import MappedMemory
from kvstore.stores.shm.writers import Writers
from kvstore.url import StoreLimits

__all__ = ["Arena"]


class Arena:
    """One process's share in a store. Thread-safe; methods raise `OSError` where the system
    refuses, `StoreUnavailableError` where there is no room or no lock to be had.

    Args:
        folder: the store's, which exists.
        limits: as the URL says.

    Attributes:
        counters: of this process's calls, and of what it removed.
    """

    def __init__(self, folder: Path, limits: StoreLimits) -> None:
        with ExitStack() as opened:
            self._memory = MappedMemory(folder / "memory")
            opened.callback(self._memory.close)
            self._table = ExtentTable(folder / "table")
            opened.callback(self._table.close)
            self._writers = Writers(folder / "writers")
            opened.callback(self._writers.close)
            # Closed first: then nobody begins to write who has no mark.
            self._lock = FileLock(folder / "lock", limits.timeout_s)
            opened.callback(self._lock.close)
            self._space = ArenaSpace(folder, limits, self._table, self._memory, self._writers)
            self._opened = opened.pop_all()
        self.counters = self._space.counters
        self._timeout_s = limits.timeout_s
        self._abandoned: deque[Extent] = deque()
        self._sizes_ahead: list[int] = []  # of objects that memory is wanted for
        with suppress(StoreUnavailableError, OSError), self._locked():
            self._space.list_objects()
            self._space.make_room(0)

    @property
    def oldest_age_s(self) -> float | None:
        """See `BoundedSpace.oldest_age_s`."""
        return self._space.oldest_age_s

    def put(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> None:
        """See `StoredObjects.put`."""
        for batch in batches(zip(keys, objects, strict=True), self._space.max_bytes):
            self._put_batch(batch)

    @property
    def wants_ahead(self) -> bool:
        """Whether there is something for `provide_ahead` to do: memory to be made ready, or
        extents to be freed that could not be.
        """
        return bool(self._sizes_ahead or self._abandoned)

    def provide_ahead(self, is_unwanted: Event) -> None:
        """Puts memory behind extents like those that lacked it last, for the next put: it costs
        more than a copy, and who puts is waited for.

        Args:
            is_unwanted: once it is set, no more is begun.
        """
        deadline_s = time.monotonic() + self._timeout_s  # of all of it: `close` may wait for it
        with self._writing(deadline_s) as reserved:
            with self._locked(deadline_s):
                sizes, self._sizes_ahead = self._sizes_ahead, []
                for num_bytes in self._space.find_lacking(sizes):
                    reserved.append(self._space.reserve_ahead(num_bytes))
            for extent in reserved:
                if is_unwanted.is_set():
                    break
                self._provide(extent)
                self._memory.map_in(extent.offset, extent.resident_bytes)
            with self._locked(deadline_s):
                while reserved:
                    self._space.free(reserved.popleft())

    def get_into(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> list[GetStatus]:
        """See `StoredObjects.get_into`."""
        with self._locked():
            sizes = (there.nbytes for there in objects)
            found = [self._look_up(*pair) for pair in zip(keys, sizes, strict=True)]
        hits = [
            (self._table[one.extent_index], there)
            for one, there in zip(found, objects, strict=True)
            if isinstance(one, SeenObject)
        ]
        self._memory.read([(extent.offset, there) for extent, there in hits])
        return [self._still(one) if isinstance(one, SeenObject) else one for one in found]

    def count_prefix(self, keys: Sequence[bytes]) -> int:
        """See `StoredObjects.count_prefix`."""
        with self._locked():
            missing = (i for i, key in enumerate(keys) if not self._touch_if_alive(key))
            return next(missing, len(keys))

    def remove(self, keys: Sequence[bytes]) -> int:
        """See `StoredObjects.remove`."""
        with self._locked():
            return sum(map(self._space.remove, keys))

    def num_bytes(self) -> int:
        """See `StoredObjects.num_bytes`; counts expired ones until a listing removes them."""
        return self._table.header.object_bytes

    def close(self) -> None:
        """See `StoredObjects.close`."""
        if self._abandoned:
            with suppress(StoreUnavailableError, OSError), self._locked():
                pass  # which frees them
        self._opened.close()

    @contextmanager
    def _locked(self, deadline_s: float | None = None) -> Iterator[None]:
        """Holds the store's lock, knowing what others did. See `FileLock.locked`."""
        with self._lock.locked(deadline_s):
            if self._lock.is_removed:
                raise StoreUnavailableError("the store's folder was removed")
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
    def _writing(self, deadline_s: float | None = None) -> Iterator[deque[Extent]]:
        """For extents that this thread writes to. Those still in it at an error are free again: at
        once where the system refused something and the lock is to be had until the deadline,
        otherwise by the next call.
        """
        reserved: deque[Extent] = deque()
        with self._writers.writing():
            try:
                yield reserved
            except OSError:
                self._abandoned.extend(reserved)
                with suppress(StoreUnavailableError, OSError), self._locked(deadline_s):
                    pass  # which frees them
                raise
            except BaseException:  # most likely the lock, which was waited for already
                self._abandoned.extend(reserved)
                raise

    def _put_batch(self, batch: Sequence[tuple[bytes, KvObject]]) -> None:
        with self._writing() as reserved:
            with self._locked():
                new = [pair for pair in batch if not self._touch_if_alive(pair[0])]
                sizes = [one.nbytes for _, one in new]
                self._space.make_room(sum(sizes))
                for num_bytes in sizes:
                    reserved.append(self._space.reserve(num_bytes))
            if not new:
                return
            self._provide_for_objects(reserved)
            self._memory.write(
                [(extent.offset, one) for extent, (_, one) in zip(reserved, new, strict=True)]
            )
            with self._locked():
                for key, _ in new:
                    self._space.commit(reserved.popleft(), key)
                if self._space.find_lacking(sizes):
                    self._sizes_ahead = sizes

    def _provide_for_objects(self, extents: Sequence[Extent]) -> None:
        """Puts memory behind extents; where the system has none left, by giving back spare."""
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
        """Puts memory behind what will be written to an extent that is this one's alone."""
        if num_bytes := _lacking_bytes(extent):
            self._memory.provide(extent.offset + extent.resident_bytes, num_bytes)
            extent.resident_bytes += num_bytes

    def _still(self, seen: SeenObject) -> GetStatus:
        """What a copy is that was made of an object, for it may have gone meanwhile."""
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


def _lacking_bytes(extent: Extent) -> int:
    """Of the pages that an extent's bytes will take, those without memory."""
    return max(0, whole_pages(extent.num_bytes) - extent.resident_bytes)
