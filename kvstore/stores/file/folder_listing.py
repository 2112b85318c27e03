"""Lists an `ObjectFolder` by the age of its objects, and `FolderClock`, by which they have it."""

import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from kvstore.stores.files import try_lock
from kvstore.url import StoreLimits

__all__ = ["FolderClock", "FoundObject", "UnnamedFile", "list_objects", "list_unnamed"]

_TOLERANCE_NS = 10**9
_FUTURE_NS = 3 * _TOLERANCE_NS  # later than two machines date that tolerate a difference each
_MEASURE_S = 5.0

_logger = logging.getLogger("baton.kvstore")
_OBJECT_NAME = re.compile("([0-9a-f]{2})+")
_SWEEP_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class FolderClock:
    """The clock of a folder's file system, which all machines that mount it have in common.

    The clock of a machine may be ahead of that of another one. An object that was touched a moment
    ago would then look old, and be evicted in spite of its lease. So a machine whose clock is not
    that of the file system adds the difference. Times that differ by less than a second are finer,
    and taken as they are. Where each machine stamps files with its own clock, as on some
    cluster file systems, this finds no difference: there, clocks must agree within `lease_s`.

    Args:
        limits: of the store.
    """

    def __init__(self, limits: StoreLimits) -> None:
        self._store = limits.store
        self._lease_s = limits.lease_s
        self._ahead_ns = 0  # of this machine's clock
        self._next_measure_s = float("-inf")
        self._has_warned = {"own": False, "other": False}

    def now_ns(self) -> int:
        """Returns the time."""
        return time.time_ns() - self._ahead_ns

    def measure(self, fd: int) -> None:
        """Compares this machine's clock with that of the file system, every few seconds.

        Args:
            fd: a file in the folder; it is touched.
        """
        if time.monotonic() < self._next_measure_s:
            return
        self._next_measure_s = time.monotonic() + _MEASURE_S
        own_ns = time.time_ns()
        try:
            os.utime(fd)
            ahead_ns = own_ns - os.fstat(fd).st_ctime_ns  # the file system alone sets this time
        except OSError:
            return  # the last difference is the best that is known
        self._ahead_ns = ahead_ns if abs(ahead_ns) > _TOLERANCE_NS else 0
        if self._ahead_ns:
            self._warn(
                "own",
                f"this machine's clock is {_difference(ahead_ns)} that of the file system, by "
                "which objects are dated from now on; correct it (NTP)",
            )

    def note_touch(self, touched_ns: int) -> None:
        """Notes by which date an object was touched; warns if that is in the future."""
        ahead_ns = touched_ns - self.now_ns()
        if ahead_ns > _FUTURE_NS:
            self._warn(
                "other",
                f"an object is dated {ahead_ns / 1e9:.0f} s in the future: another machine's clock "
                "is ahead, or this one's was set back. If clocks differ by more than "
                f"lease_s={self._lease_s:g}, objects are evicted during their lease: correct them "
                "(NTP)",
            )

    def _warn(self, kind: str, text: str) -> None:
        if not self._has_warned[kind]:
            self._has_warned[kind] = True
            _logger.warning("%s: %s", self._store, text)


def _difference(ahead_ns: int) -> str:
    return f"{abs(ahead_ns) / 1e9:.0f} s {'ahead of' if ahead_ns > 0 else 'behind'}"


@dataclass(frozen=True, slots=True, order=True)
class FoundObject:
    """An object as a listing found it; the least recently touched sorts first."""

    touched_ns: int
    num_bytes: int
    path: str


@dataclass(frozen=True, slots=True)
class UnnamedFile:
    """A file that does not have an object's name.

    Attributes:
        path: of the file.
        num_bytes: its size.
        is_held: whether a living writer has locked it.
    """

    path: str
    num_bytes: int
    is_held: bool


def list_objects(folder: str) -> list[FoundObject]:
    """Returns the objects in a folder's shards, the least recently touched first."""
    return sorted(_walk(folder))


def _walk(folder: str) -> Iterator[FoundObject]:
    with os.scandir(folder) as shards:
        names = [shard.path for shard in shards if shard.is_dir(follow_symlinks=False)]
    for name in names:
        with os.scandir(name) as files:
            for file in files:
                with suppress(FileNotFoundError):  # by another program: this process has the lock
                    status = file.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) and _OBJECT_NAME.fullmatch(file.name):
                        yield FoundObject(status.st_mtime_ns, status.st_size, file.path)


def list_unnamed(folder: str) -> list[UnnamedFile]:
    """Returns the files in a folder that are not objects, or not yet."""
    with os.scandir(folder) as files:
        paths = [file.path for file in files]
    return [unnamed for path in paths if (unnamed := _look_at(path)) is not None]


def _look_at(path: str) -> UnnamedFile | None:
    try:
        fd = os.open(path, _SWEEP_FLAGS)
    except OSError:  # removed meanwhile, or not a writer's
        return None
    try:
        return UnnamedFile(path, os.fstat(fd).st_size, is_held=not try_lock(fd))
    finally:
        os.close(fd)
