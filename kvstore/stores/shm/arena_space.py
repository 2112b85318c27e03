"""`ArenaSpace`: an arena's extents, its bound, and what is removed to keep it."""

import errno
import mmap
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from kvstore.store import StoreUnavailableError
from kvstore.stores.base import StoreCounters
from kvstore.stores.bounded_space import BoundedSpace
from kvstore.stores.shm.extent_index import ExtentIndex
from kvstore.stores.shm.extent_table import (
    Extent,
    ExtentTable,
    SeenObject,
    State,
    TableFullError,
)
from kvstore.stores.shm.mapped_memory import MappedMemory
from kvstore.stores.shm.writers import Writers
from kvstore.url import StoreLimits

__all__ = ["ArenaSpace", "whole_pages"]

_SIZES_PER_DOUBLING = 8
_SPARE_SHARE = 8  # spare memory is at most one part in so many of the bound
# Longest time from finding an object to the end of its copy, unless the reader is stopped.
_READ_NS = 2 * 10**9
_MAX_LET_GO_BYTES = 256 << 20  # returned to the system by one call, which others wait for
_TABLE_BYTES = 2 * mmap.PAGESIZE  # the next extent's cells may span two pages


class _NoTableMemoryError(StoreUnavailableError):
    """The file system has no memory for another extent's cells."""


