"""`file:///path`: one file per object, shared by the processes that mount the folder.

`kvstore.stores.file.folder_space` describes how the folder is laid out, locked and bounded. An
object is written whole to a reserved file, which is then renamed to the object's name unless that
exists. So an object appears whole or not at all, and is never replaced. With `fsync=commit` it is
on the disk before it gets its name; without, the codec's digest detects what a power cut tore.

Bytes are written and read without the folder's lock. A batch of new objects takes the lock twice,
reads and look-ups do not take it. Files that are not regular or do not have an object's name are
never read, and left alone. A folder without the right to write is read.
"""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from typing_extensions import override

from baton.common.machine_limits import is_in_memory
from kvstore.store import GetStatus, KvObject, StoreCapabilities
from kvstore.stores.base import SharedStore, StoreCounters, batches
from kvstore.stores.file.folder_listing import FolderClock
from kvstore.stores.file.folder_space import FolderSpace, ReservedFile
from kvstore.stores.files import read_all, status_of, sync_folder, touch, write_all
from kvstore.url import LIMIT_OPTIONS, StoreUrl, bound_in_memory

__all__ = ["FileStore", "ObjectFolder"]

_DEFAULT_MAX_BYTES = 16 << 30
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NOT_AN_OBJECT = (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EACCES)


class FileStore(SharedStore):
    """A store on a disk; made by `from_url`."""

    capabilities = StoreCapabilities(
        shared_between_processes=True,
        shared_between_hosts=False,
        survives_restart=True,
        takes_max_bytes=True,
        keeps_leases=True,
    )

    @classmethod
    @override
    def _from_url(cls, url: str, *, is_diagnosis: bool) -> Self:
        """Opens `file:///path?ttl_s=&lease_s=&max_bytes=&timeout_s=&fsync=`; makes the folder.

        `fsync` is "never" or "commit". With "commit", a put returns once its objects are on the
        disk.

        Raises:
            ConfigurationError: the path is not absolute, or leads to a file; an option is wrong.
        """
        parts = StoreUrl.parse(url, (*LIMIT_OPTIONS, "fsync"))
        syncs = parts.choice("fsync", "never", "commit") == "commit"
        if parts.authority or not parts.path.strip("/"):
            raise parts.error("write file:///absolute/path")
        folder = Path(parts.path)
        limits = parts.limits(_default_bound(folder), is_diagnosis=is_diagnosis)
        clock = FolderClock(limits)

        def open_folder(counters: StoreCounters) -> ObjectFolder:
            return ObjectFolder(FolderSpace(folder, limits, clock, counters), syncs=syncs)

        return cls(open_folder, parts, folder, limits)

    @classmethod
    @override
    def memory_bytes(cls, url: str) -> int:
        """Counts objects in a file system that lies in memory, such as tmpfs; a limit of memory
        does not count others, whose cached pages the kernel takes back.
        """
        parts = StoreUrl.parse(url, (*LIMIT_OPTIONS, "fsync"))
        path = Path(parts.path)
        if not is_in_memory(path):
            return 0
        return parts.num_bytes("max_bytes") or bound_in_memory(_DEFAULT_MAX_BYTES, path)


def _default_bound(path: Path) -> int:
    return bound_in_memory(_DEFAULT_MAX_BYTES) if is_in_memory(path) else _DEFAULT_MAX_BYTES


@dataclass(frozen=True, slots=True)
class _NewObject:
    """An object that is being put: its final path, its bytes, and its file until then."""

    path: str
    content: KvObject
    file: ReservedFile


class ObjectFolder:
    """The objects of one folder; implements `StoredObjects`.

    Args:
        space: the folder, its bound and its lock.
        syncs: whether a put returns only once its objects are on the disk.
    """

    def __init__(self, space: FolderSpace, *, syncs: bool) -> None:
        self._space = space
        self._syncs = syncs

    @property
    def oldest_age_s(self) -> float | None:
        """Seconds since the oldest object was touched; see `BoundedSpace.oldest_age_s`."""
        return self._space.oldest_age_s

    def count_prefix(self, keys: Sequence[bytes]) -> int:
        """Counts and touches the leading keys that exist, without the folder's lock."""
        paths = map(self._path, keys)
        missing = (i for i, path in enumerate(paths) if not self._touch_if_alive(path))
        return next(missing, len(keys))

    def get_into(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> list[GetStatus]:
        """Reads and touches objects, without the folder's lock."""
        pairs = zip(map(self._path, keys), objects, strict=True)
        return [self._read_into(path, target) for path, target in pairs]

    def put(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> None:
        """Commits new objects batch by batch; touches those that exist."""
        named = zip(map(self._path, keys), objects, strict=True)
        new = (pair for pair in named if not self._touch_if_alive(pair[0]))
        for batch in batches(new, self._space.max_bytes):
            self._put_batch(batch)

    def remove(self, keys: Sequence[bytes]) -> int:
        """Removes objects under the folder's lock; returns how many were alive."""
        with self._space.locked():
            return sum(self._space.remove(self._path(key)) for key in keys)

    def num_bytes(self) -> int:
        """Returns the bytes in use; see `FolderSpace.num_bytes`."""
        return self._space.num_bytes()

    def close(self) -> None:
        """Closes the folder."""
        self._space.close()

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._space.objects_folder}/{name[:2]}/{name}"

    def _read_into(self, path: str, target: KvObject) -> GetStatus:
        with _opened(path) as fd:
            if fd is None or not self._space.is_alive(status := os.fstat(fd)):
                return GetStatus.MISSING
            if status.st_size != target.nbytes or not read_all(fd, target):
                return GetStatus.WRONG_SIZE
            # An object that was evicted meanwhile is not a hit, because a hit has a lease.
            return GetStatus.HIT if self._space.touch(path) else GetStatus.MISSING

    def _touch_if_alive(self, path: str) -> bool:
        return self._space.is_alive(status_of(path)) and self._space.touch(path)

    def _put_batch(self, batch: Sequence[tuple[str, KvObject]]) -> None:
        """Writes objects that did not exist a moment ago."""
        opened: list[_NewObject] = []
        try:
            self._reserve(batch, opened)
            for new in opened:
                self._write(new)
            with self._space.locked():
                late = [n.path for n in opened if not self._space.commit(n.file, n.path)]
            if self._syncs:
                for shard in {Path(new.path).parent for new in opened}:
                    sync_folder(shard)
        except OSError:
            with self._space.locked():
                for new in opened:
                    self._space.give_back(new.file)
            raise
        finally:
            for new in opened:
                os.close(new.file.fd)
        for path in late:
            self._touch_if_alive(path)

    def _reserve(self, batch: Sequence[tuple[str, KvObject]], opened: list[_NewObject]) -> None:
        """Makes room and files for a batch."""
        with self._space.locked():
            self._space.make_room(sum(content.nbytes for _, content in batch))
            for path, content in batch:
                file = self._space.reserve(content.nbytes)
                opened.append(_NewObject(path, content, file))

    def _write(self, new: _NewObject) -> None:
        write_all(new.file.fd, new.content)
        touch(new.file.fd, self._space.clock.now_ns())
        if self._syncs:
            os.fsync(new.file.fd)


@contextmanager
def _opened(path: str) -> Iterator[int | None]:
    """Opens an object's file for reading; yields None if there is none."""
    try:
        fd = os.open(path, _READ_FLAGS)
    except OSError as error:
        if error.errno not in _NOT_AN_OBJECT:
            raise
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)
