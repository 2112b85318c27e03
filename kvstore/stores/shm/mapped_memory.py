"""`MappedMemory`: the bytes of a store's objects, in a growing file that its processes map.

A copy into mapped memory takes no system call and, from the second time on, no page fault, so it is
as fast as `memcpy`. Many objects are copied at a time (`kvstore.memory_runs`). The file is sparse:
it is as long as all extents, and takes memory only for pages that were allocated.
"""

import mmap
import os
from collections.abc import Sequence
from ctypes import CDLL, addressof, c_char, c_size_t, c_void_p, get_errno
from pathlib import Path
from threading import Lock

from kvstore.memory_runs import copy_runs
from kvstore.store import KvObject

__all__ = ["MappedMemory", "Place"]

_FIRST_BYTES = 64 << 20

_LIBC = CDLL(None, use_errno=True)

Place = tuple[int, KvObject]
"""The offset of an object in the file, and the memory that its bytes are copied from or to."""


class MappedMemory:
    """The memory of one store, as one process maps it. Calls for different bytes run concurrently.

    Args:
        path: the file; made if absent.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._lock = Lock()  # held while the descriptor is used, so that it is not closed then
        self._view = memoryview(bytearray())

    def grow_to(self, num_bytes: int) -> None:
        """Makes the file at least that long; this takes no memory. Needs the store's lock."""
        length = os.fstat(self._fd).st_size
        if length < num_bytes:
            os.ftruncate(self._fd, max(num_bytes, 2 * length, _FIRST_BYTES))

    def provide(self, start: int, num_bytes: int) -> None:
        """Allocates memory for a range; writing an unallocated page of a full /dev/shm raises
        SIGBUS.

        Raises:
            OSError: the file system is full.
        """
        if num_bytes:
            with self._lock:  # after a close, the descriptor could be another file's
                os.posix_fallocate(self._fd, start, num_bytes)

    def let_go(self, start: int, num_bytes: int) -> None:
        """Returns the memory of whole pages to the system. Reading them allocates it again, and
        raises SIGBUS if there is none.
        """
        self._advise(start, num_bytes, mmap.MADV_REMOVE)

    def write(self, places: Sequence[Place]) -> None:
        """Copies objects into allocated memory."""
        targets, parts = self._pairs(places)
        copy_runs(targets, parts)

    def read(self, places: Sequence[Place]) -> None:
        """Copies objects out of the memory."""
        runs, parts = self._pairs(places)
        copy_runs(parts, runs)

    def close(self) -> None:
        """Closes the file. It stays mapped while any thread uses it. Called once."""
        with self._lock:  # mapping descriptor -1 would give anonymous memory instead of an error
            fd, self._fd = self._fd, -1
            os.close(fd)
            self._view = memoryview(bytearray())

    def _advise(self, start: int, num_bytes: int, advice: int) -> None:
        """Calls `madvise` without the GIL, which `mmap.madvise` holds."""
        if not num_bytes:
            return
        with self._mapped(start + num_bytes)[start:] as pages:
            address = c_void_p(addressof(c_char.from_buffer(pages)))
            if _LIBC.madvise(address, c_size_t(num_bytes), advice):
                raise OSError(get_errno(), os.strerror(get_errno()))

    def _pairs(self, places: Sequence[Place]) -> tuple[list[memoryview], list[memoryview]]:
        """Returns the mapped bytes of each view of the objects, and these views."""
        spans: list[tuple[int, int]] = []
        for start, (header, payload) in places:
            split = start + header.nbytes
            spans += ((start, split), (split, split + payload.nbytes))
        mapped = self._mapped(max([end for _, end in spans], default=0))
        runs = [mapped[start:end] for start, end in spans]
        return runs, [view for _, views in places for view in views]

    def _mapped(self, end: int) -> memoryview:
        """Returns a view of the mapped file, at least up to `end`.

        Raises:
            OSError: the file was closed.
        """
        view = self._view
        if len(view) < end:
            with self._lock:
                view = self._view
                if len(view) < end:
                    # The old mapping is dropped once no thread uses it.
                    num_bytes = os.fstat(self._fd).st_size
                    view = self._view = memoryview(mmap.mmap(self._fd, num_bytes))
        return view