class ArenaSpace(BoundedSpace[SeenObject]):
    """One process's access to an arena's extents. All calls need the arena's lock.

    Args:
        folder: the store's.
        limits: the URL's.
        table: the arena's table.
        memory: the arena's memory.
        writers: the arena's writers.
        counters: see `BoundedSpace`.
    """

    def __init__(
        self,
        folder: Path,
        limits: StoreLimits,
        table: ExtentTable,
        memory: MappedMemory,
        writers: Writers,
        counters: StoreCounters | None = None,
    ) -> None:
        super().__init__(folder, limits, counters)
        self._table, self._header = table, table.header
        self._memory, self._writers = memory, writers
        self._index = ExtentIndex(table)
        self._bound.update(self._own_bytes(), self._object_bytes())

    @property
    def _max_spare_bytes(self) -> int:
        return self.max_bytes // _SPARE_SHARE

    def begin(self) -> None:
        """Called first by each holder of the lock. It learns what other processes changed, and
        repairs the table if one of them died while it changed it.
        """
        if self._header.is_changing:
            self._table.recount()
        self._header.is_changing = True
        self._index.catch_up()

    def end(self) -> None:
        """Called last by each holder of the lock, but not after an unexpected error."""
        limit_bytes = min(self._max_spare_bytes, self.max_bytes - self._header.object_bytes)
        self._shrink_spare(limit_bytes)
        self._index.publish()
        self._header.is_changing = False

    def find(self, key: bytes) -> Extent | None:
        """Returns the extent of an object that has not expired; None if there is none."""
        extent = self._index.find(key)
        return extent if extent is not None and self._is_alive(extent) else None

    def touch(self, extent: Extent) -> None:
        """Makes an object the most recently touched."""
        extent.touched_ns = time.monotonic_ns()

    def reserve(self, num_bytes: int) -> Extent:
        """Reserves an extent for a new object, after room was made for it.

        Raises:
            OSError: the memory cannot grow.
            StoreUnavailableError: the table is full.
        """
        room = _room_for(num_bytes)
        extent = self._index.take_free(room) or self._add(room)
        self._header.spare_bytes -= extent.resident_bytes
        self._header.object_bytes += num_bytes
        extent.num_bytes, extent.writer = num_bytes, self._writers.own
        extent.state = State.WRITTEN_TO
        return extent

    def commit(self, extent: Extent, key: bytes) -> None:
        """Makes a written extent the key's object, unless another writer was first."""
        first = self._index.find(key)
        if first is not None and not self._is_alive(first):
            self._remove(first)
            first = None
        if first is not None:
            self.touch(first)
            self.free(extent)
            return
        self.touch(extent)
        extent.key = key
        extent.state = State.OBJECT
        self._index.note_object(extent, key)

    def remove(self, key: bytes) -> bool:
        """Removes an object; returns whether it was there and alive."""
        extent = self._index.find(key)
        return extent is not None and self._remove(extent)

    def free(self, extent: Extent) -> None:
        """Frees an extent that holds an object, or was reserved."""
        extent.generation += 1  # first, so that concurrent readers notice
        extent.state = State.FREE
        self._header.object_bytes -= extent.num_bytes
        self._header.spare_bytes += extent.resident_bytes
        self._index.note_free(extent)

    def give_back(self, num_bytes: int) -> None:
        """Returns so many bytes of spare memory to the file system, which has none left. Memory
        that may still be read is kept.
        """
        limit_bytes = max(0, self._header.spare_bytes - num_bytes)
        for extent in self._index.all_spare():
            if self._header.spare_bytes <= limit_bytes:
                return
            if not self._may_be_read(extent):
                self._let_go(extent)

    def _now_ns(self) -> int:
        return time.monotonic_ns()

    def _object_bytes(self) -> int:
        return self._header.object_bytes

    def _own_bytes(self) -> int:
        return self._header.object_bytes + self._header.spare_bytes

    def _find_objects(self) -> Iterator[SeenObject]:
        self._free_dead()
        return self._table.by_age()

    def _bytes_if_untouched(self, listed: SeenObject) -> int | None:
        extent = self._table[listed.extent_index]
        is_as_listed = extent.seen() == listed and extent.state == State.OBJECT
        return extent.num_bytes if is_as_listed else None

    def _evict(self, listed: SeenObject) -> None:
        extent = self._table[listed.extent_index]
        is_alive = self._is_alive(extent)
        self.free(extent)
        self.counters.count_removals(evictions=is_alive, expirations=not is_alive)

    def _expire(self, listed: SeenObject) -> None:
        self.free(self._table[listed.extent_index])
        self.counters.count_removals(expirations=1)

    def _is_alive(self, extent: Extent) -> bool:
        return time.monotonic_ns() - extent.touched_ns <= self._ttl_ns

    def _add(self, room: int) -> Extent:
        """Adds an extent. Other processes learn of it when an object lies there."""
        self._memory.grow_to(self._table.end + room)
        try:
            return self._try_to_add(room)
        except _NoTableMemoryError:
            self.give_back(_TABLE_BYTES)
            return self._try_to_add(room)

    def _try_to_add(self, room: int) -> Extent:
        """Adds an extent to the table; changes nothing if it fails."""
        try:
            return self._table.add(room)
        except TableFullError:
            raise StoreUnavailableError("the store has as many extents as it can have") from None
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise _NoTableMemoryError(
                f"disk full: the table of objects cannot grow: {error.strerror}"
            ) from error

    def _remove(self, extent: Extent) -> bool:
        """Removes an object that is not evicted; returns whether it was alive."""
        is_alive = self._is_alive(extent)
        self.free(extent)
        self.counters.count_removals(expirations=not is_alive)
        return is_alive

    def _shrink_spare(self, limit_bytes: int) -> None:
        """Returns spare memory above a limit to the system, the longest spare first.

        It stops at memory that may still be read, unless spare memory alone exceeds the bound.
        Every call does this, so what is kept now is returned later.
        """
        header, left_bytes = self._header, _MAX_LET_GO_BYTES
        while header.spare_bytes > limit_bytes and (extent := self._index.first_spare()):
            if self._may_be_read(extent) and header.spare_bytes <= self.max_bytes:
                return
            left_bytes -= extent.resident_bytes
            if left_bytes < 0 and extent.resident_bytes < _MAX_LET_GO_BYTES:
                return
            self._let_go(extent)

    def _let_go(self, extent: Extent) -> None:
        """Returns the memory of a free extent to the system."""
        num_bytes, extent.resident_bytes = extent.resident_bytes, 0
        self._header.spare_bytes -= num_bytes
        self._index.note_free(extent)
        self._memory.let_go(extent.offset, num_bytes)

    def _free_dead(self) -> None:
        """Frees extents that dead writers were writing to."""
        living = self._writers.living()
        for extent in self._table.in_state(State.WRITTEN_TO):
            if extent.writer in living or self._may_be_read(extent):
                continue
            extent.resident_bytes = 0  # how much memory it has is unknown
            self._memory.let_go(extent.offset, extent.room)
            self.free(extent)

    def _may_be_read(self, extent: Extent) -> bool:
        """Whether a reader may still be copying what lies or lay in an extent."""
        return time.monotonic_ns() - extent.touched_ns < _READ_NS


def whole_pages(num_bytes: int) -> int:
    """Rounds bytes up to whole pages."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


@lru_cache
def _room_for(num_bytes: int) -> int:
    """Returns the bytes of the smallest extent that holds such an object."""
    num_pages = max(1, whole_pages(num_bytes) // mmap.PAGESIZE)
    step = max(1, (1 << (num_pages.bit_length() - 1)) // _SIZES_PER_DOUBLING)
    return -(-num_pages // step) * step * mmap.PAGESIZE
