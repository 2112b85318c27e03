"""`SpaceLedger`: how many bytes a folder shared by processes holds, and its lock.

The number lies in a small file and changes only under an exclusive `flock`,
so that all writers together keep to one bound without listing the folder. A
crash can leave it wrong; whoever lists the folder next puts it right.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from kvstore.store import StoreUnavailableError

__all__ = ["SpaceLedger"]

_RETRY_S = 0.0005
_NUMBER_BYTES = 8


class SpaceLedger:
    """The ledger of one folder, as one process holds it.

    Args:
        path: the ledger's file; made if absent.
        timeout_s: how long `locked` waits at most.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._timeout_s = timeout_s
        self._thread_lock = Lock()  # flock tells processes apart, not threads

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the folder's lock against all threads and processes.

        Raises:
            StoreUnavailableError: another holder, perhaps a stopped process,
                kept it for `timeout_s`.
        """
        deadline_s = time.monotonic() + self._timeout_s
        if not self._thread_lock.acquire(timeout=self._timeout_s):
            raise self._timed_out()
        try:
            self._lock_file(deadline_s)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._thread_lock.release()

    def _lock_file(self, deadline_s: float) -> None:
        """Polls, because a blocking flock knows no timeout."""
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise self._timed_out() from None
                time.sleep(_RETRY_S)
            else:
                return

    def _timed_out(self) -> StoreUnavailableError:
        return StoreUnavailableError(f"the folder's lock was not free for {self._timeout_s:g} s")

    def read(self) -> int:
        """Bytes in use; 0 where a crash left nothing readable. No lock needed."""
        return int.from_bytes(os.pread(self._fd, _NUMBER_BYTES, 0), "little")

    def write(self, num_bytes: int) -> None:
        """Replaces the number. Under `locked` only."""
        os.pwrite(self._fd, max(0, num_bytes).to_bytes(_NUMBER_BYTES, "little"), 0)

    def add(self, num_bytes: int) -> None:
        """Adds to the number, or takes away. Under `locked` only."""
        self.write(self.read() + num_bytes)

    def close(self) -> None:
        """Closes the file, after whoever holds the lock."""
        with self._thread_lock:
            os.close(self._fd)
