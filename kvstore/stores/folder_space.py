"""`FolderSpace`: the bound of an `ObjectFolder`, and what goes to keep it.

    folder/objects/ab/ab12…   an object; the name is its key in hex
    folder/temporary/…        a file that is reserved for a new object, locked by its writer
    folder/ledger             bytes in use, and the lock of whoever changes them

- Lock: names come and go only under the ledger's lock, so that two writers
  cannot both find a name free, and the ledger stays exact.
- Age: a file's modification time is its last touch.
- Bound: every writer reserves its bytes in the ledger first. When they would
  exceed the bound, the writer lists the folder and removes the oldest objects
  down to 7/8 of it, so one listing pays for an eighth of the store.
- Leases: no lock keeps a touch from coming between the listing and the
  removal. So an object first loses its name, which makes touches fail, and gets
  it back if it was touched meanwhile.
- Crashes: a writer holds `flock` on its temporary file. One that nobody holds
  is a dead writer's, and the next listing removes it.
"""
# ruff: noqa: PTH104, PTH108  paths are strings: making a `Path` costs as much as the call

import fcntl
import os
import shutil
import stat
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from kvstore.store import StoreUnavailableError
from kvstore.stores.counters import StoreCounters
from kvstore.stores.file_io import status_of
from kvstore.stores.folder_listing import FoundObject, list_objects, sweep_temporary_files
from kvstore.stores.space_ledger import SpaceLedger

__all__ = ["FolderSpace", "ReservedFile"]

_CREATE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


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
        oldest_age_s: seconds since the oldest object was touched, as of the last listing;
            None where it found none.
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
        self.counters = StoreCounters(sees_removals=True)
        self.objects_folder = str(folder / "objects")
        self.oldest_age_s: float | None = None
        self._ttl_ns = int(ttl_s * 1e9)
        self._lease_ns = int(lease_s * 1e9)
        self._temporary_folder = str(folder / "temporary")
        self._make_folders()
        self._ledger = SpaceLedger(folder / "ledger", timeout_s)
        self.max_bytes = max_bytes or self._choose_max_bytes(folder, default_max_bytes)
        with suppress(StoreUnavailableError), self._ledger.locked():
            self._clean_up(0)

    def _make_folders(self) -> None:
        shards = (f"{self.objects_folder}/{shard:02x}" for shard in range(256))
        for made in (self._temporary_folder, self.objects_folder, *shards):
            Path(made).mkdir(mode=0o700, exist_ok=True)

    def _choose_max_bytes(self, folder: Path, default_max_bytes: int) -> int:
        """Counts what the folder holds already as free, so that every opener agrees."""
        disk = shutil.disk_usage(folder)
        own_bytes = min(self._ledger.read(), disk.used)
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
        return self._ledger.read()

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
        if self._ledger.read() + num_bytes > self.max_bytes:
            self._clean_up(num_bytes)

    def reserve(self, num_bytes: int) -> ReservedFile:
        """Makes a file for a new object, after room was made for it."""
        path = f"{self._temporary_folder}/{uuid4().hex}"
        reserved = ReservedFile(path, os.open(path, _CREATE_FLAGS, 0o600), num_bytes)
        self._ledger.add(num_bytes)
        try:
            fcntl.flock(reserved.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(reserved.fd, num_bytes)
        except OSError:
            os.close(reserved.fd)
            self.give_back(reserved)
            raise
        return reserved

    def give_back(self, reserved: ReservedFile) -> None:
        """Undoes a reservation, unless the file became an object."""
        with suppress(FileNotFoundError):
            os.unlink(reserved.path)
            self._ledger.add(-reserved.num_bytes)

    def remove(self, path: str) -> bool:
        """Removes an object; whether it was there and alive."""
        status = status_of(path)
        if status is None or not stat.S_ISREG(status.st_mode):
            return False
        os.unlink(path)
        self._ledger.add(-status.st_size)
        is_alive = self.is_alive(status)
        self.counters.count_removals(expirations=not is_alive)
        return is_alive

    def _clean_up(self, num_bytes: int) -> None:
        """Lists the folder, corrects the ledger, removes what is dead; evicts if that is
        not enough for `num_bytes` more.
        """
        objects = list_objects(self.objects_folder)
        used_bytes = sum(found.num_bytes for found in objects)
        self._ledger.write(used_bytes + sweep_temporary_files(self._temporary_folder))
        now_ns = time.time_ns()
        num_expired = sum(found.touched_ns < now_ns - self._ttl_ns for found in objects)
        for found in objects[:num_expired]:
            self.remove(found.path)
        alive = objects[num_expired:]
        if self._ledger.read() + num_bytes > self.max_bytes:
            unleased = [found for found in alive if found.touched_ns <= now_ns - self._lease_ns]
            alive = alive[self._evict(unleased, num_bytes) :]
        self.oldest_age_s = (now_ns - alive[0].touched_ns) / 1e9 if alive else None

    def _evict(self, unleased: Sequence[FoundObject], num_bytes: int) -> int:
        """Removes the oldest until an eighth of the bound is free behind `num_bytes`; how many
        were looked at.
        """
        num_seen = 0
        kept_bytes = self._ledger.read() - sum(found.num_bytes for found in unleased)
        if kept_bytes + num_bytes <= self.max_bytes:
            goal_bytes = max(0, self.max_bytes * 7 // 8 - num_bytes)
            while num_seen < len(unleased) and self._ledger.read() > goal_bytes:
                self._remove_unless_touched(unleased[num_seen])
                num_seen += 1
        if self._ledger.read() + num_bytes > self.max_bytes:
            raise StoreUnavailableError(
                f"no room for {num_bytes} bytes: the store is full of leased objects"
            )
        return num_seen

    def _remove_unless_touched(self, found: FoundObject) -> None:
        """Evicts an object, but not if it was touched after it was found."""
        aside = f"{self._temporary_folder}/{uuid4().hex}"
        os.rename(found.path, aside)
        if os.lstat(aside).st_mtime_ns != found.touched_ns:
            os.rename(aside, found.path)
            return
        os.unlink(aside)
        self._ledger.add(-found.num_bytes)
        self.counters.count_removals(evictions=1)
