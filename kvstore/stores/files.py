"""Helpers for stores in files: `FileLock`, complete reads and writes, and error translation."""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from kvstore.store import StoreUnavailableError

__all__ = [
    "FileLock",
    "create_locked",
    "is_private",
    "os_errors_as_unavailable",
    "read_all",
    "status_of",
    "sync_folder",
    "touch",
    "try_lock",
    "write_all",
]

_RETRY_S = 0.0001
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_CLOSED = -1


def try_lock(fd: int) -> bool:
    """Takes the exclusive `flock` of an open file; returns False if another process holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class FileLock:
    """An exclusive `flock` between threads and processes. It ends with the process that holds it.

    Args:
        path: the file; made if absent.
        timeout_s: longest that `locked` waits.

    Attributes:
        fd: the file's descriptor, open for reading and writing; invalid after `close`.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        self.fd = os.open(path, _FLAGS, 0o600)
        self._timeout_s = timeout_s
        self._thread_lock = Lock()  # flock does not exclude threads of one process

    @contextmanager
    def locked(self, deadline_s: float | None = None) -> Iterator[None]:
        """Holds the lock against all threads and processes.

        Args:
            deadline_s: when to stop waiting, by the monotonic clock; None for after `timeout_s`.

        Raises:
            OSError: the lock was closed.
            StoreUnavailableError: another holder, perhaps a stopped process, kept it for
                that long.
        """
        began_s = time.monotonic()
        if deadline_s is None:
            deadline_s = began_s + self._timeout_s
        if not self._thread_lock.acquire(timeout=max(0, deadline_s - began_s)):
            raise self._timed_out()
        try:
            self._lock_file(deadline_s)
            try:
                yield
            finally:
                fcntl.flock(self.fd, fcntl.LOCK_UN)
        finally:
            self._thread_lock.release()

    @property
    def is_removed(self) -> bool:
        """Whether the file was deleted, so that other processes lock another file or none."""
        return not os.fstat(self.fd).st_nlink

    def close(self) -> None:
        """Closes the file, once no thread of this process holds the lock. Idempotent."""
        with self._thread_lock:
            fd, self.fd = self.fd, _CLOSED
            if fd != _CLOSED:
                os.close(fd)

    def _lock_file(self, deadline_s: float) -> None:
        """Polls, because a blocking flock has no timeout."""
        if self.fd == _CLOSED:
            raise OSError(errno.EBADF, "the store is closed")
        while not try_lock(self.fd):
            if time.monotonic() > deadline_s:
                raise self._timed_out()
            time.sleep(_RETRY_S)

    def _timed_out(self) -> StoreUnavailableError:
        return StoreUnavailableError(f"the folder's lock was not free for {self._timeout_s:g} s")


_CREATE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


@contextmanager
def os_errors_as_unavailable() -> Iterator[None]:
    """Raises the operating system's errors (full, read-only, broken) as `StoreUnavailableError`."""
    try:
        yield
    except OSError as error:
        raise StoreUnavailableError(f"{error.strerror} ({error.filename or 'write'})") from error


def create_locked(path: str, num_bytes: int) -> int:
    """Makes a file of that size and locks it; returns its descriptor."""
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
    """Returns the status of a path, not of what it links to; None if nothing is there."""
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def is_private(folder: Path, *, shares_group: bool = False) -> bool:
    """Whether only this user can have put anything into a folder.

    The question is to be asked after the folder was made, since another user may make it before.
    A yes stays true: nobody else can replace a folder of this user in a place such as /dev/shm.

    Args:
        folder: the folder, which exists; the answer is no for a link to one.
        shares_group: whether members of a group of this process may have done so, too, in a folder
            that they can write to, such as a volume in Kubernetes.

    Raises:
        OSError: the folder cannot be opened for another reason than its owner or its kind.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.ELOOP, errno.ENOTDIR):
            return False
        raise
    try:
        status = os.fstat(fd)
    finally:
        os.close(fd)
    if not shares_group:
        return status.st_uid == os.getuid() and status.st_mode & 0o077 == 0
    is_of_group = status.st_mode & stat.S_IWGRP and status.st_gid in {os.getgid(), *os.getgroups()}
    is_own = status.st_uid == os.getuid() or bool(is_of_group)
    return is_own and not status.st_mode & stat.S_IWOTH


def touch(target: int | str) -> None:
    """Sets the modification time to now, by the clock that ages are measured with."""
    now_ns = time.time_ns()
    os.utime(target, ns=(now_ns, now_ns))


def sync_folder(path: Path) -> None:
    """Returns once the file names of a folder are on its disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_all(fd: int, views: Sequence[memoryview]) -> bool:
    """Fills views from an open file, in order; returns False if the file is too short."""
    left = _without(views, 0)
    while left:
        num_read = os.readv(fd, left)
        if num_read == 0:
            return False
        left = _without(left, num_read)
    return True


def write_all(fd: int, views: Sequence[memoryview]) -> None:
    """Writes all views to an open file, in order, from its beginning."""
    written, left = 0, _without(views, 0)
    while left:
        num_written = os.pwritev(fd, left, written)
        written += num_written
        left = _without(left, num_written)


def _without(views: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """Returns what is left of views behind their first bytes; the first of it is not empty."""
    for index, part in enumerate(views):
        if num_bytes < part.nbytes:
            return [part[num_bytes:], *views[index + 1 :]]
        num_bytes -= part.nbytes
    return []
