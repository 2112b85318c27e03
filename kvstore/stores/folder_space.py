"""`FolderSpace`: the bound of an `ObjectFolder`, and what goes to keep it.

    folder/objects/ab/ab12…   an object; the name is its key in hex
    folder/temporary/…        a file reserved for a new object, locked by its writer
    folder/ledger             bytes in use, and the lock of whoever changes them

- Lock: names come and go only under the ledger's lock, so that two writers
  cannot both find a name free, and the ledger stays exact.
- Age: a file's modification time is its last touch.
- Bound: every writer reserves its bytes in the ledger first. When they would
  exceed the bound, the writer removes the oldest objects. It knows them from a
  listing of the folder, which serves until none of it is left: whatever was
  touched or made after it is younger.
- Leases: no lock keeps a touch from coming between a look at an object and its
  removal. So it first loses its name, which makes touches fail, and gets it back
  if it was touched meanwhile.
- Readers: the memory of an object that is removed while it is read counts as
  free. It is so a moment later, when the last reader closes it.
- Crashes: a writer holds `flock` on its temporary file. One that nobody holds
  is a dead writer's, and the next listing removes it.
"""
# ruff: noqa: PTH104, PTH108  paths are strings: making a `Path` costs as much as the call

import os
import shutil
import stat
import time
from collections import deque
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from uuid import uuid4

from kvstore.store import StoreUnavailableError
from kvstore.stores.counters import StoreCounters
from kvstore.stores.file_io import create_locked, status_of
from kvstore.stores.folder_listing import FoundObject, list_objects, list_unnamed
from kvstore.stores.space_ledger import SpaceLedger

__all__ = ["FolderSpace", "ReservedFile"]


@dataclass(frozen=True, slots=True)
class ReservedFile:
    """A file of the full size of a new object; open and locked."""

    path: str
    fd: int
    num_bytes: int


