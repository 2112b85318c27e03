"""Helpers for stores in files: `FileLock`, complete reads and writes, and error translation."""

import errno
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from kvstore.store import StoreUnavailableError
from kvstore.stores.refusals import NO_SPACE, explain

__all__ = [
    "FileLock",
    "OutdatedFilesError",
    "create_locked",
    "os_errors_as_unavailable",
    "read_all",
    "status_of",
    "sync_folder",
    "touch",
    "touch_if_allowed",
    "try_lock",
    "write_all",
]

_MIN_RETRY_S, _MAX_RETRY_S = 0.0001, 0.001
_PATH_CHECK_S = 1.0
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_CLOSED = -1
_TOUCH_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM, *NO_SPACE)


class OutdatedFilesError(StoreUnavailableError):
    """The files that a store has opened are of no use any more; opening it anew may help."""


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
        path: the file.
        timeout_s: longest that `locked` waits.
        makes: whether the file is made if it is absent.

    Attributes:
        fd: the file's descriptor, open for reading and writing; invalid after `close`.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, timeout_s: float, *, makes: bool = True) -> None:
        self.fd = os.open(path, _FLAGS | os.O_CREAT if makes else _FLAGS, 0o600)
        self._path = os.fspath(path)
        self._timeout_s = timeout_s
        self._thread_lock = Lock()  # flock does not exclude threads of one process
        self._next_path_check_s = float("-inf")

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

    def check_path(self) -> None:
        """Checks that the path still leads to the file, so that all processes lock the same one.

        It does not after the file or a folder around it was removed or moved, and after something
        was mounted or unmounted there. A removal is noticed at once, the rest within a second, as
        this is called for each look-up.

        Raises:
            OutdatedFilesError: the path leads to another file or to none.
        """
        opened, now_s = os.fstat(self.fd), time.monotonic()
        if opened.st_nlink and now_s < self._next_path_check_s:
            return
        self._next_path_check_s = now_s + _PATH_CHECK_S
        try:
            named = os.lstat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            raise OutdatedFilesError(f"{self._path} was removed") from None
        if (named.st_dev, named.st_ino) != (opened.st_dev, opened.st_ino):
            raise OutdatedFilesError(f"{self._path} was replaced")

    def close(self) -> None:
        """Closes the file, once no thread of this process holds the lock. Idempotent."""
        with self._thread_lock:
            fd, self.fd = self.fd, _CLOSED
            if fd != _CLOSED:
                os.close(fd)

    def _lock_file(self, deadline_s: float) -> None:
        """Polls, because a blocking flock has no timeout; ever less often, as each waiting thread
        does so.
        """
        if self.fd == _CLOSED:
            raise OSError(errno.EBADF, "the store is closed")
        pause_s = _MIN_RETRY_S
        while not try_lock(self.fd):
            if time.monotonic() > deadline_s:
                raise self._timed_out()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_RETRY_S)

    def _timed_out(self) -> StoreUnavailableError:
        return StoreUnavailableError(f"the folder's lock was not free for {self._timeout_s:g} s")


_CREATE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


@contextmanager
def os_errors_as_unavailable(folder: Path | None = None) -> Iterator[None]:
    """Raises the operating system's errors (full, read-only, broken) as `StoreUnavailableError`.

    Args:
        folder: where the block works; errors that name no file name it.
    """
    try:
        yield
    except OSError as error:
        raise StoreUnavailableError(explain(error, folder)) from error


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


def touch(target: int | str, now_ns: int) -> None:
    """Sets the modification time."""
    os.utime(target, ns=(now_ns, now_ns))


def touch_if_allowed(path: str, now_ns: int) -> bool:
    """Touches a file; returns False if it does not exist.

    A file that cannot be touched can perhaps still be read, as on a disk that is read-only or full.
    """
    try:
        touch(path, now_ns)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno not in _TOUCH_REFUSED:
            raise
    return True


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
    """Returns the rest of views behind their first bytes; its first view is not empty."""
    for index, part in enumerate(views):
        if num_bytes < part.nbytes:
            return [part[num_bytes:], *views[index + 1 :]]
        num_bytes -= part.nbytes
    return []
