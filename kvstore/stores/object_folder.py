"""`ObjectFolder`: immutable objects as files of one folder that processes share.

    folder/objects/ab/ab12…   an object; the name is its key in hex
    folder/temporary/…        an object being written, locked by its writer
    folder/ledger             bytes in use, and the lock of whoever changes them

- Commit: an object is written whole under a temporary name and then renamed
  to its own, unless that exists. So it appears whole or not at all, and is
  never replaced. Where it is not synced, the codec's digest refuses what a
  power cut tore; where it is, it is on the disk before it has its name.
- Lock: names come and go only under the ledger's lock, so that two writers
  cannot both find a name free, and the ledger stays exact. Bytes are written
  and read without it, and a batch takes it twice, whatever its length.
- Age: a file's modification time is its last touch.
- Bound: every writer reserves its bytes in the ledger first. When they would
  exceed the bound, the writer lists the folder and removes the oldest objects
  down to 7/8 of it, so one listing pays for an eighth of the store.
- Leases: no lock keeps a touch from coming between the listing and the
  removal. So an object first loses its name, which makes touches fail, and gets
  it back if it was touched meanwhile.
- Crashes: a writer holds `flock` on its temporary file. One that nobody holds
  is a dead writer's, and the next listing removes it.

What is not a regular file of the right name is never read; what is foreign in
the folder is left alone.
"""
# ruff: noqa: PTH104, PTH108  paths are strings: making a `Path` costs as much as the call

import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from kvstore.store import GetStatus, StoreUnavailableError
from kvstore.stores.file_io import read_all, status_of, sync_folder, touch, write_all
from kvstore.stores.folder_listing import FoundObject, list_objects, sweep_temporary_files
from kvstore.stores.space_ledger import SpaceLedger

__all__ = ["ObjectFolder"]

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_NOT_AN_OBJECT = (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EACCES)
_MAX_BATCH_BYTES = 16 << 20
_MAX_BATCH_OBJECTS = 64  # each is an open file until the batch is committed


@dataclass(frozen=True, slots=True)
class _NewObject:
    """An object on its way: where it shall go, and the reserved file that is locked meanwhile."""

    path: str
    value: memoryview
    temporary: str
    fd: int


