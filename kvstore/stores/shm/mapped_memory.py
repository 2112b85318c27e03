"""`MappedMemory`: the bytes of a store's objects, in a file that its processes map and that grows.

Copies into mapped memory cost no call of the kernel and, the second time, no page fault: they are
what `memcpy` is. The file is as long as what was ever laid out in it, and takes memory only where
there is something.
"""

import mmap
import os
from pathlib import Path
from threading import Lock

import numpy as np

from kvstore.stores.parts_store import Parts, total_bytes

__all__ = ["MappedMemory"]

_FIRST_BYTES = 64 << 20
# Below it the interpreter's lock, which numpy lets go of for its copies, costs more than a copy.
_LEAST_UNLOCKED_BYTES = 4096


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
        self._remaps = Lock()
        self._view = memoryview(bytearray())

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
            os.posix_fallocate(self._fd, start, num_bytes)

    def let_go(self, start: int, num_bytes: int) -> None:
        """Gives the memory behind whole pages back. Who looks at them has it put there again, and
        is killed if there is none.
        """
        if num_bytes:
            mapped = self._mapped(start + num_bytes).obj
            assert isinstance(mapped, mmap.mmap)
            mapped.madvise(mmap.MADV_REMOVE, start, num_bytes)

    def write(self, start: int, parts: Parts) -> None:
        """Copies parts to bytes that have memory behind them, one after the other."""
        mapped = self._mapped(start + total_bytes(parts))
        for part in parts:
            there = mapped[start : start + part.nbytes]
            _copy(there, part)
            start += part.nbytes

    def read(self, start: int, parts: Parts) -> None:
        """Copies bytes to parts, one after the other."""
        mapped = self._mapped(start + total_bytes(parts))
        for part in parts:
            there = mapped[start : start + part.nbytes]
            _copy(part, there)
            start += part.nbytes

    def close(self) -> None:
        """Closes the file, which stays mapped for as long as somebody is at it. Once."""
        with self._remaps:  # no file means anonymous memory to who maps, which would be a hit
            fd, self._fd = self._fd, -1
            os.close(fd)
            self._view = memoryview(bytearray())

    def _mapped(self, end: int) -> memoryview:
        """The file, mapped at least up to there.

        Raises:
            OSError: it was closed.
        """
        view = self._view
        if len(view) < end:
            with self._remaps:
                view = self._view
                if len(view) < end:
                    # What was mapped before goes when nobody is at it any more.
                    num_bytes = os.fstat(self._fd).st_size
                    view = self._view = memoryview(mmap.mmap(self._fd, num_bytes))
        return view


def _copy(to: memoryview, source: memoryview) -> None:
    if to.nbytes < _LEAST_UNLOCKED_BYTES:
        to.cast("B")[:] = source.cast("B")
    else:
        np.copyto(np.frombuffer(to, np.uint8), np.frombuffer(source, np.uint8))
