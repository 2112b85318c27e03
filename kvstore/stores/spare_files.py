"""`SpareFiles`: files of removed objects, whose memory new objects of their size are written to.

Fresh pages of shared memory cost about as much as the copy into them. So a
file that an object left stays among the unnamed ones, up to a bound, and the
next object of exactly its size takes it. All calls need the folder's lock.

Who reads an object holds a shared `flock` on its file, and who takes a spare
file needs the exclusive one. A file that is still being read is passed over.
"""
# ruff: noqa: PTH108  paths are strings: making a `Path` costs as much as the call

import fcntl
import os
from collections import defaultdict
from collections.abc import Iterable

from kvstore.stores.folder_listing import UnnamedFile
from kvstore.stores.space_ledger import SpaceLedger

__all__ = ["SpareFiles"]

_TAKE_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class SpareFiles:
    """The spare files of a folder that this process knows.

    Args:
        ledger: where their bytes are counted.
    """

    def __init__(self, ledger: SpaceLedger) -> None:
        self._ledger = ledger
        self._known: defaultdict[int, list[str]] = defaultdict(list)

    def add(self, path: str, num_bytes: int) -> None:
        """Takes in a file that nobody needs."""
        self._known[num_bytes].append(path)
        self._ledger.spare_bytes += num_bytes

    def replace(self, found: Iterable[UnnamedFile]) -> None:
        """Forgets what it knew for what a listing found; corrects the ledger."""
        self._known.clear()
        self._ledger.spare_bytes = 0
        for file in found:
            self.add(file.path, file.num_bytes)

    def take(self, num_bytes: int) -> tuple[str, int] | None:
        """A spare file of that size and its locked descriptor; None if none is known."""
        while self._known[num_bytes]:
            path = self._known[num_bytes].pop()
            try:
                fd = os.open(path, _TAKE_FLAGS)
            except FileNotFoundError:  # another process took it, and told the ledger
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
            else:
                self._ledger.spare_bytes -= num_bytes
                return path, fd
        return None

    def shrink(self, limit_bytes: int) -> None:
        """Lets go of the spare files that are too many for a bound."""
        for num_bytes in list(self._known):
            while self._ledger.spare_bytes > limit_bytes and (taken := self.take(num_bytes)):
                path, fd = taken
                os.unlink(path)
                os.close(fd)
