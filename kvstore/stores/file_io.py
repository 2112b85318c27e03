"""Whole reads and writes of open files, and their errors told as a store's."""

import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.store import StoreUnavailableError

__all__ = [
    "create_locked",
    "map_all",
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


def read_all(fd: int, buffer: memoryview) -> bool:
    """Fills the buffer from an open file; whether the file held enough."""
    filled = 0
    while filled < len(buffer):
        num_read = os.readv(fd, [buffer[filled:]])
        if num_read == 0:
            return False
        filled += num_read
    return True


def map_all(fd: int, num_bytes: int) -> memoryview:
    """The bytes of an open file where they lie, read-only.

    The view keeps the file open, and what is locked of it; its end ends both.
    """
    if not num_bytes:
        return memoryview(b"")
    return memoryview(mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ))


def write_all(fd: int, value: memoryview) -> None:
    """Writes all of a value to an open file, from its beginning."""
    written = 0
    while written < len(value):
        written += os.pwrite(fd, value[written:], written)
