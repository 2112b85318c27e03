"""What lies in an `ObjectFolder`: its objects by age, and what dead writers left."""

import fcntl
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FoundObject", "list_objects", "sweep_temporary_files"]

_OBJECT_NAME = re.compile("([0-9a-f]{2})+")
_SWEEP_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, order=True)
class FoundObject:
    """One object as a listing saw it; the least recently touched sorts first."""

    touched_ns: int
    num_bytes: int
    path: str


def list_objects(folder: str) -> list[FoundObject]:
    """The objects in a folder's shards, the least recently touched first."""
    return sorted(_walk(folder))


def _walk(folder: str) -> Iterator[FoundObject]:
    with os.scandir(folder) as shards:
        names = [shard.path for shard in shards if shard.is_dir(follow_symlinks=False)]
    for name in names:
        with os.scandir(name) as files:
            for file in files:
                try:
                    status = file.stat(follow_symlinks=False)
                except FileNotFoundError:  # not by one of us, who hold the lock
                    continue
                if stat.S_ISREG(status.st_mode) and _OBJECT_NAME.fullmatch(file.name):
                    yield FoundObject(status.st_mtime_ns, status.st_size, file.path)


def sweep_temporary_files(folder: str) -> int:
    """Removes the files that nobody holds; the bytes of those that writers have reserved."""
    reserved_bytes = 0
    for path in [*Path(folder).iterdir()]:
        try:
            fd = os.open(path, _SWEEP_FLAGS)
        except OSError:  # gone, or foreign
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        except BlockingIOError:
            reserved_bytes += os.fstat(fd).st_size
        finally:
            os.close(fd)
    return reserved_bytes