class ObjectFolder:
    """One process's access to the folder. Thread-safe; methods raise `OSError`
    where the file system refuses, `StoreUnavailableError` as `SpaceLedger` says.

    Args:
        folder: the folder, which exists.
        ttl_s: life of an object from its last touch.
        lease_s: of it, what eviction spares.
        max_bytes: bound of all objects together; None means half of what the
            file system has left for them, but not over `default_max_bytes`.
        default_max_bytes: see `max_bytes`.
        timeout_s: how long to wait for the folder's lock.
        syncs: whether a put returns only once its objects are on the disk.
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
        syncs: bool,
    ) -> None:
        self._ttl_ns = int(ttl_s * 1e9)
        self._lease_ns = int(lease_s * 1e9)
        self._syncs = syncs
        self._objects_folder = str(folder / "objects")
        self._temporary_folder = str(folder / "temporary")
        self._make_folders()
        self._ledger = SpaceLedger(folder / "ledger", timeout_s)
        self._max_bytes = max_bytes or self._choose_max_bytes(folder, default_max_bytes)
        with suppress(StoreUnavailableError), self._ledger.locked():
            self._make_room(0)

    def _make_folders(self) -> None:
        shards = (f"{self._objects_folder}/{shard:02x}" for shard in range(256))
        for made in (self._temporary_folder, self._objects_folder, *shards):
            Path(made).mkdir(mode=0o700, exist_ok=True)

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
        path = self._path(key)
        try:
            fd = os.open(path, _READ_FLAGS)
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
            touch(path)
            return GetStatus.HIT
        except FileNotFoundError:  # evicted just now: a hit would promise a lease
            return GetStatus.MISSING
        finally:
            os.close(fd)

    def put_many(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """Commits objects, or touches those that exist."""
        for value in values:
            if value.nbytes > self._max_bytes:
                message = f"an object of {value.nbytes} bytes exceeds max_bytes={self._max_bytes}"
                raise StoreUnavailableError(message)
        for batch in self._batches(zip(map(self._path, keys), values, strict=True)):
            self._put_batch(batch)

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

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._objects_folder}/{name[:2]}/{name}"

    def _is_alive(self, status: os.stat_result | None) -> bool:
        return (
            status is not None
            and stat.S_ISREG(status.st_mode)
            and time.time_ns() - status.st_mtime_ns <= self._ttl_ns
        )

    def _touch_if_alive(self, path: str) -> bool:
        if self._is_alive(status_of(path)):
            with suppress(FileNotFoundError):  # evicted just now
                touch(path)
                return True
        return False

    # Writing.

    def _batches(
        self, pairs: Iterator[tuple[str, memoryview]]
    ) -> Iterator[list[tuple[str, memoryview]]]:
        """The objects that do not exist, in batches of bounded size; touches the others."""
        batch: list[tuple[str, memoryview]] = []
        batch_bytes = 0
        limit_bytes = min(_MAX_BATCH_BYTES, self._max_bytes // 8)
        for path, value in pairs:
            if self._touch_if_alive(path):
                continue
            is_full = batch_bytes + value.nbytes > limit_bytes or len(batch) == _MAX_BATCH_OBJECTS
            if batch and is_full:
                yield batch
                batch, batch_bytes = [], 0
            batch.append((path, value))
            batch_bytes += value.nbytes
        if batch:
            yield batch

    def _put_batch(self, batch: Sequence[tuple[str, memoryview]]) -> None:
        """Writes objects that did not exist a moment ago."""
        opened: list[_NewObject] = []
        try:
            self._reserve(batch, opened)
            for new in opened:
                write_all(new.fd, new.value)
                touch(new.fd)
                if self._syncs:
                    os.fsync(new.fd)
            with self._ledger.locked():
                late = [new.path for new in opened if not self._commit(new)]
            if self._syncs:
                for shard in {Path(new.path).parent for new in opened}:
                    sync_folder(shard)
        except OSError:
            with self._ledger.locked():
                for new in opened:
                    self._give_back(new)
            raise
        finally:
            for new in opened:
                os.close(new.fd)
        for path in late:
            self._touch_if_alive(path)

    def _reserve(self, batch: Sequence[tuple[str, memoryview]], opened: list[_NewObject]) -> None:
        """Makes room and files of the full size, whose descriptors are locked."""
        num_bytes = sum(value.nbytes for _, value in batch)
        with self._ledger.locked():
            if self._ledger.read() + num_bytes > self._max_bytes:
                self._make_room(num_bytes)
            for path, value in batch:
                temporary = f"{self._temporary_folder}/{uuid4().hex}"
                fd = os.open(temporary, _CREATE_FLAGS, 0o600)
                opened.append(_NewObject(path, value, temporary, fd))
                self._ledger.add(value.nbytes)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(fd, value.nbytes)

    def _commit(self, new: _NewObject) -> bool:
        """Gives a whole object its name; False if another writer was first. Under the lock."""
        status = status_of(new.path)
        if status is not None and not self._is_alive(status):
            self._remove(new.path)
            status = status_of(new.path)
        if status is not None:
            self._give_back(new)
            return False
        os.rename(new.temporary, new.path)
        return True

    def _give_back(self, new: _NewObject) -> None:
        """Undoes the reservation of an object that is not committed. Under the lock."""
        with suppress(FileNotFoundError):
            os.unlink(new.temporary)
            self._ledger.add(-new.value.nbytes)

    # Removal. Under the lock.

    def _remove(self, path: str) -> bool:
        """Removes an object's file; whether it was alive."""
        status = status_of(path)
        if status is None or not stat.S_ISREG(status.st_mode):
            return False
        os.unlink(path)
        self._ledger.add(-status.st_size)
        return self._is_alive(status)

    def _make_room(self, num_bytes: int) -> None:
        """Lists the folder, removes the dead and the oldest, corrects the ledger.

        Afterwards `num_bytes` more fit the bound.

        Raises:
            StoreUnavailableError: leased objects leave too little room; none was evicted.
        """
        objects = list_objects(self._objects_folder)
        used_bytes = sum(found.num_bytes for found in objects)
        self._ledger.write(used_bytes + sweep_temporary_files(self._temporary_folder))
        now_ns = time.time_ns()
        for found in objects:
            if found.touched_ns < now_ns - self._ttl_ns:
                self._remove(found.path)
        if self._ledger.read() + num_bytes > self._max_bytes:
            first_expired_ns, first_leased_ns = now_ns - self._ttl_ns, now_ns - self._lease_ns
            self._evict(
                [o for o in objects if first_expired_ns <= o.touched_ns <= first_leased_ns],
                num_bytes,
            )

    def _evict(self, unleased: Sequence[FoundObject], num_bytes: int) -> None:
        """Removes the oldest objects until an eighth of the bound is free behind `num_bytes`."""
        kept_bytes = self._ledger.read() - sum(found.num_bytes for found in unleased)
        if kept_bytes + num_bytes <= self._max_bytes:
            goal_bytes = max(0, self._max_bytes * 7 // 8 - num_bytes)
            for found in unleased:
                if self._ledger.read() <= goal_bytes:
                    return
                self._remove_unless_touched(found)
        if self._ledger.read() + num_bytes > self._max_bytes:
            raise StoreUnavailableError(
                f"no room for {num_bytes} bytes: the store is full of leased objects"
            )

    def _remove_unless_touched(self, found: FoundObject) -> None:
        """Removes an object, but not if it was touched after it was found."""
        aside = f"{self._temporary_folder}/{uuid4().hex}"
        os.rename(found.path, aside)
        if os.lstat(aside).st_mtime_ns != found.touched_ns:
            os.rename(aside, found.path)
            return
        os.unlink(aside)
        self._ledger.add(-found.num_bytes)
