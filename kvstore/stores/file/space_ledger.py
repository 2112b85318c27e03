"""`SpaceLedger`: how many bytes a folder shared by processes holds, and its lock.

The number lies in a small file, little-endian, and changes only under an exclusive
`flock`, so that all writers together keep to one bound without listing the folder.
A crash can leave it wrong; whoever lists the folder next puts it right.
"""

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.stores.files import FileLock

__all__ = ["SpaceLedger"]

_NUMBER = struct.Struct("<Q")


class SpaceLedger:
    """The ledger of one folder, as one process holds it.

    Args:
        path: the ledger's file; made if absent.
        timeout_s: how long `locked` waits at most.

    Attributes:
        object_bytes: bytes of objects, those being written too; to be read and changed under
            `locked` only, whose end writes it down.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._lock = FileLock(path, timeout_s)
        self.object_bytes = 0

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the folder's lock; see `FileLock.locked`."""
        with self._lock.locked():
            self.object_bytes = self.peek_object_bytes()
            try:
                yield
            finally:
                number = _NUMBER.pack(max(0, self.object_bytes))
                os.pwrite(self._lock.fd, number, 0)

    def peek_object_bytes(self) -> int:
        """Bytes of objects as last written down, 0 where a crash left nothing readable; needs no
        lock.
        """
        written = os.pread(self._lock.fd, _NUMBER.size, 0)
        number: int = _NUMBER.unpack(written.ljust(_NUMBER.size, b"\0"))[0]
        return number

    def close(self) -> None:
        """Closes the file, after whoever holds the lock."""
        self._lock.close()
