"""`SpaceLedger`: how many bytes a folder's objects take, and the folder's lock."""

import os
import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

from kvstore.stores.file.folder_listing import FolderClock
from kvstore.stores.files import FileLock, OutdatedFilesError

__all__ = ["ReadOnlyLedger", "SpaceLedger"]

_NUMBER = struct.Struct("<Q")


class SpaceLedger:
    """How many bytes a folder's objects take, in a small file that is also the folder's lock.

    The number is little-endian and changes only under an exclusive `flock`, so that all writers
    together keep to one bound without listing the folder. A crash can leave it wrong; the next
    listing corrects it.

    Args:
        path: the ledger's file; made if absent.
        timeout_s: longest that `locked` waits.

    Attributes:
        object_bytes: bytes of objects, including those being written. Read and changed only under
            `locked`, which writes it to the file at its end.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self.object_bytes = 0
        FileLock(path, timeout_s).close()

    @contextmanager
    def locked(self, clock: FolderClock) -> Iterator[None]:
        """Holds the folder's lock; see `FileLock.locked`.

        Args:
            clock: is compared with the file system's.

        Raises:
            FileNotFoundError: the file was removed.
            OutdatedFilesError: the path leads to another file by now.
        """
        lock = FileLock(self._path, self._timeout_s, makes=False)
        with closing(lock), lock.locked():
            lock.check_path()
            clock.measure(lock.fd)
            self.object_bytes = _read_number(lock.fd)
            try:
                yield
            finally:
                number = _NUMBER.pack(max(0, self.object_bytes))
                os.pwrite(lock.fd, number, 0)

    def peek_object_bytes(self) -> int:
        """Returns the number in the file; needs no lock.

        Raises:
            OSError: the file cannot be opened.
        """
        with self._path.open("rb") as file:
            return _read_number(file.fileno())


def _read_number(fd: int) -> int:
    """Returns the number in a ledger's file, 0 if a crash left less than a number."""
    written = os.pread(fd, _NUMBER.size, 0)
    number: int = _NUMBER.unpack(written.ljust(_NUMBER.size, b"\0"))[0]
    return number


class ReadOnlyLedger:
    """The ledger of a folder that could not be opened for writing.

    Args:
        refusal: why not.
    """

    object_bytes = 0

    def __init__(self, refusal: str) -> None:
        self._refusal = refusal

    def locked(self, clock: FolderClock) -> AbstractContextManager[None]:
        """Refuses.

        Raises:
            OutdatedFilesError: always; opened anew, the folder may take writes.
        """
        raise OutdatedFilesError(self._refusal)

    def peek_object_bytes(self) -> int:
        """Returns 0: the number is not known."""
        return 0
