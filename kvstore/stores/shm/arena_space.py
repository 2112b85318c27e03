"""`ArenaSpace`: which extents an arena's objects have, its bound, and what goes to keep it."""

import mmap
import shutil
import time
from collections import deque
from pathlib import Path

from kvstore.store import StoreUnavailableError
from kvstore.stores.counters import StoreCounters
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

__all__ = ["ArenaSpace", "choose_max_bytes", "whole_pages"]

_SIZES_PER_DOUBLING = 8
_SPARE_SHARE = 8  # of the bound, one part in so many
# Longest that a reader takes from finding an object to having it, unless it is stopped.
_READ_NS = 2 * 10**9
_MAX_LET_GO_BYTES = 256 << 20  # by one call, which others wait for


class ArenaSpace:
    """One process's share in keeping an arena's bound. All calls need the arena's lock.

    Args:
        table: the arena's.
        memory: likewise.
        writers: likewise.
        ttl_s: life of an object from its last touch.
        lease_s: of it, what eviction spares.
        max_bytes: bound of all objects together.

    Attributes:
        counters: where removals are counted.
        oldest_age_s: seconds since the oldest object was touched, as of the last listing or
            eviction; None where no older one was known.
    """

    def __init__(
        self,
        table: ExtentTable,
        memory: MappedMemory,
        writers: Writers,
        *,
        ttl_s: float,
        lease_s: float,
        max_bytes: int,
    ) -> None:
        self.counters = StoreCounters(sees_removals=True)
        self.oldest_age_s: float | None = None
        self._table, self._memory, self._writers = table, memory, writers
        self._index = ExtentIndex(table)
        self._ttl_ns, self._lease_ns = int(ttl_s * 1e9), int(lease_s * 1e9)
        self._max_bytes, self._max_spare_bytes = max_bytes, max_bytes // _SPARE_SHARE
        self._by_age: deque[SeenObject] = deque()

    def begin(self) -> None:
        """To be called first by who got the lock: learns what others did, and mends what somebody
        did not get to the end of.
        """
        if self._table.is_changing:
            self._table.recount()
        self._table.is_changing = True
        self._index.catch_up()

    def end(self) -> None:
        """To be called last, unless something went wrong that nobody foresaw."""
        self._shrink_spare()
        self._table.is_changing = False

    def find(self, key: bytes) -> Extent | None:
        """The extent of an object that lives."""
        extent = self._index.find(key)
        return extent if extent is not None and self._is_alive(extent) else None

    def touch(self, extent: Extent) -> None:
        """Makes an object the youngest."""
        extent.touched_ns = time.monotonic_ns()

    def reserve(self, num_bytes: int) -> Extent:
        """Takes an extent for a new object, after room was made for it.

        Raises:
            OSError: the memory cannot grow.
            StoreUnavailableError: there are too many extents.
        """
        extent = self._find_free(_room_for(num_bytes))
        self._table.spare_bytes -= extent.resident_bytes
        self._table.object_bytes += num_bytes
        extent.num_bytes, extent.writer = num_bytes, self._writers.own
        extent.state = State.WRITTEN_TO
        self._index.note_change(extent)
        return extent

    def commit(self, extent: Extent, key: bytes) -> None:
        """Makes what was written the key's object, unless another writer was first."""
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
        self._index.note_change(extent)

    def remove(self, key: bytes) -> bool:
        """Removes an object; whether it was there and alive."""
        extent = self._index.find(key)
        return extent is not None and self._remove(extent)

    def free(self, extent: Extent) -> None:
        """Frees the extent of an object, or of one that was being written."""
        extent.generation += 1  # first: who is reading it must see
        extent.state = State.FREE
        self._table.object_bytes -= extent.num_bytes
        self._table.spare_bytes += extent.resident_bytes
        self._index.note_change(extent)

    def make_room(self, num_bytes: int) -> None:
        """Lets `num_bytes` more fit the bound.

        Raises:
            StoreUnavailableError: leased objects leave too little room; none was evicted.
        """
        while self._table.object_bytes + num_bytes > self._max_bytes:
            chosen = self._choose_evicted(num_bytes)
            if chosen is None:
                self.list_objects()
                chosen = self._choose_evicted(num_bytes)
            if chosen is None:
                raise StoreUnavailableError(
                    f"no room for {num_bytes} bytes: the store is full of leased objects"
                )
            for extent in chosen:
                is_alive = self._is_alive(extent)
                self.free(extent)
                self.counters.count_removals(evictions=is_alive, expirations=not is_alive)
            self._note_oldest_age()

    def list_objects(self) -> None:
        """Learns the objects' ages, and removes what is dead."""
        living = self._writers.living()
        for extent in self._table.in_state(State.WRITTEN_TO):
            if extent.writer not in living and not self._may_be_read(extent):
                self._free_dead(extent)
        self._by_age = deque(self._table.by_age())
        first_alive_ns = time.monotonic_ns() - self._ttl_ns
        while self._by_age and self._by_age[0].touched_ns < first_alive_ns:
            self.free(self._table[self._by_age.popleft().extent_index])
            self.counters.count_removals(expirations=1)
        self._note_oldest_age()

    def _is_alive(self, extent: Extent) -> bool:
        return time.monotonic_ns() - extent.touched_ns <= self._ttl_ns

    def _find_free(self, room: int) -> Extent:
        extent = self._index.find_free(room)
        if extent is not None:
            return extent
        self._memory.grow_to(self._table.end + room)
        try:
            return self._table.add(room)
        except TableFullError:
            raise StoreUnavailableError("the store has as many extents as it can have") from None

    def _remove(self, extent: Extent) -> bool:
        """Removes an object, not to make room; whether it was alive."""
        is_alive = self._is_alive(extent)
        self.free(extent)
        self.counters.count_removals(expirations=not is_alive)
        return is_alive

    def _free_dead(self, extent: Extent) -> None:
        """Frees what a dead writer had; nobody knows how much of it has memory behind it."""
        extent.resident_bytes = 0
        self._memory.let_go(extent.offset, extent.room)
        self.free(extent)

    def _shrink_spare(self) -> None:
        """Gives memory back of which more is spare than should be, where nobody still reads; or
        of which as much is spare as objects may take.
        """
        table, left_bytes = self._table, _MAX_LET_GO_BYTES
        limit_bytes = min(self._max_spare_bytes, self._max_bytes - table.object_bytes)
        while table.spare_bytes > limit_bytes and (extent := self._index.first_spare()):
            if self._may_be_read(extent) and table.spare_bytes <= self._max_bytes:
                return
            num_bytes = extent.resident_bytes
            left_bytes -= num_bytes
            if left_bytes < 0 and num_bytes < _MAX_LET_GO_BYTES:
                return
            extent.resident_bytes = 0
            table.spare_bytes -= num_bytes
            self._index.note_change(extent)
            self._memory.let_go(extent.offset, num_bytes)

    def _may_be_read(self, extent: Extent) -> bool:
        """Whether somebody may still be at what lay there, with or without a name."""
        return time.monotonic_ns() - extent.touched_ns < _READ_NS

    def _choose_evicted(self, num_bytes: int) -> list[Extent] | None:
        """The oldest known objects without which `num_bytes` more fit the bound; None if those
        that are not leased do not suffice.
        """
        chosen: list[SeenObject] = []
        table = self._table
        excess_bytes = table.object_bytes + num_bytes - self._max_bytes
        first_leased_ns = time.monotonic_ns() - self._lease_ns
        while excess_bytes > 0:
            if not self._by_age or self._by_age[0].touched_ns > first_leased_ns:
                self._by_age.extendleft(reversed(chosen))
                return None
            seen = self._by_age.popleft()
            extent = table[seen.extent_index]
            if extent.seen() == seen and extent.state == State.OBJECT:
                chosen.append(seen)
                excess_bytes -= extent.num_bytes
        return [table[seen.extent_index] for seen in chosen]

    def _note_oldest_age(self) -> None:
        now_ns = time.monotonic_ns()
        oldest = self._by_age[0] if self._by_age else None
        self.oldest_age_s = (now_ns - oldest.touched_ns) / 1e9 if oldest else None


def choose_max_bytes(folder: Path, table: ExtentTable, default_max_bytes: int) -> int:
    """A bound for who named none: half of what the file system has left, but not over the
    default. What the store holds already counts as free, so that every opener agrees.
    """
    disk = shutil.disk_usage(folder)
    own_bytes = min(table.object_bytes + table.spare_bytes, disk.used)
    return min(default_max_bytes, (disk.free + own_bytes) // 2)


def whole_pages(num_bytes: int) -> int:
    """Bytes of the pages that so many bytes take."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _room_for(num_bytes: int) -> int:
    """Bytes of the smallest extent that such an object fits."""
    num_pages = max(1, whole_pages(num_bytes) // mmap.PAGESIZE)
    step = max(1, (1 << (num_pages.bit_length() - 1)) // _SIZES_PER_DOUBLING)
    return -(-num_pages // step) * step * mmap.PAGESIZE
