"""`SpaceBound`: how many bytes the objects of a store may take together."""

import logging
import shutil
import time
from pathlib import Path

from kvstore.url import StoreLimits

__all__ = ["SpaceBound"]

_UPDATE_S = 1.0
_LOGGED_CHANGE = 1.25  # a bound that changed by this factor is logged again
_MIB = 1 << 20

_logger = logging.getLogger("baton.kvstore")


class SpaceBound:
    """The bound of a store: the URL's `max_bytes`, or one that follows the file system.

    Without `max_bytes` it is half of what the file system has left for the store, up to the
    store's default. What the store takes already counts as left, so that all openers find the same
    bound. It is computed anew as the store is used, because other programs fill and free the disk.
    It never falls below what the store holds: then each put makes room for what it adds, and no
    more. It is logged when it is found, and when it has changed a lot.

    Args:
        folder: the store's.
        limits: the URL's.

    Attributes:
        max_bytes: the bound; 0 before the first `update` if the URL names none.
    """

    def __init__(self, folder: Path, limits: StoreLimits) -> None:
        self.max_bytes = limits.max_bytes or 0
        self._folder = folder
        self._store = limits.store
        self._default_max_bytes = limits.default_max_bytes
        self._is_fixed = limits.max_bytes is not None
        self._free_bytes = 0  # that the file system has left
        self._logged_bytes: int | None = None
        self._next_update_s = float("-inf")

    def update(self, own_bytes: int, object_bytes: int, num_more_bytes: int = 0) -> None:
        """Computes the bound anew if it is old, or if more objects would exceed one that may grow.

        Args:
            own_bytes: what the store takes of the file system.
            object_bytes: bytes of all objects.
            num_more_bytes: bytes of objects that are to be added.
        """
        if self._is_fixed:
            self._log_change()
            return
        now_s = time.monotonic()
        fits = object_bytes + num_more_bytes <= self.max_bytes
        may_grow = not fits and self.max_bytes < self._default_max_bytes
        if now_s < self._next_update_s and not may_grow:
            return
        self._next_update_s = now_s + _UPDATE_S
        disk = shutil.disk_usage(self._folder)
        self._free_bytes = disk.free
        left_bytes = disk.free + min(own_bytes, disk.used)
        wanted_bytes = min(self._default_max_bytes, left_bytes // 2)
        self.max_bytes = max(wanted_bytes, min(object_bytes, disk.used))
        self._log_change()

    def why_full(self, num_bytes: int) -> str:
        """Returns why there is no room for `num_bytes` more."""
        text = f"no room for {num_bytes} bytes: "
        if self._is_disk_full:
            return text + (
                f"disk full: {self._left()}, and all objects of the store are leased; free some "
                "space there, or lower lease_s"
            )
        return text + (
            f"the store is full of leased objects: its bound is {_size(self.max_bytes)}"
            f"{'' if self._is_fixed else f', as {self._left()}'}; raise max_bytes or lower lease_s"
        )

    def why_too_large(self, num_bytes: int) -> str:
        """Returns why an object of `num_bytes` is refused."""
        if self._is_fixed:
            return f"an object of {num_bytes} bytes exceeds max_bytes={self.max_bytes}"
        text = f"an object of {num_bytes} bytes exceeds the store's bound of {self.max_bytes} bytes"
        if self._is_disk_full or num_bytes > self._free_bytes:
            return f"disk full: {self._left()}, and {text}; free some space there"
        return f"{text}, as {self._left()}; set max_bytes"

    @property
    def _is_disk_full(self) -> bool:
        """Whether other files have taken what the store could have."""
        return not self._is_fixed and self._free_bytes < self.max_bytes // 2

    def _left(self) -> str:
        return f"{self._folder} has {_size(self._free_bytes)} left"

    def _log_change(self) -> None:
        if self._logged_bytes == self.max_bytes:
            return
        if self._logged_bytes is not None:
            lower_bytes, higher_bytes = sorted((self.max_bytes, self._logged_bytes))
            if higher_bytes <= _LOGGED_CHANGE * max(lower_bytes, _MIB):
                return
        self._logged_bytes = self.max_bytes
        reason = "max_bytes" if self._is_fixed else f"without max_bytes: {self._left()}"
        _logger.info("%s holds up to %s (%s)", self._store, _size(self.max_bytes), reason)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.1f} MiB" if num_bytes >= _MIB else f"{num_bytes} bytes"
