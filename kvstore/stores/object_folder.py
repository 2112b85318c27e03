"""`ObjectFolder`: immutable objects as files of one folder that processes share.

    folder/objects/ab/ab12…   an object; the name is its key in hex
    folder/temporary/…        an object being written, locked by its writer
    folder/ledger             bytes in use, and the lock of whoever changes them

- Commit: an object is written whole under a temporary name and then renamed
  to its own, unless that exists. So it appears whole or not at all, and is
  never replaced. There is no fsync: after a power cut the codec's digest
  refuses what was torn.
- Lock: names come and go only under the ledger's lock, so that two writers
  cannot both find a name free, and the ledger stays exact. Bytes are written
  and read without it.
- Age: a file's modification time is its last touch.
- Bound: every writer reserves its bytes in the ledger first. When they would
  exceed the bound, the writer lists the folder and removes the oldest objects
  down to 7/8 of it, so one listing pays for an eighth of the store.
- Crashes: a writer holds `flock` on its temporary file. One that nobody holds
  is a dead writer's, and the next listing removes it.

What is not a regular file of the right name is never read; what is foreign in
the folder is left alone.
"""

import errno
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from kvstore.store import GetStatus, StoreUnavailableError
from kvstore.stores.file_io import read_all, status_of, touch, write_all
from kvstore.stores.space_ledger import SpaceLedger

__all__ = ["ObjectFolder"]

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_SWEEP_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_NOT_AN_OBJECT = (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EACCES)


@dataclass(frozen=True, slots=True)
class _FoundObject:
    """One object as a listing of the folder saw it."""

    touched_ns: int
    num_bytes: int
    path: Path


