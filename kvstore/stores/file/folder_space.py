"""`FolderSpace`: the bound of a folder of objects, and what is removed to keep it.

    folder/objects/ab/ab12…   an object; the file name is its key in hex
    folder/temporary/…        a file reserved for a new object, locked by its writer
    folder/ledger             bytes in use; also the folder's lock (`SpaceLedger`)

- Lock: names are made and removed only under the ledger's lock, so that two writers
  cannot both find a name free, and the ledger stays exact.
- Age: a file's modification time is its last touch.
- Bound: every writer reserves its bytes in the ledger first. If they would exceed the
  bound, the writer removes the oldest objects; see `BoundedSpace`.
- Leases: a touch takes no lock, so it may come between a look at an object and its
  removal. So the object first loses its name, which makes touches fail, and gets it
  back if it was touched meanwhile.
- Readers: the memory of an object that is removed while it is read counts as free. It is
  free a moment later, when the last reader closes the file.
- Crashes: a writer holds `flock` on its temporary file. If the lock is free, the writer
  is dead, and the next listing removes the file.
"""
# ruff: noqa: PTH104, PTH108  paths are strings: making a `Path` costs as much as the call

import os
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from uuid import uuid4

from typing_extensions import override

from kvstore.store import StoreUnavailableError
from kvstore.stores.bounded_space import BoundedSpace
from kvstore.stores.file.folder_listing import FoundObject, list_objects, list_unnamed
from kvstore.stores.files import FileLock, create_locked, status_of
from kvstore.url import StoreLimits

__all__ = ["FolderSpace", "ReservedFile"]

_NUMBER = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class ReservedFile:
    """An open and locked file of the full size of a new object."""

    path: str
    fd: int
    num_bytes: int


class FolderSpace(BoundedSpace[FoundObject]):
    """One process's access to a bounded folder.

    Methods raise `OSError` if the file system refuses.

    Args:
        folder: the folder, which exists.
        limits: the URL's.

    Attributes:
        folder: the folder.
        objects_folder: the folder of the objects' shards.
    """

    def __init__(self, folder: Path, limits: StoreLimits) -> None:
        self.folder = folder
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
        """Returns the bytes in use; counts expired objects until a listing removes them."""
        return self._ledger.peek_object_bytes()

    def close(self) -> None:
        """Closes the ledger. Called once."""
        self._ledger.close()

    def locked(self) -> AbstractContextManager[None]:
        """Holds the folder's lock, which every change needs; see `FileLock.locked`."""
        return self._ledger.locked()

    def reserve(self, num_bytes: int) -> ReservedFile:
        """Makes a file for a new object, after room was made for it."""
        path = next(self._unnamed_paths)
        fd = create_locked(path, num_bytes)
        self._ledger.object_bytes += num_bytes
        return ReservedFile(path, fd, num_bytes)

    def commit(self, reserved: ReservedFile, path: str) -> bool:
        """Makes a written file an object; returns False if another writer was first."""
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
        """Removes a reserved file, unless it became an object."""
        with suppress(FileNotFoundError):
            os.unlink(reserved.path)
            self._ledger.object_bytes -= reserved.num_bytes

    def remove(self, path: str) -> bool:
        """Removes an object; returns whether it was there and alive."""
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
        """Removes the renamed file of an object."""
        os.unlink(path)
        self._ledger.object_bytes -= num_bytes

    @override
    def _now_ns(self) -> int:
        return time.time_ns()

    @override
    def _object_bytes(self) -> int:
        return self._ledger.object_bytes

    @override
    def _find_objects(self) -> list[FoundObject]:
        """Corrects the ledger, too."""
        objects = list_objects(self.objects_folder)
        self._ledger.object_bytes = sum(found.num_bytes for found in objects)
        self._sweep()
        return objects

    @override
    def _expire(self, listed: FoundObject) -> None:
        self.remove(listed.path)

    def _sweep(self) -> None:
        """Counts the reserved files of living writers; removes those of dead ones."""
        for file in list_unnamed(self._temporary_folder):
            if file.is_held:
                self._ledger.object_bytes += file.num_bytes
            else:
                os.unlink(file.path)

    @override
    def _bytes_if_untouched(self, listed: FoundObject) -> int | None:
        status = status_of(listed.path)
        is_as_listed = status is not None and status.st_mtime_ns == listed.touched_ns
        return listed.num_bytes if is_as_listed else None

    @override
    def _evict(self, listed: FoundObject) -> None:
        """Keeps the object if it was touched since it was looked at: a touch needs no lock."""
        aside = next(self._unnamed_paths)
        os.rename(listed.path, aside)
        if os.lstat(aside).st_mtime_ns != listed.touched_ns:
            os.rename(aside, listed.path)
            return
        self._discard(aside, listed.num_bytes)
        is_expired = listed.touched_ns < time.time_ns() - self._ttl_ns
        self.counters.count_removals(evictions=not is_expired, expirations=is_expired)


class SpaceLedger:
    """How many bytes a folder's objects take, in a small file that is also the folder's lock.

    The number is little-endian and changes only under an exclusive `flock`, so that all writers
    together keep to one bound without listing the folder. A crash can leave it wrong; the next
    listing corrects it.

    Args:
        path: the ledger's file; made if absent.
        timeout_s: longest that `locked` waits.

    Attributes:
        object_bytes: bytes of objects, including those being written. Read and changed only under
            `locked`, which writes it to the file at its end.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._lock = FileLock(path, timeout_s)
        self.object_bytes = 0

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the folder's lock; see `FileLock.locked`."""
        with self._lock.locked():
            self.object_bytes = self.peek_object_bytes()
            try:
                yield
            finally:
                number = _NUMBER.pack(max(0, self.object_bytes))
                os.pwrite(self._lock.fd, number, 0)

    def peek_object_bytes(self) -> int:
        """Returns the number in the file, 0 if a crash left less than a number; needs no lock."""
        written = os.pread(self._lock.fd, _NUMBER.size, 0)
        number: int = _NUMBER.unpack(written.ljust(_NUMBER.size, b"\0"))[0]
        return number

    def close(self) -> None:
        """Closes the file, after the lock was released."""
        self._lock.close()