class FolderSpace:
    """One process's share in keeping a folder's bound. Methods raise `OSError` where the
    file system refuses.

    Args:
        folder: the folder, which exists.
        ttl_s: life of an object from its last touch.
        lease_s: of it, what eviction spares.
        max_bytes: bound of all objects together; None means half of what the
            file system has left for them, but not over `default_max_bytes`.
        default_max_bytes: see `max_bytes`.
        timeout_s: how long to wait for the folder's lock.

    Attributes:
        counters: where removals are counted.
        objects_folder: the folder of the objects' shards.
        max_bytes: as chosen.
        oldest_age_s: seconds since the oldest object was touched, as of the last listing or
            eviction; None where no older one was known.
    """

    def __init__(
        self,
        folder: Path,
        *,
        ttl_s: float,
        lease_s: float,
        max_bytes: int | None,
        default_max_bytes: int,
        timeout_s: float,
    ) -> None:
        self.ttl_s = ttl_s
        self.lease_s = lease_s
        self.timeout_s = timeout_s
        self.counters = StoreCounters(sees_removals=True)
        self.objects_folder = str(folder / "objects")
        self.oldest_age_s: float | None = None
        self._by_age: deque[FoundObject] = deque()
        self._ttl_ns = int(ttl_s * 1e9)
        self._lease_ns = int(lease_s * 1e9)
        self._temporary_folder = str(folder / "temporary")
        self._make_folders()
        self._ledger = SpaceLedger(folder / "ledger", timeout_s)
        own_prefix = f"{self._temporary_folder}/{uuid4().hex}"
        self._unnamed_paths = (f"{own_prefix}-{number}" for number in count())
        self.max_bytes = max_bytes or self._choose_max_bytes(folder, default_max_bytes)
        with suppress(StoreUnavailableError), self._ledger.locked():
            self._list()
            self.make_room(0)

    def _make_folders(self) -> None:
        shards = (f"{self.objects_folder}/{shard:02x}" for shard in range(256))
        for made in (self._temporary_folder, self.objects_folder, *shards):
            Path(made).mkdir(mode=0o700, exist_ok=True)

    def _choose_max_bytes(self, folder: Path, default_max_bytes: int) -> int:
        """Counts what the folder holds already as free, so that every opener agrees."""
        disk = shutil.disk_usage(folder)
        own_bytes = min(self._ledger.peek_object_bytes(), disk.used)
        return min(default_max_bytes, (disk.free + own_bytes) // 2)

    def is_alive(self, status: os.stat_result | None) -> bool:
        """Whether a file is an object whose TTL is not over."""
        return (
            status is not None
            and stat.S_ISREG(status.st_mode)
            and time.time_ns() - status.st_mtime_ns <= self._ttl_ns
        )

    def num_bytes(self) -> int:
        """Bytes in use; counts expired objects until a listing removes them."""
        return self._ledger.peek_object_bytes()

    def close(self) -> None:
        """Closes the ledger. Once."""
        self._ledger.close()

    def locked(self) -> AbstractContextManager[None]:
        """Holds the folder's lock, which all methods below need; see `SpaceLedger.locked`."""
        return self._ledger.locked()

    def make_room(self, num_bytes: int) -> None:
        """Lets `num_bytes` more fit the bound.

        Raises:
            StoreUnavailableError: leased objects leave too little room; none was evicted.
        """
        while self._ledger.object_bytes + num_bytes > self.max_bytes:
            chosen = self._choose_evicted(num_bytes)
            if chosen is None:
                self._list()
                chosen = self._choose_evicted(num_bytes)
            if chosen is None:
                raise StoreUnavailableError(
                    f"no room for {num_bytes} bytes: the store is full of leased objects"
                )
            for found in chosen:
                self._remove_unless_touched(found)
            self._note_oldest_age()

    def reserve(self, num_bytes: int) -> ReservedFile:
        """Makes a file for a new object, after room was made for it."""
        path = next(self._unnamed_paths)
        fd = create_locked(path, num_bytes)
        self._ledger.object_bytes += num_bytes
        return ReservedFile(path, fd, num_bytes)

    def commit(self, reserved: ReservedFile, path: str) -> bool:
        """Makes a written file an object; False if another writer was first."""
        status = status_of(path)
        if status is not None and not self.is_alive(status):
            self.remove(path)
            status = status_of(path)
        if status is not None:
            self.give_back(reserved)
            return False
        os.rename(reserved.path, path)
        return True

    def give_back(self, reserved: ReservedFile) -> None:
        """Undoes a reservation, unless the file became an object."""
        with suppress(FileNotFoundError):
            os.unlink(reserved.path)
            self._ledger.object_bytes -= reserved.num_bytes

    def remove(self, path: str) -> bool:
        """Removes an object; whether it was there and alive."""
        status = status_of(path)
        if status is None or not stat.S_ISREG(status.st_mode):
            return False
        aside = next(self._unnamed_paths)
        os.rename(path, aside)
        self._discard(aside, status.st_size)
        is_alive = self.is_alive(status)
        self.counters.count_removals(expirations=not is_alive)
        return is_alive

    def _discard(self, path: str, num_bytes: int) -> None:
        """Removes the file that an object left."""
        os.unlink(path)
        self._ledger.object_bytes -= num_bytes

    def _list(self) -> None:
        """Learns what the folder holds, corrects the ledger and removes what is dead."""
        objects = list_objects(self.objects_folder)
        self._ledger.object_bytes = sum(found.num_bytes for found in objects)
        self._sweep()
        first_expired_ns = time.time_ns() - self._ttl_ns
        num_expired = sum(found.touched_ns < first_expired_ns for found in objects)
        for found in objects[:num_expired]:
            self.remove(found.path)
        self._by_age = deque(objects[num_expired:])
        self._note_oldest_age()

    def _note_oldest_age(self) -> None:
        oldest = self._by_age[0] if self._by_age else None
        self.oldest_age_s = (time.time_ns() - oldest.touched_ns) / 1e9 if oldest else None

    def _sweep(self) -> None:
        """Counts the unnamed files that are held; the others go."""
        for file in list_unnamed(self._temporary_folder):
            if file.is_held:
                self._ledger.object_bytes += file.num_bytes
            else:
                os.unlink(file.path)

    def _choose_evicted(self, num_bytes: int) -> list[FoundObject] | None:
        """The oldest known objects without which `num_bytes` more fit the bound; None if those
        that are not leased do not suffice.
        """
        chosen: list[FoundObject] = []
        excess_bytes = self._ledger.object_bytes + num_bytes - self.max_bytes
        first_leased_ns = time.time_ns() - self._lease_ns
        while excess_bytes > 0:
            if not self._by_age or self._by_age[0].touched_ns > first_leased_ns:
                self._by_age.extendleft(reversed(chosen))
                return None
            found = self._by_age.popleft()
            status = status_of(found.path)
            if status is not None and status.st_mtime_ns == found.touched_ns:
                chosen.append(found)
                excess_bytes -= found.num_bytes
        return chosen

    def _remove_unless_touched(self, found: FoundObject) -> None:
        """Evicts an object, but not if it was touched after it was found."""
        aside = next(self._unnamed_paths)
        os.rename(found.path, aside)
        if os.lstat(aside).st_mtime_ns != found.touched_ns:
            os.rename(aside, found.path)
            return
        self._discard(aside, found.num_bytes)
        is_expired = found.touched_ns < time.time_ns() - self._ttl_ns
        self.counters.count_removals(evictions=not is_expired, expirations=is_expired)
