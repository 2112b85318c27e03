"""`FolderClock`: the time by which the objects in a folder have their age."""

import logging
import os
import time

from kvstore.url import StoreLimits

__all__ = ["FolderClock"]

_TOLERANCE_NS = 10**9
_FUTURE_NS = 3 * _TOLERANCE_NS  # later than two machines date that tolerate a difference each
_MEASURE_S = 5.0

_logger = logging.getLogger("baton.kvstore")


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