class ObjectFolder:
    """One process's access to the folder. Thread-safe; methods raise `OSError`
    where the file system refuses, `StoreUnavailableError` as `SpaceLedger` says.

    Args:
        folder: the folder, which exists.
        ttl_s: life of an object from its last touch.
        max_bytes: bound of all objects together; None means half of what the
            file system has left for them, but not over `default_max_bytes`.
        default_max_bytes: see `max_bytes`.
        timeout_s: how long to wait for the folder's lock.
    """

    def __init__(
        self,
        folder: Path,
        *,
        ttl_s: float,
        max_bytes: int | None,
        default_max_bytes: int,
        timeout_s: float,
    ) -> None:
        self._ttl_ns = int(ttl_s * 1e9)
        self._objects_folder = folder / "objects"
        self._temporary_folder = folder / "temporary"
        self._make_folders()
        self._ledger = SpaceLedger(folder / "ledger", timeout_s)
        self._max_bytes = max_bytes or self._choose_max_bytes(folder, default_max_bytes)
        with suppress(StoreUnavailableError), self._ledger.locked():
            self._make_room(0)

    def _make_folders(self) -> None:
        shards = (self._objects_folder / f"{shard:02x}" for shard in range(256))
        for made in (self._temporary_folder, self._objects_folder, *shards):
            made.mkdir(mode=0o700, exist_ok=True)

    def _choose_max_bytes(self, folder: Path, default_max_bytes: int) -> int:
        """Counts what the folder holds already as free, so that every opener agrees."""
        disk = shutil.disk_usage(folder)
        own_bytes = min(self._ledger.read(), disk.used)
        return min(default_max_bytes, (disk.free + own_bytes) // 2)

    def touch_if_alive(self, key: bytes) -> bool:
        """Whether an object exists and is alive; it is touched then. Takes no lock."""
        return self._touch_if_alive(self._path(key))

    def read_into(self, key: bytes, buffer: memoryview) -> GetStatus:
        """Reads and touches an object."""
        try:
            fd = os.open(self._path(key), _READ_FLAGS)
        except OSError as error:
            if error.errno in _NOT_AN_OBJECT:
                return GetStatus.MISSING
            raise
        try:
            status = os.fstat(fd)
            if not self._is_alive(status):
                return GetStatus.MISSING
            if status.st_size != buffer.nbytes or not read_all(fd, buffer):
                return GetStatus.WRONG_SIZE
            touch(fd)
            return GetStatus.HIT
        finally:
            os.close(fd)

    def put(self, key: bytes, value: memoryview) -> None:
        """Commits an object, or touches the one that exists."""
        path = self._path(key)
        if not self._touch_if_alive(path):
            self._remove_if_expired(path)
            self._write(path, value)

    def remove(self, keys: Sequence[bytes]) -> int:
        """Removes objects; returns how many were there and alive."""
        with self._ledger.locked():
            return sum(self._remove(self._path(key)) for key in keys)

    def num_bytes(self) -> int:
        """Bytes in use; counts expired objects until a listing removes them."""
        return self._ledger.read()

    def close(self) -> None:
        """Closes the ledger. Once."""
        self._ledger.close()

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._objects_folder / name[:2] / name

    def _is_alive(self, status: os.stat_result | None) -> bool:
        return (
            status is not None
            and stat.S_ISREG(status.st_mode)
            and time.time_ns() - status.st_mtime_ns <= self._ttl_ns
        )

    def _touch_if_alive(self, path: Path) -> bool:
        if self._is_alive(status_of(path)):
            with suppress(FileNotFoundError):  # evicted just now
                touch(path)
                return True
        return False

    def _remove_if_expired(self, path: Path) -> None:
        """Makes an expired object's name free for a new one."""
        if status_of(path) is None:
            return
        with self._ledger.locked():
            if not self._is_alive(status_of(path)):
                self._remove(path)

    def _remove(self, path: Path) -> bool:
        """Removes an object's file, under the lock; whether it was alive."""
        status = status_of(path)
        if status is None or not stat.S_ISREG(status.st_mode):
            return False
        path.unlink(missing_ok=True)
        self._ledger.add(-status.st_size)
        return self._is_alive(status)

    def _write(self, path: Path, value: memoryview) -> None:
        """Writes an object that did not exist a moment ago."""
        temporary = self._temporary_folder / uuid4().hex
        fd = self._reserve(temporary, value.nbytes)
        try:
            write_all(fd, value)
            touch(fd)
            is_committed = self._commit(temporary, path, value.nbytes)
        except OSError:
            with self._ledger.locked():
                self._give_back(temporary, value.nbytes)
            raise
        finally:
            os.close(fd)
        if not is_committed:
            self._touch_if_alive(path)

    def _reserve(self, temporary: Path, num_bytes: int) -> int:
        """Makes room and a file of the full size, whose descriptor is locked."""
        if num_bytes > self._max_bytes:
            message = f"an object of {num_bytes} bytes exceeds max_bytes={self._max_bytes}"
            raise StoreUnavailableError(message)
        with self._ledger.locked():
            if self._ledger.read() + num_bytes > self._max_bytes:
                self._make_room(num_bytes)
            fd = os.open(temporary, _CREATE_FLAGS, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, num_bytes)
            self._ledger.add(num_bytes)
        return fd

    def _commit(self, temporary: Path, path: Path, num_bytes: int) -> bool:
        """Gives a whole object its name; False if another writer was first."""
        with self._ledger.locked():
            if status_of(path) is None:
                temporary.rename(path)
                return True
            self._give_back(temporary, num_bytes)
            return False

    def _give_back(self, temporary: Path, num_bytes: int) -> None:
        """Undoes `_reserve`. Under the lock."""
        temporary.unlink(missing_ok=True)
        self._ledger.add(-num_bytes)

    def _make_room(self, num_bytes: int) -> None:
        """Lists the folder, removes the dead and the oldest, corrects the ledger.

        Under the lock. Afterwards `num_bytes` more fit the bound.
        """
        objects = list(self._list_objects())
        used_bytes = sum(found.num_bytes for found in objects) + self._sweep_temporary_files()
        self._ledger.write(used_bytes)
        expired_ns = time.time_ns() - self._ttl_ns
        goal_bytes = self._max_bytes
        if used_bytes + num_bytes > self._max_bytes:
            goal_bytes = max(0, self._max_bytes * 7 // 8 - num_bytes)
        for found in sorted(objects, key=lambda found: found.touched_ns):
            if found.touched_ns >= expired_ns and self._ledger.read() <= goal_bytes:
                return
            self._remove(found.path)

    def _list_objects(self) -> Iterator[_FoundObject]:
        for path in self._objects_folder.glob("??/*"):
            status = status_of(path)
            if (
                status is not None
                and stat.S_ISREG(status.st_mode)
                and re.fullmatch("([0-9a-f]{2})+", path.name)
            ):
                yield _FoundObject(status.st_mtime_ns, status.st_size, path)

    def _sweep_temporary_files(self) -> int:
        """Removes dead writers' files; the bytes that living ones have reserved."""
        reserved_bytes = 0
        for path in self._temporary_folder.iterdir():
            try:
                fd = os.open(path, _SWEEP_FLAGS)
            except OSError:  # gone, or foreign
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            except BlockingIOError:
                reserved_bytes += os.fstat(fd).st_size
            finally:
                os.close(fd)
        return reserved_bytes
