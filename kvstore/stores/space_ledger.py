"""`SpaceLedger`: how many bytes a folder shared by processes holds, and its lock.

The numbers lie in a small file and change only under an exclusive `flock`, so
that all writers together keep to one bound without listing the folder. A
crash can leave them wrong; whoever lists the folder next puts them right.

    0  bytes of objects, those being written too, little-endian
    8  bytes of spare files
"""

import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from kvstore.store import StoreUnavailableError

__all__ = ["SpaceLedger"]

_RETRY_S = 0.0005
_NUMBERS = struct.Struct("<QQ")


class SpaceLedger:
    """The ledger of one folder, as one process holds it.

    Args:
        path: the ledger's file; made if absent.
        timeout_s: how long `locked` waits at most.

    Attributes:
        object_bytes: bytes of objects; to be read and changed under `locked` only, whose
            end writes it down.
        spare_bytes: bytes of spare files, likewise.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._timeout_s = timeout_s
        self._thread_lock = Lock()  # flock tells processes apart, not threads
        self.object_bytes = self.spare_bytes = 0

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
                self.object_bytes, self.spare_bytes = self._read()
                yield
            finally:
                self._write()
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

    def peek_object_bytes(self) -> int:
        """Bytes of objects as last written down; needs no lock."""
        return self._read()[0]

    def _read(self) -> tuple[int, int]:
        """The numbers; 0 where a crash left nothing readable."""
        written = os.pread(self._fd, _NUMBERS.size, 0)
        object_bytes, spare_bytes = _NUMBERS.unpack(written.ljust(_NUMBERS.size, b"\0"))
        return object_bytes, spare_bytes

    def _write(self) -> None:
        numbers = (max(0, self.object_bytes), max(0, self.spare_bytes))
        os.pwrite(self._fd, _NUMBERS.pack(*numbers), 0)

    def close(self) -> None:
        """Closes the file, after whoever holds the lock."""
        with self._thread_lock:
            os.close(self._fd)
