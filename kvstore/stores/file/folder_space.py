"""`FolderSpace`: the bound of an `ObjectFolder`, and what goes to keep it.

    folder/objects/ab/ab12…   an object; the name is its key in hex
    folder/temporary/…        a file reserved for a new object, locked by its writer
    folder/ledger             bytes in use, and the lock of whoever changes them

- Lock: names come and go only under the ledger's lock, so that two writers
  cannot both find a name free, and the ledger stays exact.
- Age: a file's modification time is its last touch.
- Bound: every writer reserves its bytes in the ledger first. When they would
  exceed the bound, the writer removes the oldest objects; see `BoundedSpace`.
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
import stat
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from uuid import uuid4

from kvstore.store import StoreUnavailableError
from kvstore.stores.bounded_space import BoundedSpace
from kvstore.stores.file.folder_listing import FoundObject, list_objects, list_unnamed
from kvstore.stores.file.space_ledger import SpaceLedger
from kvstore.stores.files import create_locked, status_of
from kvstore.url import StoreLimits

__all__ = ["FolderSpace", "ReservedFile"]


@dataclass(frozen=True, slots=True)
class ReservedFile:
    """A file of the full size of a new object; open and locked."""

    path: str
    fd: int
    num_bytes: int


class FolderSpace(BoundedSpace[FoundObject]):
    """One process's share in keeping a folder's bound. Methods raise `OSError` where the
    file system refuses.

    Args:
        folder: the folder, which exists.
        limits: as the URL says.

    Attributes:
        objects_folder: the folder of the objects' shards.
    """

    def __init__(self, folder: Path, limits: StoreLimits) -> None:
        self.objects_folder = str(folder / "objects")
        self._temporary_folder = str(folder / "temporary")
        self._make_folders()
        self._ledger = SpaceLedger(folder / "ledger", limits.timeout_s)
        own_prefix = f"{self._temporary_folder}/{uuid4().hex}"
        self._unnamed_paths = (f"{own_prefix}-{number}" for number in count())
        super().__init__(folder, limits, self._ledger.peek_object_bytes())
        with suppress(StoreUnavailableError), self._ledger.locked():
            self.list_objects()
            self.make_room(0)

    def _make_folders(self) -> None:
        shards = (f"{self.objects_folder}/{shard:02x}" for shard in range(256))
        for made in (self._temporary_folder, self.objects_folder, *shards):
            Path(made).mkdir(mode=0o700, exist_ok=True)

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
        """Holds the folder's lock, which all that changes it needs; see `SpaceLedger.locked`."""
        return self._ledger.locked()

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

    def _now_ns(self) -> int:
        return time.time_ns()

    def _object_bytes(self) -> int:
        return self._ledger.object_bytes

    def _find_objects(self) -> list[FoundObject]:
        """Corrects the ledger too."""
        objects = list_objects(self.objects_folder)
        self._ledger.object_bytes = sum(found.num_bytes for found in objects)
        self._sweep()
        return objects

    def _expire(self, listed: FoundObject) -> None:
        self.remove(listed.path)

    def _sweep(self) -> None:
        """Counts the unnamed files that are held; the others go."""
        for file in list_unnamed(self._temporary_folder):
            if file.is_held:
                self._ledger.object_bytes += file.num_bytes
            else:
                os.unlink(file.path)

    def _bytes_if_untouched(self, listed: FoundObject) -> int | None:
        status = status_of(listed.path)
        is_as_listed = status is not None and status.st_mtime_ns == listed.touched_ns
        return listed.num_bytes if is_as_listed else None

    def _evict(self, listed: FoundObject) -> None:
        """But not if it was touched after it was looked at: a touch needs no lock."""
        aside = next(self._unnamed_paths)
        os.rename(listed.path, aside)
        if os.lstat(aside).st_mtime_ns != listed.touched_ns:
            os.rename(aside, listed.path)
            return
        self._discard(aside, listed.num_bytes)
        is_expired = listed.touched_ns < time.time_ns() - self._ttl_ns
        self.counters.count_removals(evictions=not is_expired, expirations=is_expired)
