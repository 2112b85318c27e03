"""Whole reads and writes of open files, and their errors told as a store's."""

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvstore.store import StoreUnavailableError

__all__ = [
    "create_locked",
    "os_errors_as_unavailable",
    "read_all",
    "status_of",
    "sync_folder",
    "touch",
    "write_all",
]

_CREATE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


@contextmanager
def os_errors_as_unavailable() -> Iterator[None]:
    """Turns what the operating system refuses (full, read-only, broken) into the store's error."""
    try:
        yield
    except OSError as error:
        raise StoreUnavailableError(f"{error.strerror} ({error.filename or 'write'})") from error


def create_locked(path: str, num_bytes: int) -> int:
    """The descriptor of a new file of that size, which is locked."""
    fd = os.open(path, _CREATE_FLAGS, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, num_bytes)
    except OSError:
        os.close(fd)
        os.unlink(path)  # noqa: PTH108  a string, as all paths here
        raise
    return fd


def status_of(path: str) -> os.stat_result | None:
    """The status of a path itself, not of what it links to; None where nothing is."""
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def touch(target: int | str) -> None:
    """Sets the modification time to now, by the clock that ages are measured with."""
    now_ns = time.time_ns()
    os.utime(target, ns=(now_ns, now_ns))


def sync_folder(path: Path) -> None:
    """Returns once the names in a folder are on its disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_all(fd: int, parts: Sequence[memoryview]) -> bool:
    """Fills the parts, one after the other, from an open file; whether the file held enough."""
    left = _without(parts, 0)
    while left:
        num_read = os.readv(fd, left)
        if num_read == 0:
            return False
        left = _without(left, num_read)
    return True


def write_all(fd: int, parts: Sequence[memoryview]) -> None:
    """Writes all parts, one after the other, to an open file, from its beginning."""
    written, left = 0, _without(parts, 0)
    while left:
        num_written = os.pwritev(fd, left, written)
        written += num_written
        left = _without(left, num_written)


def _without(parts: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of the parts behind so many bytes; nothing that is empty comes first."""
    for index, part in enumerate(parts):
        if num_bytes < part.nbytes:
            return [part[num_bytes:], *parts[index + 1 :]]
        num_bytes -= part.nbytes
    return []
