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
- Removal: a cleaner or a logout may remove the folder, and a volume may be mounted over it. The
  holder of the lock checks that the ledger's path still leads to the file that it has locked.
  No file stays open between calls, so a disk can be unmounted and mounted read-only meanwhile.
- Without the right to write: if the folder is there, its objects can be read, and touching them is
  left out.
- Crashes: a writer holds `flock` on its temporary file. If the lock is free, the writer
  is dead, and the next listing removes the file.
"""
# ruff: noqa: PTH104, PTH108  paths are strings: making a `Path` costs as much as the call

import errno
import os
import stat
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from uuid import uuid4

from typing_extensions import override

from kvstore.store import StoreUnavailableError
from kvstore.stores.base import StoreCounters
from kvstore.stores.bounded_space import BoundedSpace
from kvstore.stores.file.folder_listing import FolderClock, FoundObject, list_objects, list_unnamed
from kvstore.stores.file.space_ledger import ReadOnlyLedger, SpaceLedger
from kvstore.stores.files import create_locked, status_of, touch_if_allowed
from kvstore.stores.folders import MadeFolders, why_not_private
from kvstore.stores.refusals import NO_SPACE, explain
from kvstore.url import StoreLimits

__all__ = ["FolderSpace", "ReservedFile"]

_WRITING_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM, *NO_SPACE)


@dataclass(frozen=True, slots=True)
class ReservedFile:
    """An open and locked file of the full size of a new object."""

    path: str
    fd: int
    num_bytes: int


class FolderSpace(BoundedSpace[FoundObject]):
    """One process's access to a bounded folder.

    Methods raise `OSError` if the file system refuses, and `OutdatedFilesError` if the folder was
    replaced, or was opened without the right to write.

    Args:
        folder: the folder; made if absent.
        limits: the URL's.
        clock: the folder's.
        counters: see `BoundedSpace`.

    Attributes:
        objects_folder: the folder of the objects' shards.
        clock: see above.

    Raises:
        OSError: the folder can neither be written to nor read.
        StoreUnavailableError: another user may have put something into it.
    """

    def __init__(
        self,
        folder: Path,
        limits: StoreLimits,
        clock: FolderClock,
        counters: StoreCounters | None = None,
    ) -> None:
        self.objects_folder = str(folder / "objects")
        self._temporary_folder = str(folder / "temporary")
        self.clock = clock
        self._made = MadeFolders()
        self._ledger_path = folder / "ledger"
        self._ledger = self._open_ledger(folder, self._ledger_path, limits)
        own_prefix = f"{self._temporary_folder}/{uuid4().hex}"
        self._unnamed_paths = (f"{own_prefix}-{number}" for number in count())
        super().__init__(folder, limits, counters)
        self._bound.update(self.num_bytes(), self.num_bytes())
        # What keeps this from it will be the error of the next put; reads need none of it.
        with suppress(StoreUnavailableError, OSError), self.locked():
            self.remove_outdated()

    def _open_ledger(
        self, folder: Path, path: Path, limits: StoreLimits
    ) -> SpaceLedger | ReadOnlyLedger:
        try:
            self._make_folders(folder)
            return SpaceLedger(path, limits.timeout_s)
        except OSError as error:
            self._made.remove()
            objects = Path(self.objects_folder)
            if error.errno not in _WRITING_REFUSED or not objects.is_dir():
                raise
            _check_private(objects)
            return ReadOnlyLedger(explain(error, folder))
        except StoreUnavailableError:
            self._made.remove()
            raise

    def _make_folders(self, folder: Path) -> None:
        # The folder itself may be a volume's root, which belongs to root.
        self._made.make(folder)
        for name in (self.objects_folder, self._temporary_folder):
            self._made.make(Path(name))
            _check_private(Path(name))
        for shard in range(256):
            self._made.make(Path(f"{self.objects_folder}/{shard:02x}"))

    def is_alive(self, status: os.stat_result | None) -> bool:
        """Whether a file is an object whose TTL is not over."""
        return (
            status is not None
            and stat.S_ISREG(status.st_mode)
            and self.clock.now_ns() - status.st_mtime_ns <= self._ttl_ns
        )

    def touch(self, path: str) -> bool:
        """Touches an object, if that is allowed; returns False if it does not exist."""
        return touch_if_allowed(path, self.clock.now_ns())

    def num_bytes(self) -> int:
        """Returns the bytes in use; counts expired objects until a listing removes them."""
        return self._ledger.peek_object_bytes()

    def close(self) -> None:
        """Removes what a diagnosis has made: other users could not use it."""
        if self._is_diagnosis and Path(self.objects_folder) in self._made.made:
            self._ledger_path.unlink(missing_ok=True)
            self._made.remove()

    def locked(self) -> AbstractContextManager[None]:
        """Holds the folder's lock, which every change needs; see `FileLock.locked`."""
        return self._ledger.locked(self.clock)

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
        return self.clock.now_ns()

    @override
    def _object_bytes(self) -> int:
        return self._ledger.object_bytes

    @override
    def _find_objects(self) -> list[FoundObject]:
        """Corrects the ledger, too.

        After the clock was set back, objects seem to have been touched in the future, and would be
        neither evicted nor expired until then. These are touched now.
        """
        objects = list_objects(self.objects_folder)
        now_ns = self.clock.now_ns()
        if objects and objects[-1].touched_ns > now_ns:
            self.clock.note_touch(objects[-1].touched_ns)
            objects = sorted(self._touched_by(now_ns, file) for file in objects)
        self._ledger.object_bytes = sum(file.num_bytes for file in objects)
        self._sweep()
        return objects

    def _touched_by(self, now_ns: int, file: FoundObject) -> FoundObject:
        """Touches an object of the future; returns it with its new time."""
        if file.touched_ns <= now_ns or not touch_if_allowed(file.path, now_ns):
            return file
        status = status_of(file.path)
        return file if status is None else replace(file, touched_ns=status.st_mtime_ns)

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
        is_expired = listed.touched_ns < self.clock.now_ns() - self._ttl_ns
        self.counters.count_removals(evictions=not is_expired, expirations=is_expired)


def _check_private(folder: Path) -> None:
    """Checks that only this user, or the group that shares a folder, can have filled it.

    Raises:
        StoreUnavailableError: others can have.
    """
    reason = why_not_private(folder, shares_group=True)
    if reason:
        raise StoreUnavailableError(reason)
