"""Lists an `ObjectFolder`: its objects by age, and the files that are not objects yet."""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from kvstore.stores.files import try_lock

__all__ = ["FoundObject", "UnnamedFile", "list_objects", "list_unnamed"]

_OBJECT_NAME = re.compile("([0-9a-f]{2})+")
_SWEEP_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, order=True)
class FoundObject:
    """An object as a listing found it; the least recently touched sorts first."""

    touched_ns: int
    num_bytes: int
    path: str


@dataclass(frozen=True, slots=True)
class UnnamedFile:
    """A file that does not have an object's name.

    Attributes:
        path: of the file.
        num_bytes: its size.
        is_held: whether a living writer has locked it.
    """

    path: str
    num_bytes: int
    is_held: bool


def list_objects(folder: str) -> list[FoundObject]:
    """Returns the objects in a folder's shards, the least recently touched first."""
    return sorted(_walk(folder))


def _walk(folder: str) -> Iterator[FoundObject]:
    with os.scandir(folder) as shards:
        names = [shard.path for shard in shards if shard.is_dir(follow_symlinks=False)]
    for name in names:
        with os.scandir(name) as files:
            for file in files:
                with suppress(FileNotFoundError):  # by another program: this process has the lock
                    status = file.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) and _OBJECT_NAME.fullmatch(file.name):
                        yield FoundObject(status.st_mtime_ns, status.st_size, file.path)


def list_unnamed(folder: str) -> list[UnnamedFile]:
    """Returns the files in a folder that are not objects, or not yet."""
    with os.scandir(folder) as files:
        paths = [file.path for file in files]
    return [unnamed for path in paths if (unnamed := _look_at(path)) is not None]


def _look_at(path: str) -> UnnamedFile | None:
    try:
        fd = os.open(path, _SWEEP_FLAGS)
    except OSError:  # removed meanwhile, or not a writer's
        return None
    try:
        return UnnamedFile(path, os.fstat(fd).st_size, is_held=not try_lock(fd))
    finally:
        os.close(fd)
