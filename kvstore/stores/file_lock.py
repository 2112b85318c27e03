"""`FileLock`: a lock between the threads and processes that open one file."""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from kvstore.store import StoreUnavailableError

__all__ = ["FileLock", "try_lock"]

_RETRY_S = 0.0001
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_CLOSED = -1


def try_lock(fd: int) -> bool:
    """Takes the exclusive `flock` of an open file; False if another holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class FileLock:
    """An exclusive `flock`, which ends with whoever held it.

    Args:
        path: the file; made if absent.
        timeout_s: how long `locked` waits at most.

    Attributes:
        fd: of the file, open for reading and writing; no file's after `close`.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        self.fd = os.open(path, _FLAGS, 0o600)
        self._timeout_s = timeout_s
        self._thread_lock = Lock()  # flock tells processes apart, not threads

    @contextmanager
    def locked(self, deadline_s: float | None = None) -> Iterator[None]:
        """Holds the lock against all threads and processes.

        Args:
            deadline_s: until when to wait, by the monotonic clock, if not for `timeout_s`.

        Raises:
            OSError: it was closed.
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
        """Whether others find another file there, or none."""
        return not os.fstat(self.fd).st_nlink

    def close(self) -> None:
        """Closes the file, after whoever holds the lock. Idempotent."""
        with self._thread_lock:
            fd, self.fd = self.fd, _CLOSED
            if fd != _CLOSED:
                os.close(fd)

    def _lock_file(self, deadline_s: float) -> None:
        """Polls, because a blocking flock knows no timeout."""
        if self.fd == _CLOSED:
            raise OSError(errno.EBADF, "the store is closed")
        while not try_lock(self.fd):
            if time.monotonic() > deadline_s:
                raise self._timed_out()
            time.sleep(_RETRY_S)

    def _timed_out(self) -> StoreUnavailableError:
        return StoreUnavailableError(f"the folder's lock was not free for {self._timeout_s:g} s")
