"""`Writers`: which processes that write to a store are alive."""

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from kvstore.stores.files import try_lock

__all__ = ["Writers"]

_MARK_NAME = "[0-9a-f]{16}"
_MARK_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Writers:
    """Marks this process as alive, by a locked file whose lock ends with the process.

    Args:
        folder: of the marks; made if absent.

    Attributes:
        own: this writer's number, which no other writer has or had.

    Raises:
        OSError: the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = folder
        self.own = secrets.randbits(63) + 1
        path = self._path(self.own)
        made = path.with_suffix(".new")  # not a mark before it is locked and renamed
        self._fd = os.open(made, _MARK_FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        made.rename(path)
        self._lock = Lock()
        self._num_writing = 0
        self._is_closed = False

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keeps the mark during the block, also if `close` is called: its extents are in use."""
        with self._lock:
            self._num_writing += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_writing -= 1
                self._end_if_over()

    def living(self) -> set[int]:
        """Returns the numbers of living writers; removes the marks of dead ones."""
        return {
            int(path.name, 16)
            for path in self._folder.iterdir()
            if re.fullmatch(_MARK_NAME, path.name) and _is_locked(path)
        }

    def close(self) -> None:
        """Removes the mark, once no thread is writing. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._end_if_over()

    def _end_if_over(self) -> None:
        if self._is_closed and not self._num_writing and self._fd != -1:
            with suppress(OSError):  # the folder may have been removed
                self._path(self.own).unlink()
            os.close(self._fd)
            self._fd = -1

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:016x}"


def _is_locked(path: Path) -> bool:
    """Whether a mark is locked; removes it if it is not."""
    try:
        fd = os.open(path, _MARK_FLAGS)
    except FileNotFoundError:  # its writer ended just now
        return False
    try:
        if not try_lock(fd):
            return True
        path.unlink(missing_ok=True)
        return False
    finally:
        os.close(fd)
