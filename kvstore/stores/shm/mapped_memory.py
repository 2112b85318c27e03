"""`MappedMemory`: the bytes of a store's objects, in a file that its processes map and that grows.

Copies into mapped memory cost no call of the kernel and, the second time, no page fault: they are
what `memcpy` is; many objects at a time (`kvstore.memory_runs`). The file is as long as what was
ever laid out in it, and takes memory only where there is something.
"""

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from ctypes import CDLL, addressof, c_char, c_size_t, c_void_p, get_errno
from pathlib import Path
from threading import Lock

from kvstore.memory_runs import copy_runs
from kvstore.store import KvObject

__all__ = ["MappedMemory", "Place"]

_FIRST_BYTES = 64 << 20
_MADV_POPULATE_WRITE = 23  # of Linux 5.14; the mmap module does not name it

_LIBC = CDLL(None, use_errno=True)

Place = tuple[int, KvObject]
"""The offset of an object in the file, and the memory that its bytes are copied from or to."""


class MappedMemory:
    """The memory of one store, as one process maps it. Calls in different places do not hinder
    each other.

    Args:
        path: the file; made if absent.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._lock = Lock()  # so that nobody is at the file as it is closed
        self._view = memoryview(bytearray())

    @property
    def free_bytes(self) -> int:
        """That the file system has left."""
        status = os.fstatvfs(self._fd)
        return status.f_bavail * status.f_frsize

    def grow_to(self, num_bytes: int) -> None:
        """Makes the file long enough, which takes no memory. Needs the store's lock."""
        length = os.fstat(self._fd).st_size
        if length < num_bytes:
            os.ftruncate(self._fd, max(num_bytes, 2 * length, _FIRST_BYTES))

    def provide(self, start: int, num_bytes: int) -> None:
        """Puts memory behind bytes. Who wrote where there is none, and none to be had, would be
        killed.

        Raises:
            OSError: there is none.
        """
        if num_bytes:
            with self._lock:  # the number may be another file's by now, were it closed meanwhile
                os.posix_fallocate(self._fd, start, num_bytes)

    def map_in(self, start: int, num_bytes: int) -> None:
        """Has pages that have memory behind them mapped here, before who writes there finds that
        they are not. Not every system can.
        """
        with suppress(OSError):
            self._advise(start, num_bytes, _MADV_POPULATE_WRITE)

    def let_go(self, start: int, num_bytes: int) -> None:
        """Gives the memory behind whole pages back. Who looks at them has it put there again, and
        is killed if there is none.
        """
        self._advise(start, num_bytes, mmap.MADV_REMOVE)

    def write(self, places: Sequence[Place]) -> None:
        """Copies parts to bytes that have memory behind them."""
        there, parts = self._pairs(places)
        copy_runs(there, parts)

    def read(self, places: Sequence[Place]) -> None:
        """Copies bytes to parts."""
        there, parts = self._pairs(places)
        copy_runs(parts, there)

    def close(self) -> None:
        """Closes the file, which stays mapped for as long as somebody is at it. Once."""
        with self._lock:  # no file means anonymous memory to who maps, which would be a hit
            fd, self._fd = self._fd, -1
            os.close(fd)
            self._view = memoryview(bytearray())

    def _advise(self, start: int, num_bytes: int, advice: int) -> None:
        """`madvise`, without the interpreter's lock, which the mmap module's holds."""
        if not num_bytes:
            return
        with self._mapped(start + num_bytes)[start:] as there:
            address = c_void_p(addressof(c_char.from_buffer(there)))
            if _LIBC.madvise(address, c_size_t(num_bytes), advice):
                raise OSError(get_errno(), os.strerror(get_errno()))

    def _pairs(self, places: Sequence[Place]) -> tuple[list[memoryview], list[memoryview]]:
        """Where each part lies here, and the parts."""
        spans: list[tuple[int, int]] = []
        for start, (header, payload) in places:
            split = start + header.nbytes
            spans += ((start, split), (split, split + payload.nbytes))
        mapped = self._mapped(max([end for _, end in spans], default=0))
        there = [mapped[start:end] for start, end in spans]
        return there, [view for _, views in places for view in views]

    def _mapped(self, end: int) -> memoryview:
        """The file, mapped at least up to there.

        Raises:
            OSError: it was closed.
        """
        view = self._view
        if len(view) < end:
            with self._lock:
                view = self._view
                if len(view) < end:
                    # What was mapped before goes when nobody is at it any more.
                    num_bytes = os.fstat(self._fd).st_size
                    view = self._view = memoryview(mmap.mmap(self._fd, num_bytes))
        return view
