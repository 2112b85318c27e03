"""`ObjectFolder`: immutable objects as files of one folder that processes share.

`kvstore.stores.file.folder_space` says how the folder is laid out, locked and bounded.
An object is written whole to a reserved file, which is then renamed to the
object's name unless that exists. So it appears whole or not at all, and is
never replaced. Where it is not synced, the codec's digest refuses what a power
cut tore; where it is, it is on the disk before it has its name.

Bytes are written and read without the folder's lock; a batch of new objects
takes it twice, and reads and look-ups do not.

What is not a regular file of the right name is never read; what is foreign in
the folder is left alone.
"""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvstore.store import GetStatus, KvObject
from kvstore.stores.base import batches
from kvstore.stores.file.folder_space import FolderSpace, ReservedFile
from kvstore.stores.files import read_all, status_of, sync_folder, touch, write_all

__all__ = ["ObjectFolder"]

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NOT_AN_OBJECT = (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EACCES)


@dataclass(frozen=True, slots=True)
class _NewObject:
    """An object on its way: the name it shall have, and where it is until then."""

    path: str
    content: KvObject
    file: ReservedFile


class ObjectFolder:
    """The objects of one folder. Thread-safe; methods raise `OSError` where the file
    system refuses, `StoreUnavailableError` where there is no room or no lock to be had.

    Args:
        space: the folder, its bound and its lock.
        syncs: whether a put returns only once its objects are on the disk.
    """

    def __init__(self, space: FolderSpace, *, syncs: bool) -> None:
        self._space = space
        self._syncs = syncs
        self.counters = space.counters

    @property
    def oldest_age_s(self) -> float | None:
        """See `BoundedSpace.oldest_age_s`."""
        return self._space.oldest_age_s

    def count_prefix(self, keys: Sequence[bytes]) -> int:
        """See `StoredObjects.count_prefix`. Takes no lock."""
        paths = map(self._path, keys)
        missing = (i for i, path in enumerate(paths) if not self._touch_if_alive(path))
        return next(missing, len(keys))

    def get_into(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> list[GetStatus]:
        """See `StoredObjects.get_into`. Takes no lock."""
        pairs = zip(map(self._path, keys), objects, strict=True)
        return [self._read_into(path, there) for path, there in pairs]

    def put(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> None:
        """See `StoredObjects.put`."""
        named = zip(map(self._path, keys), objects, strict=True)
        new = (pair for pair in named if not self._touch_if_alive(pair[0]))
        for batch in batches(new, self._space.max_bytes):
            self._put_batch(batch)

    def remove(self, keys: Sequence[bytes]) -> int:
        """See `StoredObjects.remove`."""
        with self._space.locked():
            return sum(self._space.remove(self._path(key)) for key in keys)

    def num_bytes(self) -> int:
        """See `FolderSpace.num_bytes`."""
        return self._space.num_bytes()

    def close(self) -> None:
        """See `StoredObjects.close`."""
        self._space.close()

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._space.objects_folder}/{name[:2]}/{name}"

    def _read_into(self, path: str, there: KvObject) -> GetStatus:
        with _opened(path) as fd:
            if fd is None or not self._space.is_alive(status := os.fstat(fd)):
                return GetStatus.MISSING
            if status.st_size != there.nbytes or not read_all(fd, there):
                return GetStatus.WRONG_SIZE
            # One that was evicted just now is no hit: that would promise a lease.
            return GetStatus.HIT if _touch(path) else GetStatus.MISSING

    def _touch_if_alive(self, path: str) -> bool:
        return self._space.is_alive(status_of(path)) and _touch(path)

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
        touch(new.file.fd)
        if self._syncs:
            os.fsync(new.file.fd)


@contextmanager
def _opened(path: str) -> Iterator[int | None]:
    """An object's file, open for reading; None where there is none."""
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


def _touch(path: str) -> bool:
    """Touches what was there a moment ago; whether it still is."""
    try:
        touch(path)
    except FileNotFoundError:
        return False
    return True
